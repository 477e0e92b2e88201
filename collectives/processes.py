"""The processes of a job, and how this one finds the others.

Joined once and kept: all strategies of a process talk over one channel, each by a link of its own.
"""

from __future__ import annotations

import math
import os
import threading
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, final

from collectives.backends import BACKENDS, make_link
from collectives.cluster_environment import ClusterPlace, find_place, tf_config_changed
from collectives.clusters import TF_CONFIG, ClusterTask
from collectives.communication_options import DEFAULT_TIMEOUT, CommunicationOptions
from collectives.control.channel import Channel
from collectives.control.exit_hooks import followed
from collectives.errors import CollectiveAbortedError, PeerFailedError, common, in_words, told_in_full
from collectives.joining import connect
from collectives.link import Link
from collectives.renewable_link import RenewableLink
from collectives.shared_memory.segments import host_identity
from collectives.this_process import set_process_number

if TYPE_CHECKING:
    from collectives.mpi.standby import Standby

_TO_BE_EXCUSED = 2.0
"""Seconds that a process whose step has failed waits for the others to come to their next collective."""


@final
class Processes:
    """A job's processes, seen from one of them.

    Attributes:
        channel: to the hub of the job; None where this process is alone.
        place: of this process in it, as it was found when it joined.
        timeout: seconds that they wait for one another where no strategy says otherwise: those of the first one made.
        names: by process, what tells it apart however numbers change.

    Args:
        channel: as the attribute.
        place: likewise.
        timeout: likewise.
    """

    def __init__(
        self, channel: Channel | None, place: ClusterPlace, timeout: float = DEFAULT_TIMEOUT
    ) -> None:
        self.channel = channel
        self.place = place
        self.timeout = timeout
        self._standby: Standby | None = None
        if channel is not None and place.is_spare:
            from collectives.mpi.standby import Standby  # noqa: PLC0415  # most processes are none

            self._standby = Standby(channel.spares_called, channel.give_up, timeout)
        self._num_links = 0
        self._needs_mpi = False
        self._num_kept = 0
        self._kept: dict[int, tuple[weakref.ref[RenewableLink], CommunicationOptions, int]] = {}
        self._all: weakref.WeakSet[Link] = weakref.WeakSet()
        self._renewals: list[
            tuple[weakref.WeakMethod[Callable[[], None]], weakref.WeakMethod[Callable[[], list[str]]]]
        ] = []
        is_member = channel is None or channel.process >= 0
        self.names = tuple(f"process {number}" for number in range(self.num_processes if is_member else 0))

    @property
    def process(self) -> int:
        """The number of this one."""
        return 0 if self.channel is None else max(0, self.channel.process)

    @property
    def is_chief(self) -> bool:
        """Whether this one writes files and speaks for all."""
        return self.place.is_chief if self.channel is None else self.process == 0

    @property
    def cluster(self) -> ClusterTask:
        """The cluster as TF_CONFIG would describe it; the addresses of processes that were started otherwise are made up."""
        if self.place.task is not None:
            return self.place.task
        if self.place.is_alone:
            return ClusterTask()
        hosts = self.place.hosts if len(self.place.hosts) == self.num_processes else ()
        addresses = hosts or tuple(f"process:{number}" for number in range(self.num_processes))
        return ClusterTask((("worker", addresses),), "worker", self.process)

    def changed_environment(self) -> str | None:
        """What has changed in TF_CONFIG since this process joined, in words; None if nothing that matters has."""
        return tf_config_changed(self.place)

    @property
    def newcomers(self) -> int:
        """How many processes wait to be taken in; none where MPI connects several hosts, unless they were started with it as spares."""
        channel = self.channel
        return 0 if channel is None or (self._needs_mpi and not channel.num_spares) else channel.newcomers

    @property
    def num_processes(self) -> int:
        """How many there are."""
        return 1 if self.channel is None else self.channel.num_processes

    def fail(self, error: BaseException, link: Link | None = None) -> None:
        """Tell the other processes that this one has failed in a step, which they can't complete without it.

        Args:
            error: what it has failed with.
            link: that the step was made over. If the others come to a collective on it soon, or have failed too, all can go on.
        """
        if self.channel is None:
            return
        text = told_in_full(error)
        if link is not None and isinstance(error, Exception) and link.excuse(text, _TO_BE_EXCUSED):
            common(error)  # the others raise too, and all are at the same place
            return
        if self.channel.elastic and isinstance(error, PeerFailedError):
            return  # the job may go on; if not, the error ends this process, which is told then
        for link in list(self._all):
            link.fail(
                CollectiveAbortedError(
                    f"process {self.process}: a step failed in it before, with {in_words(error)}, and the others have been told; need a new "
                    "start of the job — xpdistribute run --max-restarts does it from the last checkpoint"
                )
            )
        follows = followed(error)
        self.channel.publish_failure(text, follows)

    def link(self, num_members: int, options: CommunicationOptions, backend: str = "auto") -> Link | None:
        """A new link between all processes; all make theirs at the same time. None where this one is alone.

        Args:
            num_members: replicas of this process.
            options: with the time that processes wait for one another.
            backend: one of `BACKENDS`.

        Raises:
            ValueError: no such backend.
            RuntimeError: one that these processes can't use.
        """
        if backend not in BACKENDS:
            raise ValueError(f"backend: got {backend!r}; need one of {', '.join(BACKENDS)}")
        channel = self.channel
        if channel is None:
            return None
        if not channel.elastic:
            return self._new_link(num_members, options, backend)
        is_member = channel.process >= 0
        link = RenewableLink(num_members, None)
        self._kept[self._num_kept] = (weakref.ref(link), options, num_members)
        self._num_kept += 1
        if is_member:
            try:
                link.renew(self._new_link(num_members, options, backend))
            except PeerFailedError as error:
                if error.process not in channel.gone:
                    raise
                self.regroup(admit=False, timeout=options.timeout)
        return link

    def regroup(self, *, admit: bool, timeout: float) -> None:
        """Go on with the processes that are left, and with newcomers if all admit them. All call it at the same time.

        Every link that all of them still have is made anew between these processes; then those who asked for it by `on_renewal`
        are told. If another process is lost meanwhile, all of that is done again without it, and newcomers wait for the next time.

        Raises:
            CollectiveError: it is not possible.
            ValueError: this process is a newcomer that has other strategies than the others.
        """
        channel = self.channel
        assert channel is not None
        while True:
            own = [words() for _, describe in self._renewals if (words := describe()) is not None]
            # By how many were made before it, alike in all processes; kept here, so that none goes before it is made anew.
            links = {
                number: link for number, (kept, *_) in self._kept.items() if (link := kept()) is not None
            }
            is_waiting = self._standby is not None
            regrouped = channel.regroup([own, list(links)], admit, math.inf if is_waiting else timeout)
            if self._standby is not None:
                self._standby.end()
                self._standby = None
            members = regrouped.members
            # A number means another process now; a name stays.
            self.names = tuple(
                self.names[old]
                if (old := member.old_process) is not None and old < len(self.names)
                else str(member.pid)
                for member in members
            )
            self._num_links = 0
            if members[regrouped.process].is_new:
                _require_alike(own, members[0].info[0])
            try:
                self._kept = {number: self._kept[number] for number in links}
                # When an object goes that nobody needs any more is up to each interpreter.
                common_to_all = set.intersection(*(set(member.info[1]) for member in members))
                for number, link in links.items():
                    if number in common_to_all:
                        _, options, num_members = self._kept[number]
                        link.renew(self._new_link(num_members, options, "auto"))
                    else:
                        link.fail(
                            CollectiveAbortedError(
                                "regroup: another process has this group no more, or has come after it was made; need it kept by all, and "
                                "made before share_state where newcomers are taken in — make a new one, in all processes"
                            )
                        )
                for renewal, _ in self._renewals:
                    told = renewal()
                    if told is not None:
                        told()
                return
            except PeerFailedError as error:
                if error.process not in channel.gone:
                    raise
                admit = False

    def forget_after_fork(self) -> None:
        """In a forked child, which maps the memory and has the connections of its parent: keep it from taking the parent's part."""
        for link in list(self._all):
            link.fail(
                CollectiveAbortedError(
                    f"process {self.process}: this is a forked child of it, which is no process of the job; need its collectives called "
                    "where the strategy was made — let the child compute only what needs no strategy, or start it by 'spawn'"
                )
            )

    def on_renewal(self, told: Callable[[], None], describe: Callable[[], list[str]]) -> None:
        """Call a method in every `regroup`, as long as its object exists.

        Args:
            told: called when the links have been made anew; it may be called again, if a process is lost meanwhile.
            describe: what a newcomer must have like the others, in words.
        """
        self._renewals.append((weakref.WeakMethod(told), weakref.WeakMethod(describe)))

    def _new_link(self, num_members: int, options: CommunicationOptions, backend: str) -> Link:
        channel = self.channel
        assert channel is not None
        number, self._num_links = self._num_links, self._num_links + 1
        name = f"link {channel.epoch}.{number}"
        timeout = options.timeout
        told = channel.gather(name, [num_members, host_identity(), backend], timeout)
        counts, hosts = [one[0] for one in told], [one[1] for one in told]
        backends = {one[2] for one in told}
        if len(backends) > 1:
            raise ValueError(
                f"backend: the processes ask for different ones, {', '.join(sorted(backends))}; need one"
            )
        self._needs_mpi = self._needs_mpi or len(set(hosts)) > 1
        link = make_link(channel, backend, counts, hosts, name, timeout, number)
        self._all.add(link)
        return link


