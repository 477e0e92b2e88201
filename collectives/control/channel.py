"""A process's line to the hub of its job: who is there, who failed, what hangs, who goes on with whom.

One thread reads it. What it learns stands in plain attributes, so that whoever waits for another process, in whatever way,
can look at them as often as it likes.
"""

from __future__ import annotations

import contextlib
import copy
import logging
import math
import os
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from typing import Any, final

from collectives.control.descriptions import Describe, Descriptions
from collectives.control.exit_hooks import ExitHooks
from collectives.control.hang_report import TIMEOUT, HangReport
from collectives.control.hub_connection import TELL_EVERY, HubConnection
from collectives.control.membership import Member as Member
from collectives.control.membership import Regrouped as Regrouped
from collectives.control.membership import gone, name_of
from collectives.control.reports import Reports
from collectives.control.votes import Vote, Votes
from collectives.errors import (
    CollectiveAbortedError,
    CollectiveError,
    CollectiveTimeoutError,
    PeerFailedError,
    in_words,
)
from xpdistribute.process_identity import identify, kill
from xpdistribute.wire import LIMIT, Message, WireError, encode
from xpdistribute.words import MOST, shortened

TO_BE_HEARD = 0.3
"""Seconds that a process which ends waits until the hub has its last words."""
_TO_ANSWER = 2.0

_log = logging.getLogger("xpdistribute")


