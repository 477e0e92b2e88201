"""One trace: from where it begins to what can be seen of it."""

from __future__ import annotations

import gzip
import logging
import os
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, final

from collectives.flight_recorder import FlightRecorder, Mark, Record, clock
from collectives.whole_file import write_whole
from strategies.tracing.chrome import chrome_trace
from strategies.tracing.plot import save_timeline
from strategies.tracing.summary import Summary
from strategies.tracing.timeline import Timeline
from variables.replica_context import ReplicaContext, current

if TYPE_CHECKING:
    from rich.console import Group

_Kept = tuple[list[deque[Record]], list[list[Mark]], int]
"""Logs and marks by position, and when the trace ended."""

_log = logging.getLogger("xpdistribute")


@final
class Trace:
    """A timeline of all replicas, from entering its block to leaving it.

    `Strategy.trace` makes one. It records what a `FlightRecorder` sees, and steps, updates and spans besides; the file is
    written as a whole when the block is left, also by an error.

    Args:
        recorder: of the group.
        path: of the file, ``.json``, or ``.json.gz`` to have it compressed; None writes none.
        title: of the whole.
        tracks: the members' names, by position.
        max_events: a member; a trace that reaches it records no further steps.

    Raises:
        ValueError: ``max_events`` below 1, or not as many tracks as members.
    """

    def __init__(
        self,
        recorder: FlightRecorder,
        path: str | os.PathLike[str] | None = None,
        *,
        title: str = "trace",
        tracks: Sequence[str] | None = None,
        max_events: int = 1_000_000,
    ) -> None:
        if max_events < 1:
            raise ValueError(f"trace: got max_events={max_events}; need a number above 0")
        self.path = None if path is None else Path(path)
        self.title = title
        self._tracks = tuple(tracks or (f"{recorder.noun} {member}" for member in recorder.members))
        if len(self._tracks) != len(recorder.members):
            raise ValueError(
                f"trace: got {len(self._tracks)} tracks for {len(recorder.members)} members; need one each"
            )
        self._recorder = recorder
        self._max_events = max_events
        self._process_id = 0
        self._began = self._started_at = 0
        self._kept: _Kept | None = None
        self._timeline: Timeline | None = None
        self.is_cut_short = False
        """Whether it has reached ``max_events``."""

    # ----------------------------------------------------------------- its life

    def __enter__(self) -> Self:
        if self.path is not None:
            # Now, and not after hours of training.
            _require_writable(self.path)
        self._recorder.keep_everything()
        self._process_id = os.getpid()
        self._kept = self._timeline = None
        self._began, self._started_at = clock(), time.time_ns()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if os.getpid() != self._process_id:
            return  # a forked child left the block that its parent is in
        self._finish()
        if self.path is None:
            return
        try:
            write_whole(self.path, self._content())
        except OSError as problem:
            if error is None:
                raise
            error.add_note(f"trace: {self.path} could not be written: {problem}")

    def traced(self, step: Callable[..., Any], depth: int) -> Callable[..., Any]:
        """The step, leaving a mark in every replica that runs it."""
        marks = self._recorder.marks
        if marks is None:
            return step
        kept = max(len(log) + len(mine) for log, mine in zip(self._recorder.logs, marks, strict=True))
        if not depth and kept >= self._max_events:
            self.is_cut_short = True
            self._finish()
            _log.warning(
                "trace: reached max_events=%d; the steps from now on are not in it", self._max_events
            )
            return step
        return partial(_run_traced, step, marks, depth)

    def _finish(self) -> None:
        if self._kept is None:
            self._kept = (*self._recorder.keep_the_last(), clock())

    # ---------------------------------------------------------- what can be seen

    @property
    def timeline(self) -> Timeline:
        """All that was recorded, so far where the block has not been left.

        Raises:
            RuntimeError: it has not begun.
        """
        if not self._process_id:
            raise RuntimeError(
                "trace: has not begun; need what happens in its block — with strategy.trace() as trace:"
            )
        if self._timeline is not None:
            return self._timeline
        if self._kept is None:
            recorder, marks = self._recorder, self._recorder.marks
            assert marks is not None
            # Copies, as replicas may be adding to them.
            logs: Sequence[Iterable[Record]] = [list(log) for log in recorder.logs]
            return Timeline.of(recorder.members, logs, [list(mine) for mine in marks], self._began, clock())
        kept, marks, ended = self._kept
        self._timeline = Timeline.of(self._recorder.members, kept, marks, self._began, ended)
        self._kept = ([], [], ended)  # the timeline has it all
        return self._timeline

    @property
    def statistics(self) -> Summary:
        """Where the time went, as numbers."""
        return Summary.of(self.timeline)

    def summary(self) -> Group:
        """Where the time went, as tables: ``rich.print(trace.summary())``."""
        return self.statistics.tables(self.title)

    def save_plot(self, path: str | os.PathLike[str], steps: range | None = None) -> None:
        """Draw some steps as a picture, with matplotlib.

        Args:
            path: of the picture; its suffix says which kind.
            steps: which steps of the trace, from 0; None takes three that are typical.

        Raises:
            ModuleNotFoundError: matplotlib is not installed.
            ValueError: no such steps.
        """
        save_timeline(path, self.timeline, self.title, steps)

    def _content(self) -> bytes:
        about = {
            "began": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(self._started_at / 1e9)),
            "cut_short": self.is_cut_short,
            "python": sys.version.split()[0],
        }
        content = chrome_trace(self.timeline, self.title, self._tracks, about)
        if self.path is not None and self.path.suffix == ".gz":
            return gzip.compress(content, 6)
        return content


def _run_traced(
    step: Callable[..., Any], marks: list[list[Mark]], depth: int, /, *args: Any, **kwargs: Any
) -> Any:
    replica = current.get()
    assert isinstance(replica, ReplicaContext)
    began = clock()
    try:
        return step(*args, **kwargs)
    finally:
        name = getattr(step, "__qualname__", type(step).__qualname__)
        mark = Mark("step", name, replica.rendezvous.step, began, clock(), {"depth": depth})
        marks[replica.local_replica_id].append(mark)


def _require_writable(path: Path) -> None:
    if path.is_dir():
        raise IsADirectoryError(
            f"trace: got {path}, which is a folder; need the path of a file, such as trace.json"
        )
    path.parent.mkdir(parents=True, exist_ok=True)
    if not os.access(path.parent, os.W_OK | os.X_OK):
        raise PermissionError(f"trace: {path.parent} can't be written to; need a folder that can")
