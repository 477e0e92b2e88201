"""One rank of a group that is measured: it connects to the suite, loads its program and answers line by line.

Run as ``python rank.py PROGRAM.py``, by interpreters too that have nothing of ours. Between two lines it waits for the
suite's socket, which uses no CPU: ranks of MPI poll as long as they wait for one another, and would take the core from
those whose turn it is.

A program says who it is and joins its group in ``about()``, which returns what JSON can hold. ``CASES`` has by name what makes a
case from its details: the call that is timed, and either the array that the call sums up in place over all ranks, which is
checked here before and after each turn, or the number of results that were found wrong already. ``LOOPS`` has the same for calls
that time themselves: those take the number of iterations, and return when each began and ended. ``close()`` leaves the group.

The protocol is lines of JSON, each answered with one:

``{"measure": NAME, "warm_up": 3, "iterations": 20, ...}``, with the case's details
    ``{"begun": [...], "ended": [...], "wrong": 0}``, in nanoseconds of a clock that all ranks of the machine share.
``{"idle": 2.0}``
    ``{"cpu_share": 0.01}``: of a core, while rank 0 kept the others waiting in a barrier for so many seconds.
``{"forget": true}``
    ``{}``: all cases and their memory have been given back.
``{"quit": true}``
    None: the process ends.
"""

from __future__ import annotations

import gc
import importlib.util
import json
import os
import queue
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from types import ModuleType
from typing import Any

PORT, TOKEN, RANK, RANKS = "BENCHMARK_PORT", "BENCHMARK_TOKEN", "BENCHMARK_RANK", "BENCHMARK_RANKS"
"""Environment variables: where the suite listens, what it must be told, this rank's number and how many there are."""

_STARTERS_RANKS = ("OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK")

_SETTLE_SECONDS = 0.02
_ROW = 4093
"""Numbers that repeat; a prime, so that parts of arrays which are exchanged by mistake don't look alike."""

Noted = tuple[list[int], list[int]]
Loop = Callable[[int], Noted]


def this_rank() -> int:
    """This process's number, as the suite says, or whoever started it for the suite."""
    return next(int(os.environ[name]) for name in (RANK, *_STARTERS_RANKS) if name in os.environ)


def noted(call: Callable[[], object]) -> Loop:
    """The loop that makes a call back to back, and notes when each began and ended."""

    def loop(iterations: int) -> Noted:
        now = time.perf_counter_ns
        begun, ended = [0] * iterations, [0] * iterations
        for i in range(iterations):
            begun[i] = now()
            call()
            ended[i] = now()
        return begun, ended

    return loop


def wrong_sums(loop: Loop, array: Any, rank: int, ranks: int) -> int:
    """How many elements of an array are not what NumPy sums up, after a call on numbers that differ. Leaves zeros.

    Zeros, because any other numbers would grow out of bounds in the calls that are timed. The numbers are a row over and
    over, since more would take longer to make and to compare than what is timed takes.
    """
    import numpy as np  # noqa: PLC0415  the program may want to be the first to load it

    rows = [np.roll(np.arange(_ROW, dtype=np.float32), each) + np.float32(each) for each in range(ranks)]
    expected = np.sum(rows, axis=0)
    whole = len(array) // _ROW * _ROW
    table, rest = array[:whole].reshape(-1, _ROW), array[whole:]
    table[...], rest[...] = rows[rank], rows[rank][: len(rest)]
    loop(1)
    wrong = np.count_nonzero(table != expected) + np.count_nonzero(rest != expected[: len(rest)])
    array[...] = 0
    return int(wrong)