@final
class Channel:
    """One process's end. Made by `connect`.

    Attributes:
        failure: why nothing can be done together any more, a `PeerFailedError` or `CollectiveTimeoutError`; None while all is well.
            Raise it by `check`. A `regroup` takes it back.
        gone: the processes that have failed or died, each with what to raise where it is waited for; replaced, never changed.
        left: the processes that have ended in good order. Whoever waits for one of them raises `ended`.
        process: this process's number; -1 for a newcomer before its first `regroup`.
        num_processes: how many the job has.
        newcomers: how many processes wait to be taken in by a `regroup`.
        epoch: how often the job's make-up has changed.
        elastic: whether it can change.
        num_spares: how many spare processes the job was started with.
        spares_called: in a spare, set when the others start MPI, for which they need it.
        votes: what processes have said of collectives of which nothing else told them how they went.
        descriptions: asked, in the channel's thread, when somebody wants to know what this process is doing; links add themselves.
    """

    def __init__(self, connection: HubConnection, host: str, describe: Describe) -> None:
        welcome = connection.welcome
        self.failure: BaseException | None = None
        self.gone: Mapping[int, PeerFailedError] = {}
        self.left: frozenset[int] = frozenset()
        process = welcome["process"]
        self.process: int = -1 if process is None else process
        self.num_processes: int = welcome["num_processes"]
        self.newcomers: int = welcome["waiting"]
        self.epoch: int = welcome["epoch"]
        self.elastic: bool = welcome["elastic"]
        self.num_spares: int = welcome["num_spares"]
        self.spares_called = threading.Event()
        self.descriptions = Descriptions(describe)
        self._reports = Reports(host)
        self.votes = Votes(self._send_vote)
        self.host = host
        self.address = connection.address
        self._connection = connection
        self._changed = threading.Condition()
        self._closed = False
        self._closed_by = "its channel to the hub is closed"
        self._heard = False
        self._is_dismissed = False
        self._gathers: dict[str, Message | None] = {}
        self._regrouped: Message | None = None
        self._is_regrouping = False
        self._left_peers: dict[int, str] = {}
        self._hooks: ExitHooks | None = None
        _all.add(self)
        connection.start(self._take, self._lose_hub)

    @classmethod
    def connect(
        cls,
        address: str,
        token: str,
        process: int | None,
        *,
        host: str,
        size: int | None = None,
        join: bool = False,
        spare: bool = False,
        timeout: float = 300.0,
        describe: Describe = dict,
    ) -> Channel:
        """Connect to the hub, waiting for it if it is not there yet.

        Args:
            address: of the hub, ``host:port``.
            token: the job's secret.
            process: this process's number; None with ``join``.
            host: what this process calls its host.
            size: how many processes this one believes the job to have; refused if it has another number.
            join: come as a newcomer, which gets its number by its first `regroup`.
            spare: as one that is only to take the place of another one.
            timeout: seconds to try for.
            describe: says what this process is doing where no link does.

        Raises:
            ValueError: the address is none; or the number is taken, or out of range; or the job has another size.
            RuntimeError: it is another job's hub, or none at all, or it takes no newcomers.
            CollectiveTimeoutError: there is no hub to be reached.
        """
        hello = {
            "type": "hello",
            "token": token,
            "process": process,
            "pid": os.getpid(),
            "host": host,
            "identity": identify(os.getpid()),
            "size": size,
            "join": join,
            "spare": spare,
        }
        return cls(HubConnection(address, hello, timeout), host, describe)

    @property
    def report(self) -> HangReport | None:
        """The last report of what hangs, None if there was none."""
        return self._reports.latest

    # ---------------------------------------------------------------- together

    def gather(self, key: str, value: Any, timeout: float) -> list[Any]:
        """Every process's value, by process. All must call it with the same key.

        Args:
            key: what is gathered; it stands in messages.
            value: of JSON's types; tuples come back as lists.
            timeout: seconds to wait for the others.

        Raises:
            PeerFailedError: a process failed, ended or died before it came.
            CollectiveTimeoutError: a process did not come in time; on all that wait.
            TypeError: the value has no form in JSON.
            ValueError: the key is being gathered by this process already, or the value is too long.
        """
        self.check()
        data = encode({"type": "gather", "key": key, "value": value, "epoch": self.epoch})
        if len(data) > LIMIT:
            raise ValueError(f"{key}: got a value of {len(data)} bytes; need at most {LIMIT}")
        with self._changed:
            if key in self._gathers:
                raise ValueError(f"{key}: process {self.process} gathers it already, in another thread")
            self._gathers[key] = None
        try:
            self._send_bytes(data)
            answer = self._wait(key, lambda: self._gathers[key], timeout)
        finally:
            with self._changed:
                del self._gathers[key]
        if answer["type"] == "gathered":
            return list(answer["values"])
        if answer["kind"] == "gone":
            self.check()
            raise self.ended(answer["process"])
        if answer["kind"] == "timeout":
            raise CollectiveTimeoutError(
                f"{answer['text']}; need all {self.num_processes} processes — is each of them started, and does each come here?",
                answer["missing"],
            )
        raise ValueError(answer["text"])

    def regroup(self, info: Any, admit: bool, timeout: float) -> Regrouped:
        """Go on with the processes that are left, and with the newcomers if every one of them admits them.

        Every live process of the job must call it; one that dies meanwhile is not waited for.

        Args:
            info: of JSON's types, shown to all.
            admit: whether newcomers may come in. They say True themselves.
            timeout: seconds to wait for the others; infinite in a spare.

        Raises:
            CollectiveTimeoutError: somebody did not come in time; on all that wait.
            CollectiveError: the job cannot go on with this process, or the hub is gone.
            SystemExit: in a spare, the job has ended without needing it.
        """
        with self._changed:
            if self._is_regrouping:
                raise ValueError(f"regroup: process {self.process} does it already, in another thread")
            self._is_regrouping, self._regrouped = True, None
        try:
            self._send({"type": "regroup", "epoch": self.epoch, "info": info, "admit": admit})
            answer = self._wait(None, lambda: self._regrouped, timeout)
        except CollectiveError:
            if self._is_dismissed:
                raise SystemExit(0) from None  # its program is as done as that of the others
            raise
        finally:
            self._is_regrouping = False
        if answer["type"] == "regroup_failed":
            if answer["missing"]:
                raise CollectiveTimeoutError(answer["text"], answer["missing"])
            raise CollectiveAbortedError(answer["text"])
        members = tuple(
            Member(one["pid"], one["host"], one["old_process"], one["info"]) for one in answer["members"]
        )
        return Regrouped(answer["epoch"], answer["process"], members)

    def explain(self, kind: str, about: str, waited: float, timeout: float = 10.0) -> HangReport:
        """What every process is doing: one report, the same for all who ask at the same time or about the same.

        All processes get it, as `report`. One of kind ``timeout`` becomes everybody's `failure`.

        Args:
            kind: ``timeout`` or ``mismatch``.
            about: what it is about, the link's name first, then such as the sequence number; who asks about the same later gets the same report.
            waited: seconds that this process has waited.
            timeout: seconds to wait for the report.

        Raises:
            CollectiveTimeoutError: the hub does not answer.
            PeerFailedError: the hub is gone.
        """
        with self._changed:
            known, before = self._reports.answer(kind, about), self.report
        if known is not None:
            return known
        state = self._reports.own_state(self.descriptions, about)
        self._send({"type": "report", "kind": kind, "about": about, "waited": float(waited), "state": state})
        deadline = time.monotonic() + timeout
        with self._changed:
            while self.report is before and not self._closed:
                if not self._changed.wait(max(0.0, deadline - time.monotonic())):
                    break
            if self.report is not None and self.report is not before:
                return self.report
        self.check()
        raise CollectiveTimeoutError(
            f"{about or kind}: process {self.process} waited {waited:g} s for the others, and the hub at {self.address} did not "
            f"say within {timeout:g} s what they do; is the process that hosts it stopped?"
        )

    # ------------------------------------------------------------ failing, ending

    def check(self) -> None:
        """Raise the `failure`, if there is one, as an instance of its own: several threads may raise it at once."""
        failure = self.failure
        if failure is not None:
            mine = copy.copy(failure)
            mine.__notes__ = list(getattr(failure, "__notes__", ()))
            raise mine
        if self._closed:
            raise CollectiveAbortedError(
                f"process {self.process}: {self._closed_by}; nothing can be agreed on any more"
            )

    def ended(self, process: int) -> PeerFailedError:
        """What whoever waits for a process that has `left` raises."""
        who = self._left_peers.get(process, f"process {process} of {self.num_processes}")
        return PeerFailedError(
            f"{who} has ended its program, and others wait for it; need every process to make the same calls — does one "
            "stop earlier, or exit before the others?",
            process,
        )

    def call_spares(self) -> None:
        """Have the spares, if there are any, come to the start of MPI."""
        if self.num_spares:
            self._send({"type": "call_spares"})

    def give_up(self, error: CollectiveError) -> None:
        """Fail, in the name of another thread, whatever this process does next with the others, who are told."""
        self.publish_failure(in_words(error))
        with self._changed:
            self.failure, self._closed = error, True
            self._changed.notify_all()

    def publish_failure(self, text: str, follows: int | None = None) -> None:
        """Tell the others that this process fails, and why; waits a moment until the hub has it.

        Args:
            text: its last words, such as a traceback.
            follows: the process whose failure is the reason; None if it is this one's own.
        """
        if self._closed:
            return
        text = shortened(text, 2 * MOST)  # the hub refuses what is longer than its limit
        if self.failure is None:
            last = text.rstrip().rpartition("\n")[2]
            self.failure = CollectiveAbortedError(
                f"process {self.process} has failed before and the others know it: {last}"
            )
        self._say_last({"type": "failed", "text": text, "follows": follows})

    def goodbye(self) -> None:
        """Tell the others that this process ends in good order; they must not wait for it any more."""
        if not self._closed:
            self._say_last({"type": "goodbye"})

    def install_hooks(self) -> None:
        """Say goodbye, or what went wrong, when this program ends. See `ExitHooks`."""
        if self._hooks is None:
            self._hooks = ExitHooks(self.publish_failure, self.goodbye)

    def close(self) -> None:
        """Give back the connection. Without a `goodbye` before, the others take this process for dead."""
        if self._hooks is not None:
            self._hooks.remove()
            self._hooks = None
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._connection.close()

    # -------------------------------------------------------------------- waiting

    def _wait(self, key: str | None, answer: Callable[[], Message | None], timeout: float) -> Message:
        """Wait for the hub's answer to what was sent, and tell every now and then who is missing."""
        start = time.monotonic()
        deadline, gave_up = start + timeout, False
        tell_at = start + TELL_EVERY if timeout < math.inf else math.inf
        while True:
            with self._changed:
                now = time.monotonic()
                self._changed.wait_for(
                    lambda: answer() is not None or self._is_cut_off(key),
                    min(max(0.0, min(deadline, tell_at) - now), threading.TIMEOUT_MAX),
                )
                found = answer()
                if found is not None:
                    return found
                cut_off = self._is_cut_off(key)
            if cut_off:
                self.check()
            now = time.monotonic()
            if now >= deadline and not gave_up:
                # The hub says who is missing, to all who wait: they raise the same.
                self._send({"type": "give_up", "key": key, "waited": float(timeout)})
                gave_up, deadline = True, now + _TO_ANSWER
                tell_at = deadline
            elif now >= deadline:
                raise CollectiveTimeoutError(
                    f"{key or 'regroup'}: process {self.process} of {self.num_processes} waited {timeout:g} s, and the hub at "
                    f"{self.address} does not say for whom; is the process that hosts it stopped?"
                )
            elif now >= tell_at:
                self._send({"type": "who", "key": key})
                tell_at += TELL_EVERY

    def _is_cut_off(self, key: str | None) -> bool:
        # A regroup is what one does after a failure, so only the loss of the hub ends it.
        return self._closed or (key is not None and self.failure is not None)

    # -------------------------------------------------------------------- sending

    def _send(self, message: Message) -> None:
        self._send_bytes(encode(message))

    def _send_bytes(self, data: bytes) -> None:
        if self._closed:
            self.check()
        try:
            self._connection.send(data)
        except OSError as error:
            self._lose_hub(f"sending to it failed: {error.strerror or error}")
            self.check()

    def _send_vote(self, link: str, vote: Vote) -> None:
        what = {"link": link, "number": vote.number, "succeeded": vote.succeeded}
        self._send({"type": "vote", "epoch": self.epoch, **what})

    def _say_last(self, message: Message) -> None:
        self._heard = False
        try:
            self._send(message)
        except CollectiveError:
            return  # the hub is gone: nobody is there to be told
        with self._changed:
            self._changed.wait_for(lambda: self._heard or self._closed, TO_BE_HEARD)

    # -------------------------------------------------------------------- reading

    def _take(self, message: Message) -> None:
        kind = message["type"]
        if kind == "state_wanted":
            with contextlib.suppress(CollectiveError):  # the loss of the hub, which is kept as the failure
                self._send(
                    {
                        "type": "state",
                        "id": message["id"],
                        "state": self._reports.own_state(self.descriptions, message["about"]),
                    }
                )
            return
        with self._changed:
            if kind in ("gathered", "gather_failed"):
                if message["key"] in self._gathers:
                    self._gathers[message["key"]] = message
            elif kind == "missing":
                _log.warning("%s: waiting for %s", message["key"] or "regroup", message["text"])
            elif kind in ("failed", "lost"):
                error = gone(message, self.num_processes)
                self.gone = {**self.gone, message["process"]: error}
                self._fail(error)
                if message.get("how") == "stopped" and message["host"] == self.host:
                    # Were it to go on, it would write into memory that is not its own any more.
                    kill(message["pid"], message["identity"])
            elif kind == "spare_stopped":
                if message["host"] == self.host:
                    kill(message["pid"], message["identity"])
            elif kind == "left":
                process = message["process"]
                self._left_peers[process] = name_of(message, self.num_processes)
                self.left |= {process}
            elif kind == "waiting":
                self.newcomers = message["count"]
            elif kind == "report":
                report = self._reports.take(message)
                if report.kind == TIMEOUT:
                    self._fail(report.error())
            elif kind == "spares_called":
                self.spares_called.set()
            elif kind == "dismissed":
                self._closed, self._closed_by = True, "the job has ended without needing this spare process"
                self._is_dismissed = True
            elif kind == "vote":
                self.votes.take(
                    message["link"], message["process"], Vote(message["number"], message["succeeded"])
                )
            elif kind == "regrouped":
                self._take_regrouped(message)
            elif kind == "regroup_failed":
                self._regrouped = message
            elif kind == "heard":
                self._heard = True
            elif kind == "hub_closed":
                self._closed, self._closed_by = True, "the process that hosts the hub has ended in good order"
                self._is_dismissed = self.process < 0 and self.num_spares > 0
            elif kind in ("expelled", "refused"):
                self._fail(PeerFailedError(f"process {self.process}: {message['text']}", self.process))
                self._closed = True
            else:
                raise WireError(f"message: the channel knows no {kind!r}")
            self._changed.notify_all()

    def _take_regrouped(self, message: Message) -> None:
        self.process = message["process"]
        self.num_processes = len(message["members"])
        self.newcomers = message["waiting"]
        self.epoch = message["epoch"]
        self.gone = {}
        self.left = frozenset()
        self._left_peers.clear()
        self.votes.clear()
        self._reports.clear()
        self.failure = None
        self._regrouped = message

    def _fail(self, failure: BaseException) -> None:
        if self.failure is None:
            self.failure = failure

    def _lose_hub(self, why: str) -> None:
        with self._changed:
            if not self._closed:
                self._fail(
                    PeerFailedError(
                        f"process {self.process}: the hub at {self.address} is gone ({why}); the process that hosts it, the "
                        "launcher or process 0, has ended or died — its output says more"
                    )
                )
                self._closed = True
            self._changed.notify_all()

    def _forget_after_fork(self) -> None:
        self._closed = True
        self.failure = CollectiveAbortedError(
            f"process {self.process}: this is a forked child, which is no process of the job; need a process of its own"
        )
        self._changed = threading.Condition()
        self._connection.forget_after_fork()


_all: weakref.WeakSet[Channel] = weakref.WeakSet()


def _after_fork() -> None:
    for channel in list(_all):
        channel._forget_after_fork()


os.register_at_fork(after_in_child=_after_fork)
