"""Our side of a rival: asks its processes to measure, and counts what they got wrong.

The protocol is lines. A process first says who it is, one JSON object; then each line ``measure NAME {..}``
is answered with one JSON object, ``{"seconds": [...], "wrong": 0}`` or ``{"error": "..."}``; ``quit`` ends it.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import queue
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any, final

from benchmarks.blas_threads import environment_for_rivals
from benchmarks.harness import Case

PROGRAMS = {"tensorflow": Path(__file__).with_name("tensorflow_rival.py")}
"""The programs that speak the protocol, by the name of the package they measure."""

_ANSWER_SECONDS = 300.0


class RivalError(RuntimeError):
    """A rival could not be started, did not answer in time, or failed."""


def find_rival_python(name: str, given: str | None) -> str:
    """The interpreter to run a rival with.

    Args:
        name: of the rival, a key of `PROGRAMS`.
        given: the user's choice, if any.

    Raises:
        RivalError: none was given, and this interpreter has no such package.
    """
    if given is not None:
        return given
    if importlib.util.find_spec(name) is None:
        raise RivalError(
            f"--against {name}: {name} is not installed beside this Python; need an interpreter that has it — "
            "name it with --rival-python PATH"
        )
    return sys.executable


@final
class Rival:
    """A rival, with one process for each of its cases that is asked for. Leaving the context ends them.

    One for each case, because TensorFlow mixes up the collectives of different graphs in one process.

    Args:
        name: a key of `PROGRAMS`.
        python: the interpreter to run it with.
        num_devices: how many replicas it must be able to have.

    Raises:
        RivalError: it did not start.
    """

    def __init__(self, name: str, python: str, num_devices: int) -> None:
        self.name = name
        self.num_devices = num_devices
        self.num_wrong = 0
        self._command = [python, str(PROGRAMS[name]), str(num_devices)]
        first = _Process(name, self._command)
        self.about = first.about
        self._idle: list[_Process] = [first]
        self._processes: dict[str, _Process] = {}

    def case(self, case: str, **details: Any) -> Case:
        """One of its cases, to take turns with ours; JSON's types for the details."""
        return lambda iterations: self.measure(case, iterations, **details)

    def measure(self, case: str, iterations: int, **details: Any) -> list[float]:
        """Seconds of each iteration of one of its cases. What it got wrong is added to ``num_wrong``.

        Raises:
            RivalError: it failed, or did not answer in time.
        """
        # Nor does TensorFlow let groups of two sizes live in one process.
        key = f"{case} {details.get('replicas')}"
        if key not in self._processes:
            self._processes[key] = self._idle.pop() if self._idle else _Process(self.name, self._command)
        answer = self._processes[key].ask(
            f"measure {case} {json.dumps({'iterations': iterations, **details})}"
        )
        self.num_wrong += int(answer["wrong"])
        return [float(seconds) for seconds in answer["seconds"]]

    def describe(self) -> str:
        """A line for the header."""
        told = ", ".join(f"{key} {value}" for key, value in self.about.items() if key != "import_seconds")
        return f"# rival    {told}"

    def close(self) -> None:
        """End its processes."""
        for process in (*self._idle, *self._processes.values()):
            process.close()
        self._idle, self._processes = [], {}

    def __enter__(self) -> Rival:
        return self

    def __exit__(self, *failure: object) -> None:
        self.close()


@final
class _Process:
    """A running program that speaks the protocol."""

    def __init__(self, name: str, command: list[str]) -> None:
        self._name = name
        self._answers: queue.Queue[str | None] = queue.Queue()
        self._complaints: list[str] = []
        try:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                env=environment_for_rivals(),
            )
        except OSError as error:
            raise RivalError(
                f"--rival-python: {command[0]} could not be run ({error}); need an interpreter that has {name}"
            ) from error
        self._readers = [
            threading.Thread(target=self._read_answers, daemon=True),
            threading.Thread(target=self._read_complaints, daemon=True),
        ]
        for reader in self._readers:
            reader.start()
        try:
            self.about = self._answer()
        except BaseException:
            self.close()
            raise

    def ask(self, line: str) -> dict[str, Any]:
        """The answer to a line.

        Raises:
            RivalError: there is none in time, or it says what went wrong.
        """
        self._say(line)
        return self._answer()

    def close(self) -> None:
        """End the process, in good order if it listens."""
        try:
            self._say("quit")
            self._process.wait(10)
        except (RivalError, subprocess.TimeoutExpired):
            self._process.kill()
            self._process.wait(10)
        for reader in self._readers:
            reader.join(10)
        for pipe in (self._process.stdin, self._process.stdout, self._process.stderr):
            if pipe is not None:
                with contextlib.suppress(OSError):  # what was still to be written has no reader any more
                    pipe.close()

    def _say(self, line: str) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(line + "\n")
            self._process.stdin.flush()
        except OSError as error:
            raise RivalError(f"{self._name}: its process has ended: {self._last_words()}") from error

    def _answer(self) -> dict[str, Any]:
        try:
            line = self._answers.get(timeout=_ANSWER_SECONDS)
        except queue.Empty:
            self._process.kill()
            raise RivalError(
                f"{self._name}: no answer within {_ANSWER_SECONDS:g} s; its process was ended"
            ) from None
        if line is None:
            status = self._process.wait(10)
            raise RivalError(f"{self._name}: its process ended with status {status}: {self._last_words()}")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise RivalError(f"{self._name}: {answer['error']}")
        return answer

    def _read_answers(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._answers.put(line)
        self._answers.put(None)

    def _read_complaints(self) -> None:
        # Read all the time: a full pipe would stop the rival. The last lines say why it failed, if it does.
        assert self._process.stderr is not None
        for line in self._process.stderr:
            self._complaints.append(line)
            del self._complaints[:-20]

    def _last_words(self) -> str:
        self._readers[1].join(1)
        return " ".join("".join(self._complaints).split()[-60:]) or "it said nothing"
