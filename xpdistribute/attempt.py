"""One start of a job: mpiexec, the ranks that it has started, and those that take the places of dead ones.

A single thread waits for everything at once: output, signals, children that end, what the hub tells. So there is no moment at
which a signal comes too early or a child's end is missed.
"""

from __future__ import annotations

import math
import os
import select
import signal
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from xpdistribute.hub_reports import HubReports
from xpdistribute.mpiexec_words import MpiexecWords
from xpdistribute.outcome import Result, find_culprit
from xpdistribute.output import ERR, OUT, Output
from xpdistribute.rank_files import RankFiles
from xpdistribute.rank_processes import RankProcesses

if TYPE_CHECKING:
    from xpdistribute.events import Event, Regrouped
    from xpdistribute.hub import Hub

_TO_START = 0.06
"""Seconds after which the hub is loaded if no rank has asked for it before: the start of the ranks needs the cores first."""
_TO_END = 1.2
"""Seconds that ranks have to end by themselves after Ctrl-C or SIGTERM."""
_TO_CLEAN_UP = 0.5
"""Seconds that mpiexec has then; what is left is killed."""
_TO_NOTICE = 1.0
"""Seconds that mpiexec has to end by itself when no rank is left, or the others when one has failed: some never do."""
_TO_FINISH_LINE = 0.02
"""Seconds that rank 0 has to end a line before what it has begun is shown."""
_LOOK_EVERY = 0.1
"""Seconds between looks at the ranks of an elastic job, as nothing else says when they have ended."""
_LOOK_SELDOM = 1.0
"""Seconds between looks at the ranks of others, of which mpiexec tells unless they end with status 0."""