def _require_alike(own: list[list[str]], others: list[list[str]]) -> None:
    """Refuse to be taken in by processes that have made something else."""
    if len(own) != len(others):
        raise ValueError(
            f"share_state: this process, which has come later, has {len(own)} strategies, the others have {len(others)}; need the "
            "same program"
        )
    for mine, theirs in zip(own, others, strict=True):
        if mine != theirs:
            only, lacking = sorted(set(mine) - set(theirs)), sorted(set(theirs) - set(mine))
            raise ValueError(
                f"share_state: this process, which has come later, has {', '.join(only) or 'nothing'} that the others don't have, and "
                f"lacks {', '.join(lacking) or 'nothing'} that they have; need the same program, which makes all variables before it "
                "calls share_state"
            )


_joining = threading.Lock()
_joined: Processes | None = None


def join(timeout: float = 300.0, task: ClusterTask | None = None) -> Processes:
    """This process's job, joined if it has not been yet.

    Args:
        timeout: seconds to wait for the others.
        task: of the cluster, instead of what TF_CONFIG says.

    Raises:
        ValueError: an environment that describes no possible job; or another task than the one that was joined as.
        CollectiveTimeoutError: there is no hub where it should be.
    """
    global _joined
    with _joining:
        if _joined is None:
            _joined = processes = _join(timeout, task)
            set_process_number(lambda: processes.process)
        elif task is not None and task != _joined.place.task:
            raise ValueError(
                f"join: this process has joined a job already, as {_joined.place}; need the same cluster for all strategies of a process"
            )
        return _joined


def joined() -> Processes | None:
    """The job that this process has joined; None before."""
    return _joined


def _join(timeout: float, task: ClusterTask | None) -> Processes:
    environ = dict(os.environ)
    if task is not None:
        environ[TF_CONFIG] = task.to_tf_config()
    place = find_place(environ)
    return Processes(connect(place, timeout), place, timeout)


def _after_fork() -> None:
    global _joined, _joining
    if _joined is not None:
        _joined.forget_after_fork()
    _joined, _joining = None, threading.Lock()


os.register_at_fork(after_in_child=_after_fork)