class Rank:
    """Answers for a program. The cases it has been asked for are kept for the rounds that follow."""

    def __init__(self, program: ModuleType, rank: int, ranks: int) -> None:
        self._program = program
        self._rank = rank
        self._ranks = ranks
        self._made: dict[str, tuple[Loop, Any]] = {}

    def answer(self, asked: dict[str, Any]) -> dict[str, Any]:
        """What a line is answered with."""
        if "measure" in asked:
            name, warm_up, iterations = (asked.pop(key) for key in ("measure", "warm_up", "iterations"))
            return self._measure(name, warm_up, iterations, asked)
        if "idle" in asked:
            return {"cpu_share": self._idle(asked["idle"])}
        if "forget" in asked:
            self._made.clear()
            gc.collect()
            return {}
        raise ValueError(f"got {asked}; need measure, idle, forget or quit")

    def _measure(self, name: str, warm_up: int, iterations: int, details: dict[str, Any]) -> dict[str, Any]:
        loop, checked, wrong = self._case(name, details)
        _spread_over_cores()
        loop(warm_up)
        gc.disable()
        try:
            begun, ended = loop(iterations)
        finally:
            gc.enable()
        if not isinstance(checked, int):
            wrong += wrong_sums(loop, checked, self._rank, self._ranks)
        return {"begun": begun, "ended": ended, "wrong": wrong}

    def _case(self, name: str, details: dict[str, Any]) -> tuple[Loop, Any, int]:
        """The case, what it is checked by, and how many results were wrong when it was made, if it was made now."""
        key = f"{name} {json.dumps(details, sort_keys=True)}"
        if key in self._made:
            return *self._made[key], 0
        loops = getattr(self._program, "LOOPS", {})
        if name in loops:
            loop, checked = loops[name](**details)
        else:
            call, checked = self._program.CASES[name](**details)
            loop = noted(call)
        self._made[key] = loop, checked
        if isinstance(checked, int):
            return loop, checked, checked
        return loop, checked, wrong_sums(loop, checked, self._rank, self._ranks)

    def _idle(self, seconds: float) -> float:
        barrier, _, _ = self._case("barrier", {})
        barrier(10)
        used, begun = time.process_time(), time.perf_counter()
        if self._rank == 0:
            time.sleep(seconds)
        barrier(1)
        return (time.process_time() - used) / (time.perf_counter() - begun)


def _spread_over_cores() -> None:
    """Compute for a moment, as ranks do between collectives.

    Ranks that the suite has woken may all be on one core. Those that only wait for one another stay there for long, some of
    them at a thousandth of their speed; those that compute are moved to cores that are free.
    """
    end = time.perf_counter() + _SETTLE_SECONDS
    while time.perf_counter() < end:
        pass


def load(path: str) -> ModuleType:
    """The program, from its file alone: its folder may lie in no package that this interpreter can import."""
    spec = importlib.util.spec_from_file_location("program", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def lines_of(connection: socket.socket) -> queue.SimpleQueue[dict[str, Any]]:
    """What the suite asks, read by a thread of its own, so that a rank ends with the suite, whatever it is waiting for."""
    asked: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()

    def read() -> None:
        for line in connection.makefile(encoding="utf-8"):
            asked.put(json.loads(line))
            if "quit" in line:
                return
        os._exit(1)

    threading.Thread(target=read, daemon=True, name="the suite's lines").start()
    return asked


def main() -> None:
    """Say who is here, join the group, then answer."""
    rank, ranks = this_rank(), int(os.environ[RANKS])
    connection = socket.create_connection(("127.0.0.1", int(os.environ[PORT])), timeout=30)
    connection.settimeout(None)

    def say(words: dict[str, Any]) -> None:
        connection.sendall(json.dumps(words).encode() + b"\n")

    say({"token": os.environ[TOKEN], "rank": rank, "pid": os.getpid()})
    asked = lines_of(connection)
    try:
        program = load(sys.argv[1])
        say({"about": program.about()})
        answers = Rank(program, rank, ranks)
        while "quit" not in (question := asked.get()):
            say(answers.answer(question))
    except Exception:  # noqa: BLE001  said to the other side, which raises it and ends this group
        say({"error": traceback.format_exc()})
        asked.get()  # the others may be in a collective: the suite ends all of them together
        os._exit(1)
    getattr(program, "close", lambda: None)()


if __name__ == "__main__":
    main()
