"""Real jobs of several processes: forked ones that stay and run one function after another, and scripts of their own.

All of them find one another as they do under the launcher, by way of a hub in this process.
"""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import pickle
import secrets
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NoReturn, final

import strategies as xd
from xpdistribute.hub import Hub

TIMEOUT = 20.0
"""Seconds that a process waits for the others: longer than a busy machine ever stops one."""
_ROOT = Path(__file__).parent.parent


class ProcessFailedError(AssertionError):
    """A process of a job raised, ended or hung; its traceback is in the text."""


@final
class Job:
    """Processes that run functions together, for as long as none of them fails; then new ones are started for the next function.

    Args:
        num_processes: how many.
        timeout: seconds that a function may take.
        inherited: a function that needs not be found by its name, as `run` otherwise needs.
    """

    def __init__(
        self, num_processes: int, timeout: float = 30.0, inherited: Callable[..., Any] | None = None
    ) -> None:
        self.num_processes = num_processes
        self._timeout = timeout
        self._inherited = inherited
        self._pids: list[int] = []
        self._pipes: list[Connection] = []
        self._hub: Hub | None = None

    def run(self, function: Callable[..., Any] | None, *args: Any) -> list[Any]:
        """What ``function(*args)`` returns in each process, by process.

        Args:
            function: of a module, or None for the inherited one.
            args: pickled, as the result.

        Raises:
            ProcessFailedError: it raised or ended in some process, or did not come back in time.
        """
        if not self._pids:
            self._start()
        for pipe in self._pipes:
            pipe.send_bytes(pickle.dumps((function, args)))
        results: dict[int, Any] = {}
        failures: dict[int, str] = {}
        deadline = time.monotonic() + self._timeout
        while len(results) + len(failures) < self.num_processes:
            told = {**results, **failures}
            waited_for = [pipe for number, pipe in enumerate(self._pipes) if number not in told]
            ready = wait(waited_for, max(0.0, deadline - time.monotonic()))
            if not ready:
                for number in set(range(self.num_processes)) - set(told):
                    os.kill(self._pids[number], signal.SIGUSR1)  # its stacks go to stderr
                    failures[number] = f"did not come back within {self._timeout:g} s"
                time.sleep(0.2)
            for number, pipe in enumerate(self._pipes):
                if pipe not in ready:
                    continue
                try:
                    is_good, value = pickle.loads(pipe.recv_bytes())
                except EOFError:
                    is_good, value = False, "ended without a word"
                (results if is_good else failures)[number] = value
                if not is_good:  # the others hear of it, and have no reason to wait for long
                    deadline = min(deadline, time.monotonic() + 5.0)
        if failures:
            self.close()
            raise ProcessFailedError(
                "\n\n".join(f"process {number}: {failures[number]}" for number in sorted(failures))
            )
        return [results[number] for number in range(self.num_processes)]

    def close(self) -> None:
        """End the processes."""
        for pid in self._pids:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        for pipe in self._pipes:
            pipe.close()
        if self._hub is not None:
            self._hub.close()
        self._pids, self._pipes, self._hub = [], [], None

    def _start(self) -> None:
        pairs = [multiprocessing.Pipe() for _ in range(self.num_processes)]
        sys.stdout.flush()
        sys.stderr.flush()
        for process in range(self.num_processes):
            pid = os.fork()
            if pid == 0:
                for number, (ours, theirs) in enumerate(pairs):
                    ours.close()
                    if number != process:
                        theirs.close()
                _serve(pairs[process][1], self._inherited)
            self._pids.append(pid)
        for _, theirs in pairs:
            theirs.close()
        self._pipes = [ours for ours, _ in pairs]
        # After the forks, so that no process holds the hub's sockets open.
        token = secrets.token_hex(8)
        self._hub = Hub(self.num_processes, token).start()
        for process, pipe in enumerate(self._pipes):
            pipe.send_bytes(pickle.dumps(environment(self._hub, token, process, self.num_processes)))


