"""Whose view the calling code has: one replica's, or that across replicas.

The lowest module that knows of replicas, so that variables can ask and strategies can answer without importing
one another. There are three states, held in a `ContextVar`: inside ``strategy.run`` a `ReplicaContext`; inside
``strategy.scope()``, a merge function or an update function a `CrossReplicaContext`; else none, which is like one
replica of a default strategy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from threading import get_ident
from types import BuiltinFunctionType
from typing import Any, Protocol, TypeVar, final

import numpy as np

from collectives.array_libraries import library_of
from collectives.arrays import (
    Array,
    array_like,
    as_array,
    describe_kind,
    given_back,
    is_scalar,
    require_numbers,
)
from collectives.communication_options import CommunicationOptions
from collectives.communicator import Communicator, require_axis_from_start
from collectives.indexed_slices import IndexedSlices, all_reduce_slices
from collectives.link import Link
from collectives.reduce_op import ReduceOp
from collectives.rendezvous import Call, Rendezvous
from variables.journal import Journal
from variables.values import flatten, map_structure, regroup, select, sketch

T = TypeVar("T")

ANY_THREAD = -1
"""In the place of a thread's number, which is none."""


class ReplicaContextError(RuntimeError):
    """Called inside a replica what belongs outside, or the other way round, or under another strategy."""


class Owner(Protocol):
    """What replicas and variables know of the strategy that they belong to."""

    @property
    def num_replicas_in_sync(self) -> int:
        """How many replicas run a step together, in all processes."""

    @property
    def link(self) -> Link | None:
        """To the other processes that it has replicas in, if there are any."""

    @property
    def is_closed(self) -> bool:
        """Whether it has ended, so that nothing is written any more."""

    @property
    def journal(self) -> Journal | None:
        """Keeps what the step under way changes, where it may have to be made again."""

    def across(self, work: Callable[[], T]) -> T:
        """Do what all processes do together outside of steps; again, where processes were lost in it and the job goes on."""

    def create_variable(self, spec: Any) -> Any:
        """A new variable of the kind that this strategy spreads, from a `VariableSpec`."""


@final
class CrossReplicaContext:
    """The view across all replicas.

    Args:
        strategy: whose replicas.
        updating: inside an update function, the number of the component that is being updated.
        depth: how many steps are under way around it: 0, or more inside a merge function.
    """

    __slots__ = ("depth", "strategy", "updating")

    def __init__(self, strategy: Owner, *, updating: int | None = None, depth: int = 0) -> None:
        self.strategy = strategy
        self.updating = updating
        self.depth = depth


