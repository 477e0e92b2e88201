"""Runs the steps of one strategy: hands out what each replica needs, one step at a time, and takes back what they return."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, cast, final

import numpy as np

from collectives.communication_options import CommunicationOptions, CrossDeviceOps
from collectives.devices import Device
from collectives.errors import is_common
from collectives.flight_recorder import FlightRecorder
from collectives.indexed_slices import IndexedSlices
from collectives.link import Link
from collectives.rendezvous import Rendezvous
from collectives.selection import local_communicators
from strategies.replica_threads import ReplicaThreads
from variables.flat_memory import is_variable_memory
from variables.replica_context import ANY_THREAD, Owner, ReplicaContext, ReplicaContextError, current
from variables.values import PerReplica, map_structure, regroup, select_arguments

if TYPE_CHECKING:
    from strategies.tracing.trace import Trace


@final
class Steps:
    """What is behind `Strategy.run`.

    Args:
        strategy: whose steps; the replicas' contexts name it.
        devices: one for each local replica.
        options: how replicas communicate, and how long they wait.
        cross_device_ops: likewise.
        link: to the other processes, if there are any.
        on_failure: told of errors of steps that the other processes don't raise too.
    """

    def __init__(
        self,
        strategy: Owner,
        devices: Sequence[Device],
        options: CommunicationOptions,
        cross_device_ops: CrossDeviceOps | None,
        link: Link | None = None,
        on_failure: Callable[[BaseException], None] | None = None,
    ) -> None:
        self._link = link
        self._on_failure = on_failure
        self._strategy = weakref.ref(strategy)
        self._devices = devices
        self._options = options
        self._cross_device_ops = cross_device_ops
        self.is_closed = False
        self._start_afresh()
        _all.add(self)

    recorder: FlightRecorder
    """The replicas' last calls."""
    trace: Trace | None
    """What records the steps now, if anything does."""

    def run(self, depth: int, fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Run a step in every replica, and regroup the results.

        Args:
            depth: how many steps it is inside of, by way of merge functions.
            fn: the step; errors are its own, or as of `Strategy.run`.
            args: with every replica's components in them.
            kwargs: likewise.
        """
        if depth:  # inside a merge function: its step holds the lock
            return self._run(depth, fn, args, kwargs)
        thread_id = threading.get_ident()
        was_interrupted = thread_id in self._entering
        if was_interrupted and self._crews and self._crews[0].threads.is_running:
            raise ReplicaContextError(
                f"{self._strategy()!r}.run: called inside a step, by code that was cut off from its context; "
                "call it outside strategy.run"
            )
        self._entering.add(thread_id)
        if not self._running.acquire(False) and not (was_interrupted and len(self._entering) == 1):
            self._wait_for_other_thread()
        try:
            return self._run(0, fn, args, kwargs)
        except BaseException as error:
            if self._on_failure is not None and not is_common(error):
                self._on_failure(error)
            raise
        finally:
            if self._running.locked():
                self._running.release()
            self._entering.discard(thread_id)

    def renew(self) -> None:
        """Begin the next step with new replicas, as their numbers have changed."""
        for crew in self._crews:
            crew.threads.close()
        self._crews.clear()

    def first_replica(self) -> ReplicaContext:
        """The view of replica 0, for code outside of steps that is meant for one."""
        return self._crew(0).outside

    def close(self) -> None:
        """End the threads; no further step runs."""
        self.is_closed = True
        for crew in self._crews:
            crew.threads.close()

    def _run(self, depth: int, fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        crew = self._crew(depth)
        if self.trace is not None:
            fn = self.trace.traced(fn, depth)
        size = len(self._devices)
        selected = select_arguments(args, kwargs, size) if args or kwargs else None
        if size == 1:
            if selected is not None:
                ((args, kwargs),) = selected
            return _run_alone(crew, fn, args, kwargs)
        calls: list[Callable[[], Any]]
        if selected is not None:
            calls = [partial(fn, *own_args, **own_kwargs) for own_args, own_kwargs in selected]
        else:
            calls = [partial(fn, *args, **kwargs) if args or kwargs else fn] * size
        # A function may be made anew for each step, its code is the same one.
        results = crew.threads.run(calls, cast(Hashable, getattr(fn, "__code__", type(fn))))
        return regroup(results, _snapshots, one=_snapshot)

    def _crew(self, depth: int) -> _Crew:
        if self.is_closed:
            raise RuntimeError(f"{self._strategy()!r}.run: called after close(); make a new strategy")
        crews = self._crews
        if depth < len(crews) and not crews[depth].threads.is_broken:
            return crews[depth]
        while len(crews) <= depth:
            crews.append(self._new_crew(len(crews)))
        if crews[depth].threads.is_broken:
            crews[depth] = self._new_crew(depth)
        return crews[depth]

    def _new_crew(self, depth: int) -> _Crew:
        strategy = self._strategy()
        assert strategy is not None
        rendezvous = Rendezvous(len(self._devices), self._options.timeout, "replica", self.recorder)
        ends = local_communicators(rendezvous, self._options, self._cross_device_ops, self._link)
        contexts = [
            ReplicaContext(strategy, i, end.rank, end, rendezvous, depth) for i, end in enumerate(ends)
        ]
        outside = ReplicaContext(strategy, 0, ends[0].rank, ends[0], rendezvous, depth)
        outside.thread = ANY_THREAD
        return _Crew(rendezvous, contexts, outside, ReplicaThreads(contexts, self._devices, rendezvous))

    def _wait_for_other_thread(self) -> None:
        timeout = self._options.timeout
        if not self._running.acquire(timeout=timeout):
            self._entering.discard(threading.get_ident())
            raise RuntimeError(
                f"{self._strategy()!r}.run: another thread has been running a step on this strategy for over "
                f"{timeout:g} s; one step runs at a time — give this thread a strategy of its own, or raise timeout_seconds"
            )

    def _start_afresh(self) -> None:
        """At first, and in a forked child, which has none of the parent's threads."""
        self._crews: list[_Crew] = []
        first = 0 if self._link is None else self._link.first
        self.recorder = FlightRecorder(range(first, first + len(self._devices)), "replica")
        self.trace = None
        self._running = threading.Lock()
        # Whoever is in here and comes again was interrupted by Ctrl-C while it took or gave back the lock.
        self._entering: set[int] = set()


@final
class _Crew:
    """All that one step needs, so that a step inside a merge function can run while the outer one waits."""

    def __init__(
        self,
        rendezvous: Rendezvous,
        contexts: Sequence[ReplicaContext],
        outside: ReplicaContext,
        threads: ReplicaThreads,
    ) -> None:
        self.rendezvous = rendezvous
        self.contexts = contexts
        self.outside = outside
        self.threads = threads


def _run_alone(crew: _Crew, fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """A step of one replica, in the caller's thread and context."""
    crew.rendezvous.begin()
    context = crew.contexts[0]
    token, context.thread = current.set(context), threading.get_ident()
    try:
        result = fn(*args, **kwargs)
    finally:
        context.thread = None
        current.reset(token)
    if result is None:
        return None
    return _snapshot(result) if type(result) is np.ndarray else map_structure(_snapshot, result)


def _snapshot(leaf: Any) -> Any:
    """The leaf, or a copy of it if it changes with a variable."""
    if isinstance(leaf, np.ndarray):
        return leaf.copy() if leaf.base is not None and is_variable_memory(leaf) else leaf
    if type(leaf) is IndexedSlices:
        return IndexedSlices(_snapshot(leaf.values), _snapshot(leaf.indices), leaf.dense_shape)
    return leaf


def _snapshots(components: Sequence[Any]) -> PerReplica:
    return PerReplica([_snapshot(component) for component in components])


_all: weakref.WeakSet[Steps] = weakref.WeakSet()


def _after_fork() -> None:
    for steps in list(_all):
        for crew in steps._crews:
            crew.threads.abandon_in_child()
        steps._start_afresh()


os.register_at_fork(after_in_child=_after_fork)
