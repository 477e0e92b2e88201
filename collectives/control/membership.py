"""Who is in the job, and what to raise where one of them is gone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, final

from collectives.errors import PeerFailedError
from xpdistribute.wire import Message


@final
@dataclass(frozen=True)
class Member:
    """A process of the job after a `Channel.regroup`.

    Attributes:
        pid: its process id.
        host: what it calls its host.
        old_process: its number before; None for a newcomer.
        info: what it gave to `regroup`.
    """

    pid: int
    host: str
    old_process: int | None
    info: Any

    @property
    def is_new(self) -> bool:
        """Whether it has just joined."""
        return self.old_process is None


@final
@dataclass(frozen=True)
class Regrouped:
    """How the job goes on.

    Attributes:
        epoch: how often its make-up has changed.
        process: this process's number from now on.
        members: by process; survivors in their old order, newcomers last.
    """

    epoch: int
    process: int
    members: tuple[Member, ...]


def name_of(message: Message, num_processes: int) -> str:
    """A process that a message is about."""
    return f"process {message['process']} of {num_processes} (pid {message['pid']}, host {message['host']})"


def gone(message: Message, num_processes: int) -> PeerFailedError:
    """What whoever waits for a process raises when the hub says that it has failed or died."""
    name, process = name_of(message, num_processes), message["process"]
    if message["type"] == "failed":
        text = message["text"]
        last = text.rstrip().rpartition("\n")[2]
        error = PeerFailedError(f"{name} failed: {last}", process, text)
        if text.rstrip() != last:
            error.add_note(f"What process {process} said:\n{text.rstrip()}")
        return error
    if message["how"] == "stopped":
        return PeerFailedError(f"{name} is treated as dead: {message['why']}", process)
    return PeerFailedError(
        f"{name} died: {message['why']}, and it had said neither goodbye nor what failed; was it killed, out of memory, or did "
        "its host go? — its host's log (dmesg) may say",
        process,
    )
