"""What the processes of a job agree on when they save and restore; a process that is alone agrees with itself.

All of it goes over the channel to the job's hub, so it stands in no order with the steps' collectives.
"""

from __future__ import annotations

import logging
import os
import zlib
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn, final

from collectives.communication_options import CommunicationOptions
from collectives.errors import CollectiveTimeoutError, common, in_words
from collectives.link import Link
from collectives.processes import Processes, joined
from strategies.checkpoints.errors import CheckpointError, CheckpointMismatchError

TO_WRITE = 3600.0
"""Seconds that the others wait for the chief's disk, once all are there: that it fails or dies is told at once."""

_KEY = "checkpoint"
"""Of every agreement: whoever calls something else meets the others too, and all are told."""
_HINT = (
    "saving and restoring checkpoints is for all processes of a job: every one must call it, and only the chief writes — not "
    "`if strategy.is_chief: checkpoint.save(...)`"
)
_KINDS: Mapping[str, type[Exception]] = {
    kind.__name__: kind
    for kind in (
        CheckpointError,
        FileExistsError,
        FileNotFoundError,
        IsADirectoryError,
        MemoryError,
        ModuleNotFoundError,
        NotADirectoryError,
        OSError,
        OverflowError,
        PermissionError,
        TypeError,
        ValueError,
    )
}

_MOST_NAMES = 10_000
"""That are sent to say which of them differ."""

_log = logging.getLogger("xpdistribute")


@final
class Together:
    """The processes that a checkpoint is saved and restored by.

    Args:
        processes: of the job; None for a process that is in none.
    """

    def __init__(self, processes: Processes | None) -> None:
        channel = None if processes is None else processes.channel
        # A process that waits to be taken in takes no part in what the others do yet.
        self.is_waiting = channel is not None and channel.process < 0
        self._processes = None if channel is None or self.is_waiting else processes

    @classmethod
    def now(cls) -> Together:
        """All processes of the job that this one has joined by making a strategy of several processes; it alone otherwise."""
        return cls(joined())

    @property
    def is_alone(self) -> bool:
        """Whether there is nobody to agree with."""
        return self._processes is None

    @property
    def is_elastic(self) -> bool:
        """Whether the job goes on without the processes that it loses."""
        channel = None if self._processes is None else self._processes.channel
        return channel is not None and channel.elastic

    @property
    def process(self) -> int:
        """The number of this one."""
        return 0 if self._processes is None else self._processes.process

    @property
    def num_processes(self) -> int:
        """How many there are."""
        return 1 if self._processes is None else self._processes.num_processes

    @property
    def is_chief(self) -> bool:
        """Whether this process is the one that writes."""
        return self.process == 0 and not self.is_waiting

    @property
    def timeout(self) -> float:
        """Seconds that the processes wait for one another."""
        assert self._processes is not None
        return self._processes.timeout

    def agree(
        self,
        what: str,
        value: Any = None,
        error: BaseException | None = None,
        *,
        timeout: float | None = None,
        key: str = _KEY,
    ) -> list[Any]:
        """Every process's value, by process, unless something went wrong in one of them: then all raise that.

        Args:
            what: is agreed on; the same in all processes.
            value: of JSON's types.
            error: what went wrong here.
            timeout: seconds to wait for the others; None for the job's.
            key: tells agreements apart that are made at the same time.

        Raises:
            Exception: the error of the first process that has one: of the same kind and with the same text.
            ValueError: the processes are at different places.
            CollectiveTimeoutError: some process did not come.
            PeerFailedError: some process is gone.
        """
        channel = None if self._processes is None else self._processes.channel
        if channel is None:
            if error is not None:
                raise error
            return [value]
        message = [what, value, None if error is None else _told(error)]
        try:
            told = channel.gather(key, message, self.timeout if timeout is None else timeout)
        except CollectiveTimeoutError as late:
            raise CollectiveTimeoutError(f"{what}: {late} ({_HINT})", late.missing) from None
        places = [one[0] for one in told]
        if len(set(places)) > 1:
            raise common(ValueError(f"{what}: {_differing(places)}; need the same call in all processes"))
        for process, one in enumerate(told):
            if one[2] is not None:
                self._raise(what, process, one[2], error)
        return [one[1] for one in told]

    def agree_on(self, what: str, values: Mapping[str, Any], error: BaseException | None = None) -> list[Any]:
        """As `agree`, of values that must be equal in all processes.

        Args:
            what: as for `agree`.
            values: by what they are called.
            error: as for `agree`.

        Raises:
            ValueError: they differ; otherwise as `agree`.
        """
        told = self.agree(what, dict(values), error)
        for name in values:
            given = [one[name] for one in told]
            if any(one != given[0] for one in given):
                raise common(
                    ValueError(
                        f"{what}: {name}: {_differing([repr(one) for one in given])}; need one for all processes"
                    )
                )
        return told

    def require_same_names(self, what: str, names: Sequence[str]) -> None:
        """Check that all processes have objects of the same names.

        Raises:
            ValueError: they don't; otherwise as `agree`.
        """
        if self.is_alone:
            return
        checksums = self.agree(f"{what}: which objects", zlib.crc32("\0".join(sorted(names)).encode()))
        if len(set(checksums)) == 1:
            return
        told = [
            set(one) for one in self.agree(f"{what}: the names of the objects", sorted(names)[:_MOST_NAMES])
        ]
        process = next(number for number, checksum in enumerate(checksums) if checksum != checksums[0])
        only = sorted(told[0] ^ told[process])
        has, lacks = (0, process) if only and only[0] in told[0] else (process, 0)
        raise common(
            ValueError(
                f"{what}: the checkpoint of process {has} has {only[0] if only else 'objects'}, that of process {lacks} does not; "
                "need the same objects in all processes"
            )
        )

    def link(self) -> Link:
        """A link of its own for what is too much for the channel; all processes make it together. Close it soon."""
        assert self._processes is not None
        link = self._processes.link(1, CommunicationOptions(timeout_seconds=self.timeout))
        assert link is not None  # there are others
        return link

    def say(self, text: str, *details: object) -> None:
        """A warning in the log, once for all processes."""
        if self.is_chief:
            _log.warning(text, *details)

    def _raise(self, what: str, process: int, told: Mapping[str, Any], own: BaseException | None) -> NoReturn:
        if own is not None and (process == self.process or _told(own) == told):
            raise common(own)
        error = _revived(told)
        error.add_note(f"{what}: process {process} of {self.num_processes} raised it; so do all")
        raise common(error) from own