@final
class ReplicaContext:
    """One replica's view: who it is, and what it does together with the others.

    It is of use to the step's own code only, in the thread that runs the replica; kept for later, or given to a thread, it raises
    `ReplicaContextError`. Every replica makes the same calls in the same order. Calls raise `CollectiveMismatchError` where the replicas' calls
    differ, `CollectiveTimeoutError` where one does not come, `CollectiveAbortedError` where one failed.

    Args:
        strategy: whose replica.
        local_replica_id: which one in this process.
        replica_id_in_sync_group: which one in all processes.
        communicator: this replica's end of the group of all.
        rendezvous: where the replicas of this process meet.
        depth: as in `CrossReplicaContext`.

    Attributes:
        thread: that runs the replica now; None where no step is under way, `ANY_THREAD` where there need not be one.
    """

    __slots__ = (
        "communicator",
        "depth",
        "local_replica_id",
        "rendezvous",
        "replica_id_in_sync_group",
        "strategy",
        "thread",
    )

    def __init__(
        self,
        strategy: Owner,
        local_replica_id: int,
        replica_id_in_sync_group: int,
        communicator: Communicator,
        rendezvous: Rendezvous,
        depth: int = 0,
    ) -> None:
        self.strategy = strategy
        self.local_replica_id = local_replica_id
        self.replica_id_in_sync_group = replica_id_in_sync_group
        self.communicator = communicator
        self.rendezvous = rendezvous
        self.depth = depth
        self.thread: int | None = None

    @property
    def num_replicas_in_sync(self) -> int:
        """How many replicas run this step together."""
        return self.strategy.num_replicas_in_sync

    @property
    def replica_id(self) -> int:
        """The same as `replica_id_in_sync_group`."""
        return self.replica_id_in_sync_group

    def merge_call(
        self, merge_fn: Callable[..., Any], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Stop all replicas and call a function once across them.

        Args:
            merge_fn: called as ``merge_fn(strategy, *args, **kwargs)``; the same function on every replica.
            args: this replica's arguments. ``merge_fn`` gets each one as a `PerReplica` of all replicas' arguments, or
                as it is where it is the same object on all of them.
            kwargs: likewise.

        Returns:
            What ``merge_fn`` returned, with this replica's component in place of every distributed value.

        Raises:
            Exception: what ``merge_fn`` raised.
        """
        if current.get() is not self or self.thread != get_ident():
            self._require_here("merge_call")
        if not isinstance(args, (list, tuple)):
            raise ValueError(f"merge_call: got args={args!r}; need a tuple or list of arguments")

        def conclude(calls: list[Any]) -> Sequence[Any]:
            by_position = regroup([list(call[0]) for call in calls])
            by_name = regroup([call[1] for call in calls])
            function = calls[0][2]  # they all have the same code
            with entered(CrossReplicaContext(self.strategy, depth=self.depth + 1)):
                result = function(self.strategy, *by_position, **by_name)
            return [select(result, replica) for replica in range(len(calls))]

        call = Call("merge_call", _identity(merge_fn))
        return self.rendezvous.meet(self.local_replica_id, call, (args, kwargs or {}, merge_fn), conclude)

    def all_reduce(
        self,
        reduce_op: ReduceOp | str,
        value: Any,
        options: CommunicationOptions | None = None,
        *,
        name: str | None = None,
        weight: float | None = None,
        like: Any = None,
    ) -> Any:
        """Reduce over all replicas; every replica gets the result.

        Args:
            reduce_op: a `ReduceOp` or its name. Its docs tell the dtype of the result.
            value: a number, an array of the same shape and dtype on every replica, an `IndexedSlices`, or any nested
                structure of these. PyTorch tensors and JAX arrays are not copied. Sparse values are concatenated by
                replica, not merged.
            options: accepted for the sake of TensorFlow's signature; an in-process group needs none.
            name: must be the same on every replica; stands in error messages.
            weight: of this replica's value in a MEAN, which then is ``sum(weight * value) / sum(weight)``. With weight 0,
                ``value`` may be None: this replica has no data.
            like: an array of the library that the results are to be of; None means that of ``value``.

        Returns:
            The structure with reduced values: a new array for an array, a number for a number.

        Raises:
            TypeError: a dtype that ``reduce_op`` has no meaning for.
            ValueError: an unknown ``reduce_op``; weights that do not suit it.
        """
        del options
        if current.get() is not self or self.thread != get_ident():
            self._require_here("all_reduce")
        op = ReduceOp.parse(reduce_op)
        if weight is not None:
            return self._weighted_mean(op, value, weight, name, like)
        if isinstance(value, np.ndarray):  # by far the most frequent case
            return self.communicator.all_reduce(value, op, name=name, like=like)
        leaves, rebuild = flatten(value)
        if isinstance(value, (list, tuple, dict)):  # leaves are paired by place, so the structures must agree
            name = f"{sketch(value)}" if name is None else f"{name}: {sketch(value)}"
        dense = [i for i, leaf in enumerate(leaves) if not isinstance(leaf, IndexedSlices)]
        results = list(leaves)
        arrays = [as_array(leaves[i], "all_reduce") for i in dense]
        if dense:
            reduced = self.communicator.all_reduce_coalesced(arrays, op, name=name)
            for i, result in zip(dense, reduced, strict=True):
                results[i] = _like(leaves[i], result) if like is None else array_like(result, like)
        for i, leaf in enumerate(leaves):
            if isinstance(leaf, IndexedSlices):
                results[i] = all_reduce_slices(self.communicator, leaf, op)
        return rebuild(results)

    def all_gather(
        self, value: Any, axis: int, options: CommunicationOptions | None = None, *, like: Any = None
    ) -> Any:
        """All replicas' arrays one after the other, by replica; every replica gets the whole.

        Args:
            value: an array of at least one axis, or a nested structure of arrays. The lengths along ``axis`` may differ
                between replicas; the other axes and the dtype agree.
            axis: from 0.
            options: as in `all_reduce`.
            like: as in `all_reduce`.

        Raises:
            NotImplementedError: `IndexedSlices`.
            TypeError: what is no numbers.
            ValueError: a scalar, or no such axis.
        """
        del options
        if current.get() is not self or self.thread != get_ident():
            self._require_here("all_gather")

        def gather(leaf: Any) -> Array:
            array = require_dense(leaf, "all_gather")
            joined = self.communicator.all_gather(array, require_axis_from_start(array, axis, "all_gather"))
            return given_back(joined, leaf, like)

        return map_structure(gather, value)

    def require_own_thread(self, where: str) -> None:
        """Check that the caller is in the thread that runs the replica, and not in one that it has started.

        Raises:
            ReplicaContextError: it is.
        """
        if self.thread != get_ident():
            self._require_here(where)

    def _require_here(self, where: str) -> None:
        if self.thread == ANY_THREAD:
            return
        name = f"replica {self.replica_id_in_sync_group} of {self.strategy!r}"
        here = current.get()
        if self.thread is None:
            raise ReplicaContextError(
                f"{where}: called on the context of {name}, which runs no step now; need that of the step that is running — don't keep "
                "it, call get_replica_context() in the function passed to strategy.run"
            )
        if here is None or here is self:
            raise ReplicaContextError(
                f"{where}: called for {name} in another thread than that which runs it; need what replicas do together done by the "
                "function passed to strategy.run itself — let threads of yours compute only, and wait for them"
            )
        where_it_is = (
            f"replica {here.replica_id_in_sync_group}"
            if isinstance(here, ReplicaContext)
            else "code across replicas, such as a merge function"
        )
        raise ReplicaContextError(
            f"{where}: called on the context of {name} by {where_it_is}; need the caller's own — call get_replica_context() where it "
            "is used"
        )

    def _weighted_mean(self, op: ReduceOp, value: Any, weight: float, name: str | None, like: Any) -> Any:
        if op is not ReduceOp.MEAN:
            raise ValueError(f"all_reduce: got weight={weight} with {op.name}; need MEAN — or no weight")
        if not weight >= 0 or (value is None and weight):
            raise ValueError(
                f"all_reduce: got weight={weight} of {value!r}; need a weight >= 0, and 0 with None"
            )
        array = None if value is None else as_array(value, "all_reduce")
        kind = None if array is None else (array.dtype, array.shape)
        told: Any = self.communicator.all_gather_object((kind, float(weight)))
        kinds = {told_kind for told_kind, _ in told if told_kind is not None}
        total = sum(told_weight for _, told_weight in told)
        if len(kinds) != 1:
            listed = "; ".join(
                f"replica {i}: {describe_kind(*k) if k else None}" for i, (k, _) in enumerate(told)
            )
            raise ValueError(
                f"all_reduce: got {listed}; need one shape and dtype, and not None from every replica"
            )
        ((dtype, shape),) = kinds
        op.require(dtype, "all_reduce")
        result_dtype = op.result_dtype(dtype)
        wide = np.result_type(result_dtype, np.float32) if dtype.kind in "fV" else result_dtype
        # What has no weight may hold anything, NaN too.
        share = np.zeros(shape, wide) if array is None or not weight else array.astype(wide) * weight
        mean = self.communicator.all_reduce(share.astype(wide, copy=False), ReduceOp.SUM, name=name) / total
        mean = np.asarray(mean).astype(result_dtype, copy=False)
        if like is None and (is_scalar(value) or not shape) and library_of(value) is None:
            return mean[()]
        return given_back(mean, value, like)


Context = ReplicaContext | CrossReplicaContext

current: ContextVar[Context | None] = ContextVar("xpdistribute_context", default=None)
"""The state of the calling thread; None where no strategy has been entered."""


def current_replica() -> ReplicaContext | None:
    """The replica that the calling code runs in, or None."""
    context = current.get()
    return context if type(context) is ReplicaContext else None


@contextmanager
def entered(context: Context) -> Iterator[None]:
    """Run a block in the given context."""
    token = current.set(context)
    try:
        yield
    finally:
        current.reset(token)


def require_dense(value: Any, where: str) -> Array:
    """The value as an array of numbers.

    Raises:
        NotImplementedError: it is sparse.
        TypeError: it holds something else.
    """
    if isinstance(value, IndexedSlices):
        raise NotImplementedError(f"{where}: got {value}; takes dense arrays only — to_dense them first")
    array = as_array(value, where)
    # Some backends move raw memory, so what isn't numbers is refused by all of them.
    require_numbers(array.dtype, where)
    return array


def _like(value: Any, result: Array) -> Any:
    """A result in the kind of what was reduced: a Python number promotes other dtypes no more than one did before."""
    if isinstance(value, np.generic):
        return result[()]
    return result.item() if is_scalar(value) else given_back(result, value)


def _identity(function: Callable[..., Any]) -> tuple[object, ...]:
    """What tells merge functions apart: their code, as each replica may make a closure of its own."""
    bound: list[str] = []
    while isinstance(function, partial):
        # Plain values that are bound must agree; arrays may be each replica's own.
        bound += [_bound(argument) for argument in function.args]
        bound += [f"{key}={_bound(argument)}" for key, argument in function.keywords.items()]
        function = function.func
    function = getattr(function, "__func__", function)
    if isinstance(function, (BuiltinFunctionType, np.ufunc)):
        return (function, *bound)  # one object for all replicas, and no code to compare
    return (getattr(function, "__code__", None) or type(function), *bound)


def _bound(argument: object) -> str:
    plain = argument is None or isinstance(argument, (bool, int, float, complex, str, bytes))
    return repr(argument) if plain else type(argument).__name__
