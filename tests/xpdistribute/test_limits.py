"""Jobs on systems that have too little of something: each says of what, and what to do about it."""

from __future__ import annotations

import importlib.util
import os
import resource
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from xpdistribute.limits import has_room, shortage
from xpdistribute.rank_files import RankFiles

ROOT = Path(__file__).parents[2]
PROGRAM = """
import sys
import numpy as np
import strategies as xd

strategy = xd.MultiWorkerMirroredStrategy()

def step():
    return xd.get_replica_context().all_reduce("sum", np.ones(1 << 18)).sum()

print(strategy.run(step), flush=True)
"""

needs_mpiexec = pytest.mark.skipif(
    importlib.util.find_spec("mpi4py") is None, reason="needs xpdistribute[mpi], which brings mpiexec"
)


def run(
    folder: Path, *program: str, before: str = "", **environment: str
) -> subprocess.CompletedProcess[str]:
    """A job of two, started by a shell that does something before."""
    (folder / "train.py").write_text(PROGRAM)
    command = [sys.executable, "-m", "xpdistribute", "run", "-n", "2", *program, f"{folder}/train.py"]
    return subprocess.run(
        ["/bin/sh", "-c", f'{before or ":"}; exec "$@"', "sh", *command],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )


@needs_mpiexec
@pytest.mark.parametrize("limit", [8, 11, 14, 16, 20, 24])
def test_too_few_open_files_are_named_with_what_is_needed(tmp_path: Path, limit: int) -> None:
    # Some of the limits are too low for the launcher itself, some for mpiexec.
    (tmp_path / "runtime").mkdir()
    done = run(tmp_path, before=f"ulimit -n {limit}", XDG_RUNTIME_DIR=str(tmp_path / "runtime"))
    assert done.returncode not in (0, 2)
    assert (
        done.stderr.rstrip()
        .splitlines()[-1]
        .endswith(
            f"open files: a process may have {limit}; mpiexec needs about 44 for 2 processes — raise the limit (ulimit -n 65536, or your "
            "system's limits.conf)"
        )
    ), done.stderr
    assert "Traceback" not in done.stderr
    assert not list((tmp_path / "runtime").iterdir())


@needs_mpiexec
def test_a_limit_that_may_be_raised_is_raised(tmp_path: Path) -> None:
    done = run(tmp_path, before="ulimit -Sn 16")
    assert (done.returncode, done.stdout) == (0, f"{2.0 * (1 << 18)}\n"), done.stderr


@needs_mpiexec
@pytest.mark.parametrize(
    ("before", "words"),
    [
        (
            "ulimit -n 9",
            "(Too many open files); this process may have 9 open files, and each piece of shared memory is one",
        ),
        ("ulimit -n 9; exec 5<&0 6<&0 7<&0", "Too many open files"),
        ("ulimit -f 1", "raise it (ulimit -f unlimited)"),
    ],
)
def test_a_rank_that_gets_no_shared_memory_says_what_to_do(tmp_path: Path, before: str, words: str) -> None:
    done = run(tmp_path, "/bin/sh", "-c", f'{before}; exec {sys.executable} "$0"')
    assert done.returncode == 1
    assert words in done.stderr.replace(": Too many open files); ", " (Too many open files); "), done.stderr


@pytest.fixture
def full_folder(tmp_path: Path) -> Iterator[Path]:
    """A folder on a file system that has no room."""
    folder = tmp_path / "full"
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=8k", "tmpfs", folder], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip("this user may not mount a file system that is full")
    try:
        (folder / "filling").write_bytes(b"\0" * 8192)
        yield folder
    finally:
        subprocess.run(["umount", folder], check=True)


def test_a_full_folder_has_no_room(full_folder: Path, tmp_path: Path) -> None:
    assert has_room(str(tmp_path))
    assert not has_room(str(full_folder))
    assert not has_room(str(tmp_path / "missing"))


def test_the_pipes_of_the_ranks_go_where_there_is_room(
    full_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(full_folder))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    files = RankFiles(1, all_output=False, elastic=False)
    try:
        assert Path(files.folder).parent == tmp_path
    finally:
        files.remove()


@needs_mpiexec
def test_a_full_folder_for_temporary_files_is_named(full_folder: Path, tmp_path: Path) -> None:
    done = run(tmp_path, TMPDIR=str(full_folder), XDG_RUNTIME_DIR=str(tmp_path))
    assert done.returncode not in (0, 2)
    assert f"{full_folder}: it is full or can't be written, and mpiexec keeps files there" in done.stderr


@needs_mpiexec
def test_a_full_dev_shm_does_not_matter(tmp_path: Path) -> None:
    fill = "mount -t tmpfs -o size=4k none /dev/shm && head -c 4096 /dev/zero >/dev/shm/filling"
    if subprocess.run(["unshare", "-m", "sh", "-c", fill], capture_output=True, check=False).returncode:
        pytest.skip("this user may not mount another /dev/shm")
    (tmp_path / "train.py").write_text(PROGRAM)
    command = f"{fill}; exec {sys.executable} -m xpdistribute run -n 2 {tmp_path}/train.py"
    done = subprocess.run(
        ["unshare", "-m", "sh", "-c", command],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, f"{2.0 * (1 << 18)}\n"), done.stderr


def test_where_there_is_enough_nothing_is_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    assert shortage(1) == ""
    assert f"a process may have {soft}; " in shortage(soft)
