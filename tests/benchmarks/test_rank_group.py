"""Groups of ranks that the suite measures: with programs of a few lines, with MPI, and with the limit in C."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from benchmarks.rivals.rank_group import RankGroup, System
from benchmarks.rivals.rival import RivalError
from benchmarks.rivals.systems import c_loops, compile_c_loops, find_pythons, mpi4py

PROGRAM = """
import os, time
import numpy as np
RANK = int(os.environ["BENCHMARK_RANK"])

def about():
    return {"program": "stand-in", "rank": RANK}

def all_reduce(num_bytes):
    array = np.zeros(num_bytes // 4, np.float32)
    return lambda: None, array

def hasty():
    return (lambda: time.sleep(0.05)) if RANK == 0 else (lambda: None), 0

def slow():
    return lambda: time.sleep(0.01), 0

def fails():
    if RANK == 1:
        raise ValueError("the reason")
    time.sleep(60)

def hangs():
    return lambda: time.sleep(60), 0

CASES = {"all_reduce": all_reduce, "hasty": hasty, "slow": slow, "fails": fails, "hangs": hangs}
"""


def stand_in(folder: Path, program: str = PROGRAM) -> System:
    """A program of this interpreter."""
    path = folder / "stand_in.py"
    path.write_text(program, encoding="utf-8")
    return System("stand-in", sys.executable, path, dict(os.environ))


def assert_gone(pids: list[int]) -> None:
    deadline = time.monotonic() + 10
    while any(Path(f"/proc/{pid}").exists() for pid in pids):
        assert time.monotonic() < deadline, "a rank lives on"
        time.sleep(0.02)


def cpu_seconds(pids: list[int]) -> float:
    def of(pid: int) -> float:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    return sum(map(of, pids))


def test_ranks_say_who_they_are_measure_and_end(tmp_path: Path) -> None:
    with RankGroup(stand_in(tmp_path), 2, 20) as group:
        assert group.describe() == "program stand-in, rank 0"
        seconds = group.measure("slow", 3)
        assert len(seconds) == 3
        assert all(0.01 <= each < 1 for each in seconds)
        group.forget()
        assert len(group.case("slow")(2)) == 2
        assert group.num_wrong == 0
        pids = group.pids
    assert_gone(pids)


def test_sums_that_differ_from_numpys_are_counted(tmp_path: Path) -> None:
    with RankGroup(stand_in(tmp_path), 2, 20) as group:
        group.measure("all_reduce", 2, num_bytes=64)
        # Before the turn and after it; some element may happen to be right.
        assert group.num_wrong >= 2 * (2 * 16 - 2)


def test_a_rank_that_does_not_wait_for_the_others_is_wrong(tmp_path: Path) -> None:
    with RankGroup(stand_in(tmp_path), 2, 20) as group:
        group.measure("hasty", 3)
        assert group.num_wrong >= 2


def test_a_rank_that_fails_ends_the_group_with_its_traceback(tmp_path: Path) -> None:
    begin = time.monotonic()
    with RankGroup(stand_in(tmp_path), 2, 20) as group:
        with pytest.raises(RivalError, match=r"stand-in: rank 1: (.|\n)*ValueError: the reason"):
            group.measure("fails", 1)
        assert_gone(group.pids)
    assert time.monotonic() - begin < 10


def test_ranks_that_hang_are_named_and_ended(tmp_path: Path) -> None:
    with RankGroup(stand_in(tmp_path), 2, 0.5) as group:
        with pytest.raises(RivalError, match=r"no answer from rank 0, 1 within 0\.5 s"):
            group.measure("hangs", 1)
        assert_gone(group.pids)


def test_an_unknown_case_is_told(tmp_path: Path) -> None:
    with (
        RankGroup(stand_in(tmp_path), 1, 20) as group,
        pytest.raises(RivalError, match="KeyError: 'no_such_case'"),
    ):
        group.measure("no_such_case", 1)


def test_a_program_that_cannot_be_loaded_is_told(tmp_path: Path) -> None:
    with pytest.raises(RivalError, match="No module named 'no_such_module'"):
        RankGroup(stand_in(tmp_path, "import no_such_module"), 2, 20)


def test_an_interpreter_that_cannot_be_run_is_told(tmp_path: Path) -> None:
    system = System("stand-in", str(tmp_path / "no-python"), tmp_path / "program.py", {})
    with pytest.raises(RivalError, match=r"could not be run .* need a command that exists"):
        RankGroup(system, 2, 20)


def test_an_interpreter_that_ends_at_once_is_told_with_its_last_words(tmp_path: Path) -> None:
    script = tmp_path / "no-python"
    script.write_text("#!/bin/sh\necho the last words\nexit 3\n", encoding="utf-8")
    script.chmod(0o755)
    with pytest.raises(RivalError, match="0 of 2 ranks came, others ended with status 3: the last words"):
        RankGroup(System("stand-in", str(script), tmp_path / "program.py", {}), 2, 20)


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs /proc")
def test_ranks_end_with_the_suite_even_in_the_middle_of_a_case(tmp_path: Path) -> None:
    stand_in(tmp_path)
    suite = f"""
import os, sys, threading
sys.path.insert(0, {str(Path(__file__).parents[2])!r})
from pathlib import Path
from benchmarks.rivals.rank_group import RankGroup, System
group = RankGroup(System("stand-in", sys.executable, Path({str(tmp_path / "stand_in.py")!r}), dict(os.environ)), 2, 60)
print(*group.pids, flush=True)
threading.Timer(0.3, os._exit, [0]).start()
group.measure("hangs", 1)
"""
    ended = subprocess.run(
        [sys.executable, "-c", suite], capture_output=True, text=True, check=True, timeout=30
    )
    assert_gone([int(pid) for pid in ended.stdout.split()])


@pytest.mark.skipif(importlib.util.find_spec("mpi4py") is None, reason="mpi4py is not installed")
@pytest.mark.skipif(shutil.which("mpiexec", path=Path(sys.executable).parent) is None, reason="no mpiexec")
def test_ranks_of_mpi_agree_with_numpy_and_use_no_cpu_between_their_turns() -> None:
    with RankGroup(mpi4py(sys.executable, 2), 2, 30) as group:
        for num_bytes in (4, 4000):
            assert len(group.measure("all_reduce", 5, num_bytes=num_bytes)) == 5
        assert group.num_wrong == 0
        before = cpu_seconds(group.pids)
        time.sleep(0.5)
        assert cpu_seconds(group.pids) - before <= 0.05
        assert group.idle(0.2)[0] > 0.2  # which they do use where they wait for one another
        pids = group.pids
    assert_gone(pids)


@pytest.mark.skipif(shutil.which("gcc") is None, reason="no gcc")
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_the_limit_in_c_agrees_with_numpy(ranks: int, tmp_path: Path) -> None:
    library, compiler = compile_c_loops(tmp_path)
    with RankGroup(c_loops(library, compiler, ranks), ranks, 30) as group:
        for num_bytes in (4, 100, 4 * 4093, 40_000, 1 << 20):
            assert len(group.measure("all_reduce", 5, num_bytes=num_bytes)) == 5
        assert len(group.measure("barrier", 5)) == 5
        assert group.num_wrong == 0


def test_a_missing_compiler_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(RivalError, match="no gcc, cc or clang on PATH"):
        compile_c_loops(tmp_path)


def test_the_interpreter_given_is_for_rivals_that_this_one_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    from benchmarks.rivals import systems

    monkeypatch.setitem(systems.PACKAGES, "here", "numpy")
    monkeypatch.setitem(systems.PACKAGES, "elsewhere", "no_such_package")
    assert find_pythons(["here", "elsewhere"], "its") == {"here": sys.executable, "elsewhere": "its"}
    assert find_pythons(["here"], "its") == {"here": "its"}
    assert find_pythons(["here"], None) == {"here": sys.executable}
    with pytest.raises(RivalError, match="name it with --rival-python PATH"):
        find_pythons(["here", "elsewhere"], None)
