"""Runs a function in several processes, forked from this one, that share memory."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import Any

from collectives import Communicator
from collectives.hierarchical import HierarchicalCommunicator
from collectives.link import Link
from collectives.rendezvous import Rendezvous
from collectives.shared_memory.shared_memory_link import SharedMemoryLink

TIMEOUT = 20.0
"""Seconds that a rank waits for others."""


def run_in_processes(num_processes: int, body: Callable[..., Any], timeout: float = 40.0) -> list[Any]:
    """What ``body(process, exchange)`` returns in each of so many forked processes, by process.

    ``exchange`` gives every process's value, by process. A process that raises ends the others; its error is raised here. One
    that is killed gives a `ProcessDiedError`.
    """
    context = multiprocessing.get_context("fork")
    pipes = [context.Pipe() for _ in range(num_processes)]
    pids = []
    sys.stdout.flush()
    sys.stderr.flush()
    for process in range(num_processes):
        pid = os.fork()
        if pid == 0:
            _child(process, [ours for ours, _ in pipes], pipes[process][1], body)
        pids.append(pid)
    for _, theirs in pipes:
        theirs.close()
    try:
        return _serve([ours for ours, _ in pipes], time.monotonic() + timeout)
    finally:
        for pid in pids:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
            finally:
                os.waitpid(pid, 0)


class ProcessDiedError(Exception):
    """A process ended without a result."""


def _child(process: int, parents: Sequence[Connection], pipe: Connection, body: Callable[..., Any]) -> None:
    status = 0
    try:
        for ours in parents:
            ours.close()

        def exchange(value: Any) -> list[Any]:
            pipe.send(("exchange", value))
            told: list[Any] = pipe.recv()
            return told

        try:
            result = ("result", body(process, exchange))
        except BaseException as error:  # noqa: BLE001  # raised in the parent
            error.add_note(f"in process {process}:\n{traceback.format_exc()}")
            try:
                pickle.loads(pickle.dumps(error))
                result = ("error", error)
            except Exception:  # noqa: BLE001  # what can't be pickled is told in words
                result = ("error", RuntimeError(traceback.format_exc()))
        pipe.send(result)
        pipe.recv()  # lives on until all have ended, as others may read its memory
    except (EOFError, BrokenPipeError):
        status = 1
    finally:
        os._exit(status)


def _serve(pipes: Sequence[Connection], deadline: float) -> list[Any]:
    results: dict[int, Any] = {}
    waiting: dict[int, Any] = {}
    errors: list[BaseException] = []
    while len(results) < len(pipes):
        for process, pipe in enumerate(pipes):
            if process in results or process in waiting or not pipe.poll(0.001):
                continue
            try:
                kind, value = pipe.recv()
            except EOFError:
                kind, value = "result", ProcessDiedError(f"process {process}")
            if kind == "exchange":
                waiting[process] = value
            else:
                results[process] = value
                if kind == "error":
                    errors.append(value)
                    deadline = min(deadline, time.monotonic() + 2 * TIMEOUT)
        if waiting and len(waiting) == len(pipes):
            told = [waiting[process] for process in range(len(pipes))]
            waiting = {}
            for pipe in pipes:
                pipe.send(told)
        if time.monotonic() > deadline:
            hung = sorted(set(range(len(pipes))) - set(results))
            errors.append(AssertionError(f"processes {hung} hang"))
            break
    if errors:
        raise errors[0]
    return [results[process] for process in range(len(pipes))]


def on_link(
    counts: Sequence[int], body: Callable[[Communicator], Any], timeout: float = TIMEOUT
) -> list[Any]:
    """What ``body(communicator)`` returns on every rank, by rank; ``counts`` says how many ranks each process has."""

    def in_process(process: int, exchange: Callable[[Any], list[Any]]) -> list[Any]:
        link: Link = SharedMemoryLink(process, counts, exchange, timeout=timeout)
        rendezvous = Rendezvous(counts[process], timeout)
        ends = [HierarchicalCommunicator(local, rendezvous, link) for local in range(counts[process])]
        return run_on_threads(ends, body)

    return [result for results in run_in_processes(len(counts), in_process) for result in results]


def run_on_threads(ends: Sequence[Communicator], body: Callable[[Communicator], Any]) -> list[Any]:
    """What ``body`` returns on each end, each in a thread of its own."""
    results: list[Any] = [None] * len(ends)
    errors: list[BaseException | None] = [None] * len(ends)

    def run(rank: int) -> None:
        try:
            results[rank] = body(ends[rank])
        except BaseException as error:  # noqa: BLE001  # raised below, in the caller's own thread
            errors[rank] = error

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(len(ends))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(2 * TIMEOUT)
    assert not any(thread.is_alive() for thread in threads), "a rank hangs"
    for error in errors:
        if error is not None:
            raise error
    return results
