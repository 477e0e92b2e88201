"""The benchmarks between processes from their command line, in their quick form."""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from pathlib import Path

import pytest

from benchmarks.command_line import NAMES, PROCESSES, run
from benchmarks.harness import Timing
from benchmarks.processes.contenders import describe, report_medians
from benchmarks.report import Report

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="processes share memory on Linux")


def results_of(path: Path) -> dict[str, list[dict[str, object]]]:
    results: dict[str, list[dict[str, object]]] = json.loads(path.read_text())["results"]
    return results


def test_our_processes_reduce_and_train_and_nothing_is_wrong(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "out.json"
    names = ["processes_all_reduce", "processes_barrier", "processes_gradients", "processes_train"]
    assert run([*names, "--quick", "-e", "64K", "--json", str(path)]) == 0
    out = capsys.readouterr().out
    assert "# all_reduce of float32 in place, 2 processes\n" in out
    assert "shared_memory, ordinary" in out
    results = results_of(path)
    assert [row["size"] for row in results["processes_all_reduce"]] == [4, 16384]
    for name in names:
        for row in results[name]:
            assert row["wrong"] == 0
            for timing in row["timings"].values():  # type: ignore[attr-defined]
                assert timing["p10_us"] <= timing["p50_us"] <= timing["p90_us"]
    assert results["processes_train"][0]["examples_a_second_against_one_process"].keys() == {  # type: ignore[attr-defined]
        "shared_memory"
    }


def test_a_waiting_rank_of_ours_leaves_its_core_to_others(tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    assert run(["processes_idle", "--quick", "-t", "3", "--json", str(path)]) == 0
    shares = results_of(path)["processes_idle"][0]["cpu_shares"]
    assert len(shares["shared_memory"]) == 2  # type: ignore[index]
    assert max(shares["shared_memory"]) < 0.5  # type: ignore[index]


def test_a_crowd_of_ranks_shares_two_cores_with_a_busy_program_that_ends(
    capsys: pytest.CaptureFixture[str],
) -> None:
    before = os.sched_getaffinity(0)
    assert run(["processes_crowded_barrier", "--quick"]) == 0
    assert os.sched_getaffinity(0) == before
    out = capsys.readouterr().out
    assert "barrier, mean of a turn" in out
    assert "barrier, each" in out


@pytest.mark.skipif(importlib.util.find_spec("mpi4py") is None, reason="mpi4py is not installed")
def test_a_rival_takes_turns_and_its_ratios_are_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["processes_all_reduce", "--quick", "-e", "4", "--against", "mpi4py"]) == 0
    lines = capsys.readouterr().out.splitlines()
    at = lines.index("# ratios of medians: others / shared_memory")
    assert "mpi4py" in lines[at + 1]
    assert lines[at + 2].startswith("4 B ")


def test_one_name_stands_for_all_benchmarks_between_processes() -> None:
    assert set(PROCESSES) < set(NAMES)
    assert all(name.startswith("processes_") for name in PROCESSES)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["processes", "--backend", "shared_memory,carrier_pigeon"], "got 'carrier_pigeon'; need some of"),
        (["processes", "--backend", ""], "got ''; need some of shared_memory"),
        (["processes", "--against", "mpi4py,nobody"], "got 'nobody'; need some of tensorflow, mpi4py"),
        (["processes", "--ranks", "1"], "got '1'; need a whole number from 2"),
    ],
)
def test_bad_arguments_say_what_is_needed(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        run(arguments)
    assert ended.value.code == 2
    assert words in capsys.readouterr().err


def test_a_table_has_medians_spreads_and_ratios(capsys: pytest.CaptureFixture[str]) -> None:
    ours, theirs = Timing((1e-6, 2e-6, 3e-6)), Timing((1e-3, 2e-3, 3e-3))
    rows = {"4 B": {"ours": ours, "theirs": theirs}, "8 B": {"ours": ours}}
    report_medians(Report({}), "size", rows, ["ours"])
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].split() == ["size", "ours", "theirs"]
    assert lines[2].split() == ["4", "B", "2", "[1.2", "..", "2.8]", "2000", "[1200", "..", "2800]"]
    assert lines[3].split()[-1] == "-"
    assert lines[-2].split() == ["4", "B", "1000x"]
    assert describe(rows["4 B"], "ours")["ratios"] == {"theirs": pytest.approx(1000)}


@pytest.mark.skipif(
    importlib.util.find_spec("mpi4py") is None, reason="mpi4py, which brings mpiexec, is not installed"
)
def test_a_job_recovers_from_kills_and_its_weights_are_right(tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    assert run(["processes_recovery", "--quick", "--json", str(path)]) == 0
    row = results_of(path)["processes_recovery"][0]
    assert (row["ranks"], row["kills"], row["wrong"]) == (3, 2, 0)
    left, replaced = row["seconds"].values()  # type: ignore[attr-defined]
    assert 0 < max(left) < min(replaced)