def _differing(values: Sequence[str]) -> str:
    """Who has what, of values that differ."""
    first = values[0]
    other = next(number for number, value in enumerate(values) if value != first)
    return f"got {first} in process 0, {values[other]} in process {other}"


def _told(error: BaseException) -> dict[str, Any]:
    # The type is told anyway.
    told: dict[str, Any] = {"type": type(error).__name__, "text": in_words(error).partition(": ")[2]}
    if isinstance(error, OSError) and error.errno is not None:
        names = [_text(name) for name in (error.filename, error.filename2)]
        told["os"] = [error.errno, error.strerror, names[0], None, names[1]]
    if isinstance(error, CheckpointMismatchError):
        told["mismatches"] = list(error.mismatches)
    return told


def _text(name: object) -> str | None:
    """A file's name, which Python keeps as it was given: as text, bytes, or the number of an open file."""
    return None if name is None else os.fsdecode(name) if isinstance(name, (str, bytes)) else str(name)


def _revived(told: Mapping[str, Any]) -> Exception:
    """An error like that of another process. Only what is listed is made: the text comes from outside."""
    if "os" in told:
        return OSError(*told["os"])  # Python makes the subclass that the number stands for
    if "mismatches" in told:
        return CheckpointMismatchError(told["text"], told["mismatches"])
    kind = _KINDS.get(told["type"])
    return RuntimeError(f"{told['type']}: {told['text']}") if kind is None else kind(told["text"])
