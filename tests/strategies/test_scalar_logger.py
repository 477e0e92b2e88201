"""Logging: one number for all replicas (users' report B02), in files that survive what happens to them."""

from __future__ import annotations

import csv
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import strategies


@pytest.fixture
def strategy() -> Iterator[strategies.MirroredStrategy]:
    with strategies.MirroredStrategy(["cpu:0", "cpu:1"]) as strategy:
        yield strategy


def one_and_two() -> np.float64:
    context = strategies.get_replica_context()
    assert context is not None
    return np.float64(context.replica_id_in_sync_group + 1)


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def table_of(path: Path) -> list[dict[str, str]]:
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


# ------------------------------------------------------------------------------------------- reductions


def test_a_per_replica_value_without_a_reduction_is_refused_and_with_one_is_logged(
    strategy: strategies.MirroredStrategy,
) -> None:
    loss = strategy.run(one_and_two)
    log = strategies.ScalarLogger(path=None)
    with pytest.raises(ValueError, match=r"loss is a PerReplica of 2 replicas.*reduce='SUM'"):
        log.log(step=0, loss=loss)
    assert log.rows == []
    log.log(step=0, loss=loss, reduce="SUM")
    log.log(step=1, loss=loss, reduce=strategies.ReduceOp.MEAN)
    assert [row["loss"] for row in log.rows] == [3.0, 1.5]


def test_reductions_are_given_for_all_or_by_name(strategy: strategies.MirroredStrategy) -> None:
    each = strategy.run(one_and_two)
    log = strategies.ScalarLogger()
    log.log(0, a=each, b=each, c=7, reduce={"a": "SUM", "b": "MAX"})
    assert {name: log.rows[0][name] for name in "abc"} == {"a": 3.0, "b": 2.0, "c": 7}
    with pytest.raises(ValueError, match="got reduce= for d; need names that are logged: a"):
        log.log(0, a=each, reduce={"a": "SUM", "d": "SUM"})
    with pytest.raises(ValueError, match="b is a PerReplica"):
        log.log(0, a=each, b=each, reduce={"a": "SUM"})


def test_variables_arrays_of_one_element_and_numbers_are_logged_as_numbers(
    strategy: strategies.MirroredStrategy,
) -> None:
    with strategy.scope():
        rate = strategies.Variable(np.float32(0.5))
        seen = strategies.Variable(np.int64(0), synchronization="ON_READ", aggregation="SUM")
    strategy.run(lambda: seen.assign_add(3))
    log = strategies.ScalarLogger()
    log.log(
        np.int64(4), {"train/loss": np.array([[1.5]])}, rate=rate, seen=seen, ok=np.True_, n=np.float32(2)
    )
    row = log.rows[0]
    assert (row["step"], row["train/loss"], row["rate"], row["seen"], row["ok"], row["n"]) == (
        4,
        1.5,
        0.5,
        6,
        True,
        2.0,
    )


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda log: log.log(0), ValueError, "got no scalars"),
        (lambda log: log.log(0, {"a": 1}, a=2), ValueError, "got 'a' twice"),
        (lambda log: log.log(0, time=2), ValueError, "got the name 'time'"),
        (lambda log: log.log(0.5, a=2), TypeError, "got step=0.5; need an integer"),
        (lambda log: log.log(0, a=np.zeros(3)), ValueError, r"a: got an array of shape \(3,\)"),
        (lambda log: log.log(0, a=np.zeros(0)), ValueError, r"a: got an array of shape \(0,\)"),
        (lambda log: log.log(0, a="much"), TypeError, "a: got str 'much'; need a real number"),
        (lambda log: log.log(0, a=None), TypeError, "a: got NoneType None"),
        (lambda log: log.log(0, a=1j), TypeError, "a: got complex 1j"),
    ],
    ids=["nothing", "twice", "our_name", "step", "array", "empty", "string", "none", "complex"],
)
def test_what_cannot_be_logged_is_named(call: Any, error: type[Exception], words: str) -> None:
    log = strategies.ScalarLogger()
    with pytest.raises(error, match=words):
        call(log)
    assert log.rows == []


def test_logging_in_a_step_is_refused_as_each_replica_has_its_own_values(
    strategy: strategies.MirroredStrategy,
) -> None:
    log = strategies.ScalarLogger()
    with pytest.raises(strategies.ReplicaContextError, match=r"ScalarLogger\.log: called in replica"):
        strategy.run(lambda: log.log(0, loss=1.0))
    assert log.rows == []


# ------------------------------------------------------------------------------------------------ files


def test_json_lines_are_there_as_soon_as_log_returns(tmp_path: Path) -> None:
    path = tmp_path / "new" / "run.jsonl"
    before = time.time()
    with strategies.ScalarLogger(path) as log:
        log.log(3, loss=0.25, right=7)
        (row,) = lines_of(path)
        assert {**row, "time": 0} == {"step": 3, "time": 0, "loss": 0.25, "right": 7}
        assert before <= row["time"] <= time.time()
        log.log(1, loss=0.5)  # steps come in any order
    assert [row["step"] for row in lines_of(path)] == [3, 1]
    assert log.rows == []


