"""``xpdistribute run`` on a terminal: rank 0 has one too, and what it draws there and what others print don't spoil one another."""

from __future__ import annotations

import fcntl
import importlib.util
import os
import re
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from xpdistribute.terminal import Drawing

ROOT = Path(__file__).parents[2]
needs_mpiexec = pytest.mark.skipif(
    importlib.util.find_spec("mpi4py") is None, reason="needs xpdistribute[mpi], which brings mpiexec"
)


@contextmanager
def on_terminal(
    folder: Path, program: str, *options: str, errors: int | None = None
) -> Iterator[tuple[int, int]]:
    """A job whose output goes to a terminal of 24 rows and 77 columns: the launcher's process id, and where to read it from.

    Args:
        folder: for the program.
        program: each process knows its ``rank``.
        options: of the launcher.
        errors: where its errors go; None for the terminal.
    """
    path = folder / "train.py"
    path.write_text(f"import os, sys, time\nrank = int(os.environ['OMPI_COMM_WORLD_RANK'])\n{program}")
    master, slave = os.openpty()
    resize(master, 24, 77)
    process = subprocess.Popen(
        [sys.executable, "-m", "xpdistribute", "run", *options, str(path)],
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        stdout=slave,
        stderr=slave if errors is None else errors,
    )
    os.close(slave)
    try:
        yield process.pid, master
        assert process.wait(timeout=20) == 0
    finally:
        process.kill()
        process.wait()
        os.close(master)


def resize(terminal: int, rows: int, columns: int) -> None:
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))


def read(master: int, until: bytes | None = None) -> bytes:
    """What comes of the terminal until a text, or to its end."""
    text = b""
    deadline = time.monotonic() + 20
    while until is None or until not in text:
        assert time.monotonic() < deadline, text
        try:
            data = os.read(master, 1 << 16)
        except OSError:  # nobody has it open any more
            break
        if not data:
            break
        text += data
    return text


@needs_mpiexec
def test_rank_0_has_a_terminal_of_the_same_size_and_the_others_have_none(tmp_path: Path) -> None:
    program = """
size = tuple(os.get_terminal_size(1)) if rank == 0 else None
print(rank, sys.stdout.isatty(), sys.stderr.isatty(), size, file=sys.stderr)
"""
    with on_terminal(tmp_path, program, "-n", "2") as (_, master):
        lines = read(master).decode().splitlines()
    assert sorted(lines) == ["0 True True (77, 24)", "1 False False None"]


@needs_mpiexec
def test_a_stream_that_is_no_terminal_is_none_for_rank_0_either(tmp_path: Path) -> None:
    read_end, write_end = os.pipe()
    program = "print(sys.stdout.isatty(), sys.stderr.isatty())\nprint('error', file=sys.stderr)"
    with on_terminal(tmp_path, program, "-n", "1", errors=write_end) as (_, master):
        os.close(write_end)
        assert read(master) == b"True False\r\n"
        assert os.read(read_end, 100) == b"error\n"
    os.close(read_end)


@needs_mpiexec
def test_rank_0_sees_a_new_size(tmp_path: Path) -> None:
    program = """
print("begun", flush=True)
end = time.monotonic() + 10
while os.get_terminal_size(1).columns == 77 and time.monotonic() < end: time.sleep(0.02)
print("columns:", os.get_terminal_size(1).columns)
"""
    with on_terminal(tmp_path, program, "-n", "1") as (pid, master):
        read(master, b"begun")
        resize(master, 24, 50)
        os.kill(pid, signal.SIGWINCH)  # as the system tells the foreground of a session's terminal
        assert b"columns: 50" in read(master)


@needs_mpiexec
def test_a_progress_bar_of_rank_0_stays_below_the_lines_of_others(tmp_path: Path) -> None:
    program = r"""
if rank == 0:
    for i in range(6):
        sys.stdout.write(f"\rstep {i}")
        sys.stdout.flush()
        time.sleep(0.2)
    print()
else:
    time.sleep(0.5)
    print("a warning", file=sys.stderr)
    time.sleep(0.7)
"""
    with on_terminal(tmp_path, program, "-n", "2") as (_, master):
        text = read(master).decode()
    assert re.search(r"step (\d)\r\x1b\[2Ka warning\r\nstep \1", text), text
    assert re.findall(r"\rstep (\d)", text)[-1] == "5"


@needs_mpiexec
def test_much_output_on_a_terminal_arrives_whole(tmp_path: Path) -> None:
    with on_terminal(tmp_path, "for i in range(3000): print(i, 'x' * 60)\n", "-n", "1") as (_, master):
        text = read(master).decode()
    assert text.split("\r\n") == [*(f"{i} " + "x" * 60 for i in range(3000)), ""]


def test_lines_of_others_stand_above_a_drawing_of_several_lines() -> None:
    drawing = Drawing()
    assert drawing.above(b"other\n") == b"other\n"
    drawing.note(b"\x1b[?25l\r\x1b[2K\x1b[1A\x1b[2K\x1b[1A\x1b[2Kone\n")
    drawing.note(b"two\nthr")
    drawing.note(b"ee")
    assert drawing.above(b"other\n") == b"\r\x1b[2K\x1b[1A\x1b[2K\x1b[1A\x1b[2Kother\n\n\nthree"
    assert drawing.end() == b"\n\x1b[?25h"  # it was left in the middle
    assert drawing.above(b"other\n") == b"other\n"
    assert drawing.end() == b""


def test_a_drawing_that_is_finished_is_left_as_it_is() -> None:
    drawing = Drawing()
    drawing.note(b"\x1b[?25l\r\x1b[2Kbar 100%\n\x1b[?25h")
    assert drawing.above(b"other\n") == b"other\n"
    assert drawing.end() == b""