def run_in_job(num_processes: int, function: Callable[[], Any], timeout: float = 30.0) -> list[Any]:
    """What a function, which may be a closure, returns in each process of a job of its own, by process."""
    job = Job(num_processes, timeout, inherited=function)
    try:
        return job.run(None)
    finally:
        job.close()


def strategy_of(num_replicas: int, timeout: float = TIMEOUT) -> xd.MultiWorkerMirroredStrategy:
    """A strategy over all processes of the job that the calling process is in, with so many replicas in each."""
    return xd.MultiWorkerMirroredStrategy(
        devices=[f"cpu:{number}" for number in range(num_replicas)],
        communication_options=xd.CommunicationOptions(timeout_seconds=timeout),
    )


def environment(hub: Hub, token: str, process: int, num_processes: int) -> dict[str, str]:
    """What the launcher tells a process in its environment."""
    return {
        "XPDISTRIBUTE_HUB": hub.address,
        "XPDISTRIBUTE_TOKEN": token,
        "XPDISTRIBUTE_SIZE": str(num_processes),
        "XPDISTRIBUTE_RANK": str(process),
    }


def _serve(pipe: Connection, inherited: Callable[..., Any] | None) -> NoReturn:
    """A forked process: runs what it is sent until nobody is there to send more."""
    status = 1
    try:
        # The timers of faulthandler are no use here: in a forked child of pytest they wait for a thread that is not there.
        faulthandler.register(signal.SIGUSR1, 2, all_threads=True)
        os.environ.update(pickle.loads(pipe.recv_bytes()))
        while True:
            function, args = pickle.loads(pipe.recv_bytes())
            try:
                called = inherited if function is None else function
                assert called is not None
                answer = pickle.dumps((True, called(*args)))
            except BaseException:  # noqa: BLE001  # raised in the test
                answer = pickle.dumps((False, traceback.format_exc()))
            pipe.send_bytes(answer)
    except (EOFError, ConnectionError):
        status = 0
    finally:
        os._exit(status)


@final
@dataclass(frozen=True)
class Ended:
    """How a script ended.

    Attributes:
        status: its exit status, negative for a signal.
        out: what it printed.
        err: what it wrote to stderr.
        seconds: from the start of the job until then.
    """

    status: int
    out: str
    err: str
    seconds: float


def run_script(
    num_processes: int, source: str, *, timeout: float = 30.0, args: Sequence[str] = ()
) -> list[Ended]:
    """How a program ends in each process of a job of its own, by process. A hang fails.

    Args:
        num_processes: how many.
        source: of the program; ``strategies`` is there as ``xd``, ``numpy`` as ``np``, and a strategy ``s`` of one replica in
            each process.
        timeout: seconds for all of them together.
        args: of the program.
    """
    token = secrets.token_hex(8)
    hub = Hub(num_processes, token).start()
    start = time.monotonic()
    processes = [
        subprocess.Popen(
            [sys.executable, "-X", "faulthandler", "-c", _PROLOGUE + source, *args],
            env={
                **os.environ,
                **environment(hub, token, process, num_processes),
                "PYTHONPATH": str(_ROOT),
                "OPENBLAS_NUM_THREADS": "1",
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for process in range(num_processes)
    ]
    ended: dict[int, Ended] = {}
    try:
        while len(ended) < num_processes:
            for number, process in enumerate(processes):
                # Their output is short enough for the pipes, so nobody waits for it to be read.
                if number not in ended and process.poll() is not None:
                    seconds = time.monotonic() - start
                    out, err = process.communicate()
                    ended[number] = Ended(process.returncode, out, err, seconds)
            if time.monotonic() - start > timeout:
                hung = sorted(set(range(num_processes)) - set(ended))
                raise ProcessFailedError(f"processes {hung} hang; the others: {ended}")
            time.sleep(0.005)
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
                process.communicate()
        hub.close()
    return [ended[number] for number in range(num_processes)]


_PROLOGUE = """
import sys, time
import numpy as np
import strategies as xd
s = xd.MultiWorkerMirroredStrategy(communication_options=xd.CommunicationOptions(timeout_seconds=float(10)))
"""
