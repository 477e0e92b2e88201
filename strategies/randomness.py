"""Random numbers in steps: streams that all replicas share, and streams of their own, from one seed.

A generator made from the same seed in each replica gives all of them the same dropout masks; one from the clock gives a run that
can't be repeated; one shared by threads gives numbers that depend on who comes first.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, final

import numpy as np

from collectives.calls import Call
from collectives.fork_safe_lock import ForkSafeLock
from variables.replica_context import Owner, ReplicaContext, ReplicaContextError, current

_STATE = Call("ReplicaGenerators.state")
_COMMON, _OWN, _ACROSS = range(3)
"""The first element of a stream's spawn key: which child of the seed it comes from."""


@final
class ReplicaGenerators:
    """NumPy generators for a strategy's replicas and for the code around them, all from one seed.

    Made in ``strategy.scope()`` it serves that strategy; made outside of any scope, plain code, which is one replica. The
    streams are children of the seed, as `numpy.random.SeedSequence.spawn` makes them: they are independent, do not depend on
    how many replicas there are, and no stream moves when another is drawn from.

    Args:
        seed: a non-negative integer, or several.

    Raises:
        TypeError: a seed that is something else.
        ValueError: a negative one.
        ReplicaContextError: made in a step.
    """

    def __init__(self, seed: int | Sequence[int]) -> None:
        context = current.get()
        if isinstance(context, ReplicaContext):
            raise ReplicaContextError(
                "ReplicaGenerators: made inside a step, where each would be new in every step; make it in strategy.scope()"
            )
        self._owner: Owner | None = None if context is None else context.strategy
        self._seed = _seed(seed)
        self._across = _stream(self._seed, _ACROSS)
        # Of the replicas here, by their numbers in this process: in all processes they change when a job goes on with others.
        self._common = [_stream(self._seed, _COMMON) for _ in self._local_replicas]
        self._own: list[np.random.Generator] = []
        self._beginning = ForkSafeLock()
        self._begin(self._size)
        self._kept: list[dict[str, Any]] = []  # of replicas that there are no more

    @property
    def common(self) -> np.random.Generator:
        """The calling replica's copy of the stream that is the same on all.

        It stays so as long as all replicas make the same draws: for what they must decide alike.

        Raises:
            ReplicaContextError: outside of a step of its strategy.
        """
        local = self._replica("common")[1]
        return self._noted(self._common[local], ("common", local))

    def replica(self) -> np.random.Generator:
        """The calling replica's own stream: for dropout, noise and augmentation.

        Raises:
            ReplicaContextError: outside of a step of its strategy.
        """
        replica, _ = self._replica("replica")
        if replica >= len(self._own):
            self._begin(replica + 1)
        return self._noted(self._own[replica], ("own", replica))

    @property
    def across(self) -> np.random.Generator:
        """The stream of the code outside of steps, and of merge functions: for initial values and shuffling.

        Raises:
            ReplicaContextError: in a step, whose replicas would take it from one another.
        """
        self._require_outside("across")
        return self._across

    # ------------------------------------------------------------- checkpoints

    def state(self) -> dict[str, Any]:
        """Where all streams are: dicts, lists, strings and integers, of up to 128 bits, which JSON can hold.

        Under a strategy of several processes all of them must call it: a replica's own stream is where its process has drawn
        from it. Of the stream across replicas it tells where the chief's is.

        Raises:
            RuntimeError: the replicas have drawn unequally from the common stream.
            ReplicaContextError: in a step.
        """
        self._require_outside("state")
        link = None if self._owner is None else self._owner.link
        across = _state_of(self._across)
        if link is None:
            return self._state_with(self._drawn(), across)
        assert self._owner is not None
        told: Any = self._owner.across(
            lambda: link.gather_objects(_STATE, [(drawn, across) for drawn in self._drawn()])
        )
        return self._state_with([drawn for drawn, _ in told], told[0][1])

    def state_for_newcomer(self) -> dict[str, Any]:
        """What a process that joins is to begin with: this one's streams; not a collective.

        Of the replicas in other processes it only knows where their streams began.
        """
        self._require_outside("state_for_newcomer")
        common = _state_of(self._common[0])
        self._begin(self._size)
        own = [_state_of(generator) for generator in self._own]
        return self._state_with([(common, one) for one in own], _state_of(self._across))

    def _drawn(self) -> list[tuple[dict[str, Any], dict[str, Any]]]:
        """The states of the common stream's copies here, and of the streams of the replicas here."""
        self._begin(self._size)
        return [
            (_state_of(common), _state_of(self._own[replica]))
            for common, replica in zip(self._common, self._local_replicas, strict=True)
        ]

    def _state_with(
        self, drawn: Sequence[tuple[dict[str, Any], dict[str, Any]]], across: dict[str, Any]
    ) -> dict[str, Any]:
        common = drawn[0][0]
        for replica, (other, _) in enumerate(drawn):
            if other != common:
                raise RuntimeError(
                    f"ReplicaGenerators.state: replica {replica} has made other draws from the common stream than replica 0; all "
                    "must make the same — use replica() for draws of a replica's own"
                )
        return {
            "seed": list(self._seed),
            "num_replicas": len(drawn),
            "across": across,
            "common": common,
            "replicas": [own for _, own in drawn] + self._kept,
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue all streams where they were when `state` was called; generators taken before continue there too.

        Of another number of replicas, with a warning that says so: the common stream continues on all; replicas that there
        were then continue their own streams; further ones start theirs afresh, from the saved seed; the streams of
        replicas that there are no more are kept, and are in `state` for when they come back.

        Args:
            state: what `state` returned, possibly by way of JSON.

        Raises:
            ValueError: something else; nothing is changed then.
            ReplicaContextError: in a step.
        """
        self._require_outside("restore")
        try:
            seed = _seed(state["seed"])
            saved_size = int(state["num_replicas"])
            own = [_restored(one) for one in state["replicas"]]
            common = _restored(state["common"])
            across = _restored(state["across"])
            if not 1 <= saved_size <= len(own):
                raise ValueError(f"num_replicas is {saved_size}, with {len(own)} streams")
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise ValueError(
                f"ReplicaGenerators.restore: got what is no state of generators ({type(error).__name__}: {error}); need what "
                "state() returned"
            ) from error
        self._seed = seed
        self._across.bit_generator.state = across
        for generator in self._common:
            generator.bit_generator.state = common
        self._begin(self._size)
        for replica, generator in enumerate(self._own):
            fresh = _state_of(_stream(seed, _OWN, replica))
            generator.bit_generator.state = own[replica] if replica < len(own) else fresh
        self._kept = own[self._size :]
        if saved_size != self._size:
            warnings.warn(_says(saved_size, self._size, len(own)), stacklevel=2)

    # ------------------------------------------------------------------ inside

    @property
    def _size(self) -> int:
        return 1 if self._owner is None else self._owner.num_replicas_in_sync

    @property
    def _local_replicas(self) -> range:
        """The replicas of this process, by their numbers in all."""
        link = None if self._owner is None else self._owner.link
        if link is None:
            return range(self._size)
        return range(link.first, link.first + link.counts[link.process])

    def _begin(self, size: int) -> None:
        """Have a stream of its own for each of the first so many replicas."""
        with self._beginning:
            for replica in range(len(self._own), size):
                self._own.append(_stream(self._seed, _OWN, replica))

    def _noted(self, generator: np.random.Generator, key: tuple[str, int]) -> np.random.Generator:
        """The generator, which a step that may have to be made again is about to draw from."""
        journal = None if self._owner is None else self._owner.journal
        if journal is not None:
            bits = generator.bit_generator
            journal.keep_state(self, key, lambda: partial(setattr, bits, "state", bits.state))
        return generator

    def _replica(self, method: str) -> tuple[int, int]:
        """The number of the calling replica among all, and in this process."""
        context = current.get()
        if isinstance(context, ReplicaContext) and context.strategy is self._owner:
            return context.replica_id_in_sync_group, context.local_replica_id
        if context is None and self._owner is None:
            return 0, 0
        made = "outside any scope" if self._owner is None else f"under {self._owner!r}"
        used = (
            f"in a step of {context.strategy!r}"
            if isinstance(context, ReplicaContext)
            else "outside of a step"
        )
        raise ReplicaContextError(
            f"ReplicaGenerators.{method}: used {used}, but made {made}; make it in the strategy's scope and use it in its "
            "steps — outside of them use across"
        )

    def _require_outside(self, method: str) -> None:
        context = current.get()
        if isinstance(context, ReplicaContext):
            raise ReplicaContextError(
                f"ReplicaGenerators.{method}: used inside replica {context.replica_id_in_sync_group}, in a step; it belongs "
                "outside strategy.run" + (" — use common or replica()" if method == "across" else "")
            )


def _says(saved: int, now: int, states: int) -> str:
    parts = [f"replicas 0 to {min(now, states) - 1} continue their streams"]
    if now > states:
        parts.append(f"replicas {states} to {now - 1} start theirs afresh")
    if states > now:
        parts.append(f"those of replicas {now} to {states - 1} are kept in state()")
    return (
        f"ReplicaGenerators.restore: the state is of {saved} replicas, and there are {now} now: the common stream continues, "
        + ", ".join(parts)
        + "; draws will not equal those of a run that kept its number of replicas"
    )


def _seed(seed: Any) -> list[int]:
    parts = list(seed) if isinstance(seed, (list, tuple)) else [seed]
    if not parts or not all(isinstance(p, (int, np.integer)) and not isinstance(p, bool) for p in parts):
        raise TypeError(
            f"ReplicaGenerators: got seed={seed!r}; need a non-negative integer, or a list of them"
        )
    if min(parts) < 0:
        raise ValueError(f"ReplicaGenerators: got seed={seed!r}; need integers of 0 or more")
    return [int(part) for part in parts]


def _stream(seed: list[int], *spawn_key: int) -> np.random.Generator:
    entropy = np.random.SeedSequence(seed, spawn_key=spawn_key)
    # NumPy recommends this one where there are many streams, instead of PCG64, its default.
    return np.random.Generator(np.random.PCG64DXSM(entropy))


def _state_of(generator: np.random.Generator) -> dict[str, Any]:
    state = generator.bit_generator.state
    return {key: dict(part) if isinstance(part, Mapping) else part for key, part in state.items()}


def _restored(state: Any) -> dict[str, Any]:
    """The state, once a generator has accepted it."""
    bits = np.random.PCG64DXSM(0)
    bits.state = state
    return _state_of(np.random.Generator(bits))