class Attempt:
    """One start of the job.

    Args:
        command: mpiexec with all its arguments.
        environment: of mpiexec and of ranks that the launcher starts itself.
        program: the command of one rank on this machine, for these.
        listener: the descriptor of the socket that the ranks reach the hub at.
        open_hub: starts the hub behind it, which calls what it is given with what happens.
        files: where the ranks of this machine leave their ids and find their pipes.
        output: where what they print goes.
        is_local: whether all ranks are on this machine.
        elastic: whether the others go on when one dies.
        num_processes: how many compute.
        num_spares: how many more are started, to take the places of those that die.
        replacements: how many times each process is replaced then, where there are no spares.
        deadline: a `time.monotonic` at which the job is ended; None for never.
    """

    def __init__(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        program: Sequence[str],
        listener: int,
        open_hub: Callable[[Callable[[Event | Regrouped], None]], Hub],
        files: RankFiles,
        output: Output,
        *,
        num_processes: int,
        num_spares: int,
        is_local: bool,
        elastic: bool,
        replacements: int,
        deadline: float | None,
    ) -> None:
        self._command = list(command)
        self._environment = dict(environment)
        self._program = list(program)
        self._listener = listener
        self._open_hub = open_hub
        self._open_hub_at: float | None = None
        self._files = files
        self._output = output
        self._num_ranks = num_processes + num_spares
        self._is_local = is_local
        self._elastic = elastic
        self._deadline = deadline
        self._words = MpiexecWords(output, is_tagged=not is_local)
        self._events: deque[Event | Regrouped] = deque()
        self._wake_read, self._wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._poll = select.poll()
        self._sources: dict[int, tuple[int | None, int]] = {}
        self._processes = RankProcesses(files)
        self._reports = HubReports(
            self._processes,
            output,
            self._replace,
            self._end_by,
            num_processes=num_processes,
            num_spares=num_spares,
            is_local=is_local,
            elastic=elastic,
            replacements=replacements,
        )
        self._hub: Hub | None = None
        self._signal: int | None = None
        self._is_late = False
        self._is_closed = False
        self._end_at: float | None = None
        self._end_step = 0

    def _tell(self, event: Event | Regrouped) -> None:
        """What the hub calls, in its own thread."""
        self._events.append(event)
        self.wake()

    def wake(self) -> None:
        """Have the waiting thread look around."""
        if self._is_closed:
            return
        try:
            os.write(self._wake_write, b"\0")
        except BlockingIOError:  # it has been woken many times already
            return

    def resize(self) -> None:
        """Give the terminals of the job the size that the launcher's own has by now."""
        from xpdistribute.terminal import copy_size  # noqa: PLC0415  # where there is one

        for master, like in self._files.terminals.items():
            try:
                copy_size(like, master)
            except OSError:  # it is closed; what is written to it will tell
                continue

    def stop(self, number: int) -> None:
        """End the job, as a signal asks for; a second one ends it at once."""
        self._reports.is_muted = True
        if self._signal is None:
            self._signal = number
            self._end_at = 0.0
        else:
            self._end_step = 2
            self._end_at = 0.0
        self.wake()

    def run(self) -> Result:
        """Start it, and return when no rank is left."""
        watch = copier = None
        pipes: list[int] = []
        try:
            pipes = self._start()
            copier = self._files.forward_input() if self._is_local else None
            watch = self._files.watch(self._processes.mpiexec, () if copier is None else (copier,))
            self._poll.register(self._listener, select.POLLIN)
            self._open_hub_at = time.monotonic() + _TO_START
            while not self._is_over():
                self._wait()
            self._take_events()
            self._drain()
            if self._hub is not None:
                self._reports.look(self._hub)
                self._hub.all_ended()
                self._take_events()
            self._reports.act(math.inf)
        except BrokenPipeError:
            self._signal = signal.SIGPIPE  # nobody reads the output any more
        finally:
            self._processes.kill_all()
            if copier is not None:
                os.kill(copier, signal.SIGKILL)
                os.waitpid(copier, 0)
            if self._hub is not None:
                self._hub.close()
            if watch is not None:
                os.write(watch, b"done\n")
                os.close(watch)
            self._is_closed = True
            for descriptor in (*pipes, self._wake_read, self._wake_write):
                os.close(descriptor)
        return self._result()

    # ------------------------------------------------------------ starting

    def _start(self) -> list[int]:
        descriptors, reads = {}, []
        for stream in (OUT, ERR):
            read, descriptors[stream] = os.pipe()
            os.set_blocking(read, False)
            reads.append(read)
            self._sources[read] = (None, stream)
        if self._is_local or os.isatty(0):
            # In a group of its own mpiexec can't read from the terminal; in ours it would get each Ctrl-C too.
            descriptors[0] = os.open(os.devnull, os.O_RDONLY)
        self._sources.update(self._files.pipes)
        for descriptor in (*self._sources, self._files.ended, self._wake_read):
            self._poll.register(descriptor, select.POLLIN)
        try:
            self._processes.start_mpiexec(self._command, self._environment, descriptors)
        finally:
            for descriptor in descriptors.values():
                os.close(descriptor)
        return reads

    def _replace(self, rank: int) -> None:
        if self._end_at is not None:
            return
        environment = {**self._environment, "XPDISTRIBUTE_RANK": str(rank), "XPDISTRIBUTE_JOIN": "1"}
        self._processes.start_newcomer(rank, self._files.command(self._program), environment)

    # ------------------------------------------------------------ waiting

    def _wait(self) -> None:
        ready = self._poll.poll(self._patience() * 1000)
        if not ready and self._output.has_prompt:
            self._output.show_prompt()
        # Before the output: whose is shown follows from the events that came before it.
        self._take_events()
        for descriptor, _ in ready:
            if descriptor == self._listener:
                self._open_hub_at = 0.0
            elif descriptor == self._wake_read:
                os.read(descriptor, 1 << 16)
            elif descriptor == self._files.ended:
                self._take_ended()
            elif not self._read(descriptor):
                self._poll.unregister(descriptor)
                del self._sources[descriptor]
        self._processes.reap()
        if self._hub is not None:
            self._reports.look(self._hub)
        now = time.monotonic()
        self._reports.act(now)
        if self._open_hub_at is not None and now >= self._open_hub_at:
            self._open_hub_at = None
            self._poll.unregister(self._listener)
            self._hub = self._open_hub(self._tell)
        if self._deadline is not None and now >= self._deadline and not self._is_late:
            self._is_late = self._reports.is_muted = True
            self._end_at = 0.0 if self._end_at is None else self._end_at
        if self._end_at is not None and now >= self._end_at:
            self._end(now)

    def _patience(self) -> float:
        """Seconds to wait at most."""
        deadline = None if self._is_late else self._deadline
        times = [at for at in (self._end_at, self._open_hub_at, deadline) if at is not None]
        patience = max(0.0, min(times) - time.monotonic()) if times else 3600.0
        if self._output.has_prompt:
            return min(patience, _TO_FINISH_LINE)
        if self._elastic or self._processes.mpiexec_status is not None:
            return min(patience, _LOOK_EVERY)
        return min(patience, _LOOK_SELDOM)

    def _read(self, descriptor: int) -> bool:
        """Take what there is on it; whether there may be more."""
        rank, stream = self._sources[descriptor]
        try:
            data = os.read(descriptor, 1 << 16)
        except BlockingIOError:
            return True
        if not data:
            return False
        if rank is None:
            self._words.take(stream, data)
        else:
            self._output.take(rank, stream, data)
        return True

    def _take_ended(self) -> None:
        if self._processes.take_ended() and not self._elastic:
            # Not every mpiexec ends the others.
            self._end_by(time.monotonic() + _TO_NOTICE)

    def _end_by(self, at: float) -> None:
        self._end_at = at if self._end_at is None else min(self._end_at, at)

    def _drain(self) -> None:
        """Take what is still in the pipes. Not until their end: a rank's own children may have them open."""
        for descriptor in list(self._sources):
            # What was written to a terminal takes a moment to its other end.
            patience = 0.02 if descriptor in self._files.terminals else 0.0
            while select.select([descriptor], [], [], patience)[0] and self._read(descriptor):
                pass
        self._take_ended()
        self._words.flush()
        self._output.flush()

    # ------------------------------------------------------------ what the hub tells

    def _take_events(self) -> None:
        while self._events:
            self._reports.take(self._events.popleft())

    # ------------------------------------------------------------ ending

    def _is_over(self) -> bool:
        """Whether no rank is left; also sees to it that mpiexec notices."""
        processes = self._processes
        if processes.mpiexec_status is not None and not processes.has_newcomers:
            return True
        if not self._elastic or self._end_at is not None or processes.has_newcomers:
            return False
        if self._is_local and len(processes.statuses) == self._num_ranks:
            # With ULFM it sometimes never ends.
            self._end_by(time.monotonic() + _TO_NOTICE)
            self._end_step = 1
        return False

    def _end(self, now: float) -> None:
        """The next, sterner step to end what is left."""
        if self._end_step == 0:
            number = self._signal or signal.SIGTERM
            if self._signal == signal.SIGINT:
                # Everybody's traceback of the same Ctrl-C would bury what the first one says.
                ranks = range(self._num_ranks)
                self._output.hidden.update((rank, ERR) for rank in ranks if rank != self._output.speaker)
            self._processes.signal_ranks(number)
            self._end_step, self._end_at = 1, now + _TO_END
            if self._is_local and self._files.pids():
                return
            self._end_at = now  # the ranks of other hosts are mpiexec's to tell
        if self._end_step == 1:
            self._processes.signal_mpiexec(signal.SIGTERM)
            self._processes.kill_newcomers()
            self._end_step, self._end_at = 2, now + (_TO_CLEAN_UP if self._is_local else 3 * _TO_CLEAN_UP)
        elif self._end_step == 2:
            self._processes.kill_all()
            self._end_at = now + _TO_CLEAN_UP

    # ------------------------------------------------------------ the result

    def _result(self) -> Result:
        members = self._reports.members
        # Of ranks on other hosts it is known only by what they do.
        has_started = bool(
            self._processes.pids() or members is not None or self._words.endings or self._output.has_taken
        )
        if self._signal is not None:
            return Result(128 + self._signal, signal=self._signal, has_started=has_started)
        if self._is_late:
            return Result(124, is_late=True, has_started=has_started)
        status = self._processes.mpiexec_status or 0
        if self._elastic:
            # mpiexec was told of no failure, and may have been ended when no rank was left.
            own = self._processes.statuses.values()
            has_ended_well = 0 in own if members is None else members.has_ended_well
            if self._is_local or members is not None:
                if has_ended_well:
                    return Result(0)
                status = status or 1
        culprit = find_culprit(
            status, self._processes, members, self._words.endings, self._output, is_local=self._is_local
        )
        if culprit is None:
            return Result(status, has_started=has_started)
        return Result(culprit.status or status or 1, culprit, has_started=has_started)
