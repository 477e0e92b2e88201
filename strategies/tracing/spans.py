"""Names for parts of a step, in the timeline of a trace."""

from __future__ import annotations

from types import TracebackType
from typing import Any, final

from collectives.flight_recorder import Mark, clock
from variables.replica_context import current_replica


@final
class span:  # noqa: N801  # used like a function: with span("forward"):
    """A block of a step that shows under its name in the timeline, while a trace is being taken; else nothing happens.

    Args:
        name: such as ``"forward"``.
        args: what is to stand beside it, of types that JSON has.
    """

    __slots__ = ("_args", "_began", "_marks", "_name", "_replica")

    def __init__(self, name: str, **args: Any) -> None:
        self._name = name
        self._args = args
        self._replica = current_replica()
        self._marks = None if self._replica is None else self._replica.rendezvous.recorder.marks
        self._began = 0

    def __enter__(self) -> None:
        if self._marks is not None:
            self._began = clock()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._marks is not None and self._replica is not None:
            mark = Mark("span", self._name, self._replica.rendezvous.step, self._began, clock(), self._args)
            self._marks[self._replica.local_replica_id].append(mark)
