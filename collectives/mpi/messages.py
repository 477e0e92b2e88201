"""How messages are begun and given back, where all processes live as long as the job, and where some may die."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Protocol, final


class Messages(Protocol):
    """Of one communicator. Whatever is begun is a request, as MPI has them."""

    def send(self, buffer: Any, process: int, tag: int) -> Any:
        """Begin to send."""

    def receive(self, buffer: Any, process: int, tag: int) -> Any:
        """Begin to receive."""

    def give_back(self, requests: Iterable[Any]) -> None:
        """They have been done, all of them well."""


@final
class PlainMessages:
    """Where all live: MPI gives a request back when it is found to be done.

    Args:
        comm: what they go through.
    """

    def __init__(self, comm: Any) -> None:
        self.send, self.receive = comm.Isend, comm.Irecv

    def give_back(self, requests: Iterable[Any]) -> None:
        """There is nothing left to give back."""


@final
class MortalMessages:
    """Where some may die.

    Open MPI ends the whole job when a request that has been given back fails afterwards ("Send error after request freed"). That
    happens to a small message which counts as sent when it is copied; so sends are synchronous, and done when they have been
    received. And it happens to what counts as failed when its process dies, of which some part may still be on its way; so requests are persistent ones, which are given back by hand, and never after a
    failure: there is one lot of these for each loss.

    Args:
        comm: what they go through.
    """

    def __init__(self, comm: Any) -> None:
        self._comm = comm

    def send(self, buffer: Any, process: int, tag: int) -> Any:
        request = self._comm.Ssend_init(buffer, process, tag)
        request.Start()
        return request

    def receive(self, buffer: Any, process: int, tag: int) -> Any:
        request = self._comm.Recv_init(buffer, process, tag)
        request.Start()
        return request

    def give_back(self, requests: Iterable[Any]) -> None:
        for request in requests:
            request.Free()
