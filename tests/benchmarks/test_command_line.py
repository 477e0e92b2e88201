"""The suite from its command line, with tiny sizes: what is printed, written and refused."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.collective_kinds import KINDS
from benchmarks.command_line import run
from benchmarks.rivals import rival as rivals

INSTANT_RIVAL = """
import json, sys
print(json.dumps({"Instant": "1.0", "import_seconds": 0.5}), flush=True)
for line in sys.stdin:
    if line.startswith("quit"):
        break
    details = json.loads(line.split(" ", 2)[2])
    print(json.dumps({"seconds": [1e-3] * details["iterations"], "wrong": 0}), flush=True)
"""

TINY = ["-b", "8", "-e", "128", "-f", "4", "-n", "3", "-w", "1", "-T", "20"]


def rows_of(text: str) -> list[list[str]]:
    """The lines of nccl-tests' table."""
    return [line.split() for line in text.splitlines() if line and line.lstrip()[0].isdigit()]


def run_module(*arguments: str) -> str:
    """What ``python -m benchmarks`` prints, in a process of its own: there BLAS has one thread for each replica."""
    command = [sys.executable, "-m", "benchmarks", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout


@pytest.mark.parametrize("collective", list(KINDS))
def test_a_collective_prints_a_line_for_each_size_and_finds_nothing_wrong(
    collective: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run([collective, *TINY]) == 0
    out = capsys.readouterr().out
    rows = rows_of(out)
    assert [row[0] for row in rows] == ["8", "32", "128"]
    assert all(row[8] == "0" and row[12] in ("0", "N/A") for row in rows)
    lines = out.splitlines()
    assert lines[-2] == "# Out of bounds values : 0 OK"
    assert lines[-1].startswith("# Avg bus bandwidth    : ")


@pytest.mark.parametrize(
    ("flags", "dtype", "redop"),
    [
        (["-d", "double", "-o", "max"], "double", "max"),
        (["-d", "half", "-o", "avg"], "half", "avg"),
        (["-d", "int8", "-o", "sum"], "int8", "sum"),
        (["-d", "uint64", "-o", "prod"], "uint64", "prod"),
        (["-d", "int32", "-o", "min", "-c", "0"], "int32", "min"),
    ],
)
def test_dtypes_and_reductions_have_nccl_tests_names(
    flags: list[str], dtype: str, redop: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["reduce_scatter", "all_reduce", *TINY, "-t", "3", *flags]) == 0
    rows = rows_of(capsys.readouterr().out)
    assert {(row[2], row[3]) for row in rows} == {(dtype, redop)}


def test_bandwidth_follows_from_time_size_and_ranks(tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    assert (
        run(["all_reduce", "-b", "1M", "-e", "1M", "-n", "2", "-t", "4", "-T", "20", "--json", str(path)])
        == 0
    )
    row = json.loads(path.read_text())["results"]["all_reduce"][0]
    timing = row["out_of_place"]
    assert timing["alg_bw"] == pytest.approx((1 << 20) / timing["mean_us"] * 1e-3)
    assert timing["bus_bw"] == pytest.approx(timing["alg_bw"] * 2 * 3 / 4)
    assert row["floor"]["p50_us"] / timing["p50_us"] == pytest.approx(row["share_of_floor"])


def test_json_holds_header_arguments_and_rows_but_no_places_on_this_machine(tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    assert run(["broadcast", *TINY, "-J", str(path)]) == 0
    written = json.loads(path.read_text())
    assert {"machine", "cores", "python", "numpy", "blas", "date", "commit"} <= set(written["header"])
    assert written["arguments"]["minbytes"] == 8
    assert [row["size"] for row in written["results"]["broadcast"]] == [8, 32, 128]
    assert written["wrong"] == 0
    assert str(tmp_path) not in path.read_text()
    assert list(tmp_path.iterdir()) == [path]


def test_the_plot_is_a_png(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "out.png"
    assert run(["all_reduce", "all_gather", *TINY, "--plot", str(path)]) == 0
    assert path.read_bytes().startswith(b"\x89PNG")


def test_osu_tables_come_on_request(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["all_reduce", *TINY, "--format", "osu", "--full"]) == 0
    rows = rows_of(capsys.readouterr().out)
    assert [len(row) for row in rows] == [5, 5, 5]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["no_such"], "got 'no_such'; need one of all_reduce"),
        (["all_reduce", "-b", "x"], "got 'x'; need bytes such as 8, 64K"),
        (["all_reduce", "-b", "8K", "-e", "8"], "-e: got 8 bytes; need at least -b, 8192 bytes"),
        (["all_reduce", "-f", "1"], "got '1'; need a whole number from 2"),
        (["all_reduce", "-T", "0"], "got '0'; need seconds above 0"),
        (["all_reduce", "-o", "avg", "-d", "int32"], "the mean of integers is a double"),
        (["all_reduce", "--json", "no/such/folder/file"], "need a file in a folder that exists"),
        (["train", "--format", "osu"], "got train; need collectives only"),
    ],
)
def test_bad_arguments_say_what_is_needed(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        run(arguments)
    assert ended.value.code == 2
    assert words in capsys.readouterr().err


def test_the_module_runs_with_one_blas_thread_and_says_so() -> None:
    command = [sys.executable, "-m", "benchmarks", "all_gather", *TINY]
    ended = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    header = ended.stdout.splitlines()[:6]
    assert header[0].startswith("# xpdistribute ")
    assert any(line.startswith("# BLAS") and "1 thread" in line for line in header)
    assert ended.stderr == ""


def test_overhead_counts_calls_of_every_strategy(tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    out = run_module("overhead", "--quick", "--json", str(path))
    calls = ("run + merge_call", "run + all_reduce 4 B", "reduce 1 KB")
    for words in ("OneDevice", "Mirrored", "CentralStorage", *calls):
        assert words in out
    rows = json.loads(path.read_text())["results"]["overhead"]
    assert all(row["min_us"] <= row["p50_us"] <= row["p95_us"] and row["wrong"] == 0 for row in rows)


def test_training_prints_the_lines_of_tf_cnn_benchmarks_and_horovod() -> None:
    out = run_module("train", "--quick")
    assert "Batch size:  128 global\n             64 per device\n" in out
    assert "Step\tImg/sec\ttotal_loss\n1\timages/sec: " in out
    assert " (jitter = " in out
    assert "\ntotal images/sec: " in out
    assert "\nImg/sec per CPU: " in out
    assert "replicas  global ex/s  ex/s/replica  weak eff%  strong eff%  comm%" in out


def test_buckets_and_adam_print_their_tables() -> None:
    out = run_module("buckets", "adam", "--quick")
    assert "bucket_MB  n_buckets  comm_ms  step_ms" in out
    assert "# one step of Adam, us: 200 variables of 1000 float32, and 1 of 200000" in out


@pytest.mark.parametrize("collective", ["all_reduce", "overhead"])
def test_a_rival_is_measured_by_turns_and_its_ratios_are_printed(
    collective: str,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    program, path = tmp_path / "rival.py", tmp_path / "out.json"
    program.write_text(INSTANT_RIVAL, encoding="utf-8")
    monkeypatch.setitem(rivals.PROGRAMS, "tensorflow", program)
    arguments = ["--quick", "--against", "tensorflow", "--rival-python", sys.executable, "--json", str(path)]
    assert run([collective, *TINY, *arguments]) == 0
    out = capsys.readouterr().out
    assert "# rival    Instant 1.0\n" in out
    assert "tensorflow function" in out
    results = json.loads(path.read_text())["results"]
    assert results["rival"] == [{"name": "tensorflow", "wrong": 0}]


def test_what_was_measured_before_the_rival_failed_is_kept(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    program, path = tmp_path / "rival.py", tmp_path / "out.json"
    program.write_text(INSTANT_RIVAL.replace('"seconds"', '"error"'), encoding="utf-8")
    monkeypatch.setitem(rivals.PROGRAMS, "tensorflow", program)
    arguments = ["--against", "tensorflow", "--rival-python", sys.executable, "--json", str(path)]
    assert run(["broadcast", "all_reduce", *TINY, *arguments]) == 1
    assert "tensorflow: " in capsys.readouterr().err
    assert len(json.loads(path.read_text())["results"]["broadcast"]) == 3


@pytest.mark.slow
def test_memory_and_import_time_are_measured_in_fresh_processes(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "out.json"
    assert run(["memory", "import_time", "--quick", "--json", str(path)]) == 0
    results = json.loads(path.read_text())["results"]
    assert all(row["wrong"] == 0 and row["resident"] >= 0.5 * row["needed"] for row in results["memory"])
    assert results["import_time"][0]["strategies"]["min_us"] > 0


@pytest.mark.slow
def test_everything_quick_takes_less_than_a_minute(capsys: pytest.CaptureFixture[str]) -> None:
    ended = subprocess.run(
        [sys.executable, "-m", "benchmarks", "--quick"],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
