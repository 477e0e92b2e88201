"""What all processes of a job were doing when one of them had waited too long, or had seen that the calls differ.

Every process gets the same report and makes the same error of it.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any, final

from collectives.errors import CollectiveMismatchError, CollectiveTimeoutError

State = Mapping[str, Any]
"""Of one process: ``seq``, ``call``, ``waiting`` and ``recent`` as its link says them, ``stack``, ``pid``, ``host``; or, of one
that did not answer, ``silent`` or ``gone``."""

TIMEOUT, MISMATCH = "timeout", "mismatch"
"""The kinds of report."""

_FRAMES = 6
_NAMED = 8
_NOTED = 16
_LIBRARY = os.path.dirname(os.__file__) + os.sep + "threading.py"
_HERE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep


@final
@dataclass(frozen=True)
class HangReport:
    """What every process said of itself.

    Attributes:
        number: which report of the job it is.
        kind: ``timeout`` or ``mismatch``.
        about: what was asked about, in the words of the link.
        waited: seconds that the reporter had waited.
        reporter: the process that asked first.
        states: by process.
    """

    number: int
    kind: str
    about: str
    waited: float
    reporter: int
    states: tuple[State, ...]

    @property
    def missing(self) -> tuple[int, ...]:
        """The processes that the reporter waits for: those that don't wait in the same call as it."""
        place = _place(self.states[self.reporter])
        return tuple(
            process
            for process, state in enumerate(self.states)
            if process != self.reporter and not (state.get("waiting") and _place(state) == place)
        )

    @property
    def calls(self) -> tuple[str | None, ...]:
        """What each process calls, in words; None for one that calls nothing."""
        return tuple(state.get("call") if state.get("waiting") else None for state in self.states)

    def error(self) -> CollectiveTimeoutError | CollectiveMismatchError:
        """The error that every process raises, with stacks and last calls as notes."""
        text = failure_text(self)
        error: CollectiveTimeoutError | CollectiveMismatchError
        if self.kind == MISMATCH:
            error = CollectiveMismatchError(text, self.calls)
        else:
            error = CollectiveTimeoutError(text, self.missing)
        late = self.missing
        # Those who are late first: of many processes only so many fit.
        order = sorted(range(len(self.states)), key=lambda process: (process not in late, process))
        for process in order[:_NOTED]:
            error.add_note(_note(process, self.states[process]))
        if len(order) > _NOTED:
            error.add_note(f"and {len(order) - _NOTED} processes more")
        return error


def failure_text(report: HangReport) -> str:
    """The message of the error that a report leads to."""
    state = report.states[report.reporter]
    where = state.get("call") or report.about or "waiting"
    if report.kind == MISMATCH:
        return (
            f"seq {state.get('seq', '?')}: the calls do not fit together: {_grouped(report.states)}; every process must make the "
            "same calls in the same order, with the same shapes and dtypes — look for a branch that only some take"
        )
    late = report.missing
    if not late:
        return (
            f"{where}: process {report.reporter} of {len(report.states)} waited {report.waited:.3g} s at seq "
            f"{state.get('seq', '?')}, and all others wait in the same call; they are slow, or their link is stuck — raise "
            "timeout_seconds if they are only slow"
        )
    named = "; ".join(
        f"{_name(process, report.states[process])} of {len(report.states)}: {_doing(report.states[process])}"
        for process in late[:_NAMED]
    )
    more = f"; and {len(late) - _NAMED} more" if len(late) > _NAMED else ""
    return (
        f"{where}: {_number(late)} did not come within {report.waited:.3g} s at seq {state.get('seq', '?')}, where process "
        f"{report.reporter} waits; {named}{more}; need every process to call it — raise timeout_seconds if one is only slow"
    )


def _place(state: State) -> tuple[Any, Any]:
    return state.get("seq"), state.get("call")


def _number(processes: Sequence[int]) -> str:
    listed = ", ".join(map(str, processes[:_NAMED])) + (", ..." if len(processes) > _NAMED else "")
    return f"process{'es' if len(processes) > 1 else ''} {listed}"


def _name(process: int, state: State) -> str:
    return f"process {process} (pid {state.get('pid')}, host {state.get('host')})"


def _doing(state: State) -> str:
    if "gone" in state:
        return str(state["gone"])
    if state.get("silent"):
        return "it does not answer: it is stopped, or native code holds the GIL — look with py-spy dump or gdb -p on its host"
    at = f"seq {state.get('seq', '?')}"
    if state.get("waiting"):
        return f"it waits in {state.get('call')} at {at}"
    frame = str(state.get("frame", ""))
    return f"it is in no collective, at {at}" + (f", but {frame}" if frame else "")


def _grouped(states: Sequence[State]) -> str:
    doing: dict[str, list[int]] = {}
    for process, state in enumerate(states):
        if state.get("waiting"):
            said = f"{state.get('call')} at seq {state.get('seq', '?')}"
        else:
            said = f"nothing ({_doing(state)})"
        doing.setdefault(said, []).append(process)
    return "; ".join(
        f"{_number(processes)} {'call' if len(processes) > 1 else 'calls'} {said}"
        for said, processes in doing.items()
    )


def _note(process: int, state: State) -> str:
    lines = [f"{_name(process, state)}: {_doing(state)}"]
    if recent := state.get("recent"):
        lines.append("  its last calls: " + "; ".join(map(str, recent)))
    if failed := state.get("describe_failed"):
        lines.append(f"  it could not say what it calls: {failed}")
    if stack := state.get("stack"):
        lines.extend(f"  {line}" for line in str(stack).splitlines())
    return "\n".join(lines)


# ------------------------------------------------------------------- this process


def stacks_now() -> tuple[str, str]:
    """Where this process's program and its replicas are: all stacks, and the innermost line of the main thread."""
    frames = sys._current_frames()
    parts, first = [], ""
    for thread in threading.enumerate():
        is_main = thread is threading.main_thread()
        frame = frames.get(thread.ident or 0)
        if frame is None or not (is_main or thread.name.startswith("xpdistribute-replica-")):
            continue
        lines = _lines(frame)
        parts += [f"Thread {thread.name} (most recent call first):", *(f"  {line}" for line in lines)]
        if is_main:
            first = "in " + next((line for line in lines if _LIBRARY not in line), lines[0])
    return "\n".join(parts), first


def _lines(frame: FrameType | None) -> list[str]:
    """As faulthandler writes them. Where inside this package it waits tells nobody anything."""
    inside = ""
    lines: list[str] = []
    while frame is not None and len(lines) < _FRAMES:
        code = frame.f_code
        line = f'File "{code.co_filename}", line {frame.f_lineno} in {code.co_name}'
        if not code.co_filename.startswith(_HERE) or lines:
            lines.append(line)
        else:
            inside = inside or line
        frame = frame.f_back
    return lines or [inside]