def test_numbers_that_json_does_not_have_are_strings_that_float_reads(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    with strategies.ScalarLogger(path) as log:
        log.log(0, a=np.nan, b=np.inf, c=-np.inf)

    def refuse(word: str) -> None:
        raise AssertionError(f"{word} is no JSON")

    row = json.loads(path.read_text(), parse_constant=refuse)
    assert np.isnan(float(row["a"]))
    assert (float(row["b"]), float(row["c"])) == (np.inf, -np.inf)


@pytest.mark.parametrize("suffix", ["jsonl", "csv"])
def test_a_second_logger_appends(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"run.{suffix}"
    for step in range(3):
        with strategies.ScalarLogger(path) as log:
            log.log(step, loss=1 / (step + 1))
    rows: list[dict[str, Any]] = lines_of(path) if suffix == "jsonl" else table_of(path)
    assert [(int(row["step"]), float(row["loss"])) for row in rows] == [(0, 1.0), (1, 1 / 2), (2, 1 / 3)]


@pytest.mark.parametrize("suffix", ["jsonl", "csv"])
def test_half_a_line_of_a_killed_process_is_removed(
    tmp_path: Path, suffix: str, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / f"run.{suffix}"
    with strategies.ScalarLogger(path) as log:
        log.log(0, loss=0.5)
        log.log(1, loss=0.0123456)
    whole = path.read_bytes()
    path.write_bytes(whole[:-5])
    with strategies.ScalarLogger(path) as log:
        log.log(2, loss=0.25)
    rows: list[dict[str, Any]] = lines_of(path) if suffix == "jsonl" else table_of(path)
    assert [(int(row["step"]), float(row["loss"])) for row in rows] == [(0, 0.5), (2, 0.25)]
    assert "ended within a line; removed" in caplog.text


def test_a_row_is_whole_in_the_file_when_the_process_is_killed_right_after_it(tmp_path: Path) -> None:
    path = tmp_path / "run.csv"
    code = (
        "import os, signal, strategies\n"
        f"log = strategies.ScalarLogger({str(path)!r})\n"
        "for step in range(100): log.log(step, loss=step / 7)\n"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    done = subprocess.run([sys.executable, "-c", code], timeout=60, check=False)
    assert done.returncode == -signal.SIGKILL
    assert [float(row["loss"]) for row in table_of(path)] == [step / 7 for step in range(100)]


def test_a_new_name_gets_a_column_and_earlier_rows_stay_empty_there(tmp_path: Path) -> None:
    path = tmp_path / "run.csv"
    with strategies.ScalarLogger(path) as log:
        log.log(0, loss=0.5)
        log.log(1, {"accuracy, top 5": 0.9})
        log.log(2, loss=0.25)
    rows = table_of(path)
    assert list(rows[0]) == ["step", "time", "loss", "accuracy, top 5"]
    assert [(row["loss"], row["accuracy, top 5"]) for row in rows] == [("0.5", ""), ("", "0.9"), ("0.25", "")]
    assert os.listdir(tmp_path) == ["run.csv"]


def test_a_csv_of_somebody_else_is_not_touched(tmp_path: Path) -> None:
    path = tmp_path / "data.csv"
    path.write_text("name,age\nAda,36\n")
    with pytest.raises(ValueError, match="begins with 'name,age'; need a file of ours"):
        strategies.ScalarLogger(path)
    assert path.read_text() == "name,age\nAda,36\n"


def test_threads_log_whole_rows(tmp_path: Path) -> None:
    path = tmp_path / "run.csv"
    with strategies.ScalarLogger(path) as log:

        def work(number: int) -> None:
            for step in range(50):
                log.log(step, {f"loss_{number}": step})

        threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(20)
    rows = table_of(path)
    assert len(rows) == 200
    for number in range(4):
        assert [int(row[f"loss_{number}"]) for row in rows if row[f"loss_{number}"]] == list(range(50))


def test_tensorboard_files_hold_the_scalars(tmp_path: Path) -> None:
    pytest.importorskip("tensorboardX")
    from tensorboardX.proto.event_pb2 import Event

    with strategies.ScalarLogger(tmp_path / "board") as log:
        log.log(3, {"train/loss": 0.25})
        log.log(4, {"train/loss": 0.125, "accuracy": 1})
    (file,) = (tmp_path / "board").iterdir()
    content, position, found = file.read_bytes(), 0, []
    while position < len(content):  # length, its checksum, the event, its checksum
        length = int.from_bytes(content[position : position + 8], "little")
        event = Event.FromString(content[position + 12 : position + 12 + length])
        found += [(event.step, value.tag, value.simple_value) for value in event.summary.value]
        position += 16 + length
    assert found == [(3, "train/loss", 0.25), (4, "train/loss", 0.125), (4, "accuracy", 1.0)]


def test_the_format_goes_by_the_suffix_or_by_name(tmp_path: Path) -> None:
    with strategies.ScalarLogger(tmp_path / "run.log", format="jsonl") as log:
        log.log(0, loss=1.0)
    assert lines_of(tmp_path / "run.log")[0]["loss"] == 1.0
    with pytest.raises(ValueError, match=r"got the path .*run\.txt; need the suffix \.jsonl or \.csv"):
        strategies.ScalarLogger(tmp_path / "run.txt")
    with pytest.raises(ValueError, match="got format='xml'; need one of jsonl, csv, tensorboard"):
        strategies.ScalarLogger(tmp_path / "run.csv", format="xml")
    with pytest.raises(ValueError, match="got format='csv' and no path"):
        strategies.ScalarLogger(format="csv")


def test_a_closed_logger_refuses_and_keeps_its_rows() -> None:
    log = strategies.ScalarLogger()
    log.log(0, loss=1.0)
    log.close()
    log.close()
    with pytest.raises(ValueError, match=r"called after close\(\)"):
        log.log(1, loss=1.0)
    assert len(log.rows) == 1
