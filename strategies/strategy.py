"""The interface of every strategy."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Self, TypeVar, final

import numpy as np

from collectives.arrays import asarray
from collectives.calls import Call
from collectives.communication_options import CommunicationOptions, CrossDeviceOps
from collectives.devices import Device
from collectives.flight_recorder import FlightRecorder
from collectives.link import Link
from collectives.linked import broadcast_over
from collectives.reduce_op import ReduceOp
from collectives.selection import require_available
from strategies.cross_process import gather_linked, reduce_linked
from strategies.cross_replica import Axis, components_of, gather_leaf, reduce_components, reduce_leaf
from strategies.datasets.distributed_dataset import DistributedDataset
from strategies.datasets.distributed_dataset_from_function import distribute_from_function
from strategies.datasets.input_options import AutoShardPolicy, InputContext, InputOptions
from strategies.datasets.local_replicas import Place, keep, refuse_in_replica
from strategies.steps import Steps
from strategies.unjoined import is_one_of_several, warn_if_unjoined
from variables.central_variable import CentralVariable
from variables.journal import Journal
from variables.local_variable import LocalVariable
from variables.replica_context import (
    Context,
    CrossReplicaContext,
    ReplicaContext,
    ReplicaContextError,
    current,
    entered,
)
from variables.sharded_variable import ShardedVariable
from variables.values import (
    DistributedValues,
    Mirrored,
    flatten,
    has_distributed,
    map_structure,
    regroup,
    select,
)
from variables.variable import Variable, VariableSpec

T = TypeVar("T")

if TYPE_CHECKING:
    from strategies.recovery import Recovery
    from strategies.tracing.trace import Trace


@final
@dataclass(frozen=True)
class RunOptions:
    """Accepted by `Strategy.run` for the sake of code ported from TensorFlow; nothing here depends on them."""

    experimental_enable_dynamic_batch_size: bool = True
    experimental_bucketizing_dynamic_shape: bool = False


@final
@dataclass(frozen=True)
class ValueContext:
    """Whose value a function is to make, in `Strategy.distribute_values_from_function`."""

    replica_id_in_sync_group: int = 0
    num_replicas_in_sync: int = 1


class Strategy(ABC):
    """Who runs a step where, and which copies the variables have.

    A step is written for one replica. `scope` makes what is created inside it belong to the strategy, `run` runs the
    step in every replica at the same time, and the other methods see all replicas at once. The kinds differ in the
    devices they run on and in the variables they create.

    A strategy serves one step at a time: a second thread waits for the first. It works in a forked child, with threads
    of its own. `close` ends its threads; they are daemons, and end with the strategy too.
    """

    _is_default = False
    """Whether it is the one that stands for no strategy."""
    _before_first_step: Callable[[], None] | None = None
    """Warns of what can only be seen then."""
    _recovery: Recovery | None = None
    """What goes on when processes are lost, where that is possible."""
    journal: Journal | None = None
    """Keeps what the step under way changes, where it may have to be made again."""

    def __init__(
        self,
        devices: Sequence[Device],
        *,
        cross_device_ops: CrossDeviceOps | None = None,
        communication_options: CommunicationOptions | None = None,
        wraps_single: bool = True,
        link: Link | None = None,
        on_failure: Callable[[BaseException], None] | None = None,
    ) -> None:
        """For the kinds.

        Args:
            devices: one for each local replica.
            cross_device_ops: how replicas communicate; None chooses by the devices.
            communication_options: hints for that, and how long a replica waits for the others.
            wraps_single: whether the values of a single replica come as PerReplica too, where they are made here.
            link: to the other processes that it has replicas in; None where there are none.
            on_failure: told of errors of steps that the other processes don't raise too.
        """
        self._devices = tuple(devices)
        options = CommunicationOptions() if communication_options is None else communication_options
        if not isinstance(options, CommunicationOptions):
            raise TypeError(
                f"{type(self).__name__}: got communication_options={options!r}; need CommunicationOptions(...)"
            )
        self._wraps_single = wraps_single
        require_available(self._devices, options, cross_device_ops, type(self).__name__)
        self._num_names = 0
        self._link = link
        self._steps = Steps(self, self._devices, options, cross_device_ops, link, on_failure)
        if link is None and is_one_of_several():
            self._before_first_step = partial(warn_if_unjoined, type(self).__name__)

    # --------------------------------------------------------------- what it is

    @property
    def num_replicas_in_sync(self) -> int:
        """How many replicas run a step together, in all processes."""
        return len(self._devices) if self._link is None else self._link.size

    @property
    def link(self) -> Link | None:
        """To the other processes that it has replicas in, if there are any."""
        return self._link

    @property
    def devices(self) -> tuple[Device, ...]:
        """Where the replicas of this process run."""
        return self._devices

    @property
    def is_chief(self) -> bool:
        """Whether this process is the one that prints, logs and writes files: a strategy of one process is."""
        return True

    @property
    def flight_recorder(self) -> FlightRecorder:
        """The last collectives of each replica: what a hang or a mismatch is explained by."""
        return self._steps.recorder

    @property
    def extended(self) -> Strategy:
        """TensorFlow's ``strategy.extended``: this strategy itself."""
        return self

    # ----------------------------------------------------------------- contexts

    @contextmanager
    def scope(self) -> Iterator[Strategy]:
        """A block in which variables and optimizers are made for this strategy, and this strategy is the current one.

        Raises:
            ReplicaContextError: inside a step, or in the scope of another strategy.
            RuntimeError: after `close`.
        """
        context = self._require_across("scope")
        if self.is_closed:
            raise RuntimeError(f"{self!r}.scope: called after close(); make a new strategy")
        with entered(context or CrossReplicaContext(self)):
            yield self

    # --------------------------------------------------------------------- run

    def run(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        options: RunOptions | None = None,
    ) -> Any:
        """Run a step in every replica, at the same time.

        Python code takes turns, as always; the replicas overlap wherever NumPy or CuPy releases the interpreter, which is
        in all but small operations. Steps so short that switching threads would take longer run all replicas in the
        caller's thread, taking turns where they meet: in a step, wait for other replicas only through the replica
        context, never on a lock or a queue; and what is kept by thread, as in `threading.local`, is then common to
        the replicas, and may have changed after a collective.

        Args:
            fn: the step. In it, `get_replica_context` tells which replica it is.
            args: its arguments; of every `PerReplica` in them, at any depth, a replica gets its own component.
            kwargs: likewise.
            options: accepted for the sake of TensorFlow's signature.

        Returns:
            What the step returned, in its structure, with a `PerReplica` for every leaf; with one replica the leaves
            themselves. A leaf that is the same object on all replicas stands for itself. Arrays that are part of a
            variable are copied, so that later steps don't change them, however they came about; tensors of PyTorch and arrays of
            JAX that share a variable's memory are not: return ``tensor.clone()``.

        Raises:
            Exception: what a replica raised first, with a note that names the replica. The others are released from what
                they wait for, and the strategy stays usable.
            CollectiveError: the replicas' calls don't fit together, or one did not come in time.
            ReplicaContextError: inside a step, or in the scope of another strategy.
            TypeError: fn that is no function, kwargs that are no mapping.
            ValueError: args that are no sequence; results that differ in structure.
            RuntimeError: after `close`.
        """
        del options
        if type(args) is not tuple and not isinstance(args, (list, tuple)):
            raise ValueError(
                f"run: got args={args!r}; need a tuple or list — for one argument write args=(x,)"
            )
        if not callable(fn):
            raise TypeError(f"run: got fn={fn!r}; need a function, called in every replica")
        if kwargs is not None and type(kwargs) is not dict and not isinstance(kwargs, Mapping):
            raise TypeError(f"run: got kwargs={kwargs!r}; need a dict of arguments by name")
        context = self._require_across("run")
        if self._before_first_step is not None:
            check, self._before_first_step = self._before_first_step, None
            check()
        if self._recovery is not None and (context is None or not context.depth):
            return self._recovery.run(fn, args, kwargs or {})
        return self._steps.run(0 if context is None else context.depth, fn, args, kwargs or {})

    @contextmanager
    def trace(
        self, path: str | os.PathLike[str] | None = None, *, max_events: int = 1_000_000
    ) -> Iterator[Trace]:
        """A block in which it is recorded what each replica does when.

        Args:
            path: of a file that Perfetto (ui.perfetto.dev) and Chrome open, ``.json`` or ``.json.gz``; written as a whole at
                the end of the block, also when it is left by an error. None writes none.
            max_events: a replica; a trace that reaches it records no further steps.

        Yields:
            The `Trace`; its ``summary()`` and ``save_plot(path)`` show it in the terminal and as a picture.

        Raises:
            RuntimeError: another trace of this strategy is being taken.
            OSError: the file can't be written.
            ReplicaContextError: inside a step.
        """
        self._require_across("trace")
        from strategies.tracing.trace import Trace  # noqa: PLC0415  # only who traces pays for its import

        first = 0 if self._link is None else self._link.first
        tracks = [f"replica {replica} ({device})" for replica, device in enumerate(self._devices, first)]
        trace = Trace(self._steps.recorder, path, title=repr(self), tracks=tracks, max_events=max_events)
        with trace:
            self._steps.trace = trace
            try:
                yield trace
            finally:
                self._steps.trace = None

    # ---------------------------------------------------- values of all replicas

    def reduce(self, reduce_op: ReduceOp | str, value: Any, axis: Axis = None, *, like: Any = None) -> Any:
        """One value out of all replicas' values.

        Args:
            reduce_op: a `ReduceOp` or its name.
            value: a `PerReplica`, or a nested structure of them.
            axis: None reduces elementwise over the replicas. An axis, or several, are reduced in every replica first; MEAN
                then counts elements, not replicas, so shares of unequal length are weighted right and empty ones
                drop out.
            like: an array of the library that the results are to be of; None means that of ``value``: PyTorch tensors give
                tensors, JAX arrays give JAX arrays.

        Returns:
            The structure with new arrays, or NumPy numbers for scalars.

        Raises:
            ValueError: a value that is not distributed with SUM or PROD; no such axis; shapes that differ.
            TypeError: an axis that is none; a dtype that ``reduce_op`` has no meaning for.
            ReplicaContextError: inside a step.
        """
        op = ReduceOp.parse(reduce_op)
        self._require_across("reduce")
        size, link = len(self._devices), self._link
        if link is not None:
            return self.across(
                lambda: map_structure(lambda leaf: _like(reduce_linked(link, op, leaf, axis), like), value)
            )
        if axis is None and size == 1 and not has_distributed(value) and not isinstance(value, Variable):
            return value if like is None else map_structure(lambda leaf: _like(leaf, like), value)
        return map_structure(lambda leaf: _like(reduce_leaf(op, leaf, axis, size), like), value)

    def gather(self, value: Any, axis: int, *, like: Any = None) -> Any:
        """All replicas' arrays one after the other, by replica.

        Args:
            value: a `PerReplica` of arrays whose lengths along ``axis`` may differ, or a nested structure of them. A
                plain value is returned as it is.
            axis: from 0.
            like: as in `reduce`.

        Raises:
            ValueError: scalars, no such axis, other axes or dtypes that differ.
            NotImplementedError: `IndexedSlices`.
            ReplicaContextError: inside a step.
        """
        self._require_across("gather")
        link = self._link
        if link is not None:
            return self.across(
                lambda: map_structure(lambda leaf: _like(gather_linked(link, leaf, axis), like), value)
            )
        return map_structure(lambda leaf: _like(gather_leaf(leaf, axis), like), value)

    def local_results(self, value: Any) -> tuple[Any, ...]:
        """The value's components, one for each replica of this process.

        Args:
            value: a distributed value or variable; a nested structure gives a tuple of structures. Any other value gives a
                tuple of it alone.
        """
        if not self._wraps_single:
            return (value,)
        leaves, rebuild = flatten(value)
        components = [components_of(leaf) for leaf in leaves]
        size = max((len(c) for c in components if c is not None), default=0)
        if not size:
            return (value,)
        return tuple(
            rebuild([leaf if c is None else c[i] for leaf, c in zip(leaves, components, strict=True)])
            for i in range(size)
        )

    def distribute_values_from_function(self, value_fn: Callable[[ValueContext], Any]) -> Any:
        """A `PerReplica` made by one call for each replica of this process.

        Args:
            value_fn: gets a `ValueContext`; returns an array, or a nested structure of which every leaf becomes a
                `PerReplica`.
        """
        self._require_across("distribute_values_from_function")
        size, first = self.num_replicas_in_sync, 0 if self._link is None else self._link.first
        values = [value_fn(ValueContext(first + local, size)) for local in range(len(self._devices))]
        return regroup(values, always=True) if self._wraps_single else values[0]

    # ----------------------------------------------------------------- datasets

    def distribute_dataset(
        self,
        dataset: Any,
        options: InputOptions | None = None,
        *,
        auto_shard_policy: AutoShardPolicy | str | None = None,
    ) -> Any:
        """The dataset with every global batch split over the replicas.

        Args:
            dataset: a `Dataset`, or any iterable of nested arrays, each a global batch. Its first axis is split as
                evenly as possible, the first replicas getting one row more; a replica may get none: an array of length 0.
            options: how it is fetched.
            auto_shard_policy: which part of the data each worker sees; with one worker all mean the same.

        Returns:
            An iterable of the same structure, with a `PerReplica` for every array; with one replica, the batches
            themselves.
        """
        self._require_across("distribute_dataset")
        return DistributedDataset(
            dataset,
            len(self._devices),
            place=self._place,
            options=options,
            auto_shard_policy=auto_shard_policy,
            **self._workers,
            **self._changing,
        )

    def distribute_datasets_from_function(
        self, dataset_fn: Callable[[InputContext], Any], options: InputOptions | None = None
    ) -> Any:
        """The batches that a function's dataset gives, dealt to the replicas in turn; they are not split.

        Args:
            dataset_fn: gets an `InputContext`; returns a `Dataset` or an iterable of one replica's batches.
            options: how it is fetched.
        """
        self._require_across("distribute_datasets_from_function")
        return distribute_from_function(
            dataset_fn,
            len(self._devices),
            place=self._place,
            options=options,
            wrap=None if self._recovery is None else True,
            **self._workers,
        )

    @property
    def _takes_initial_values(self) -> bool:
        """Whether new variables start from the chief's value; a newcomer takes over those of the others later."""
        return True

    @property
    def _changing(self) -> dict[str, Any]:
        """What a dataset needs to know where processes may be lost and come."""
        link, recovery = self._link, self._recovery
        if link is None or recovery is None:
            return {}

        def before_next(iterator: object) -> None:
            refuse_in_replica()
            recovery.take_in(iterator)

        return {
            "numbers": lambda: (link.first, link.size, link.process, link.num_processes),
            "before_next": before_next,
            "wrap": True,
        }

    @property
    def _workers(self) -> dict[str, Any]:
        """Where this process's replicas stand among those of all, for datasets."""
        link = self._link
        if link is None:
            return {}
        return {
            "link": link,
            "again": None if self._recovery is None else self.across,
            "num_input_pipelines": link.num_processes,
            "input_pipeline_id": link.process,
            "num_replicas_in_sync": link.size,
            "first_replica_id": link.first,
        }

    @property
    def _place(self) -> Place:
        if all(device.kind == "cpu" for device in self._devices):
            return keep
        return lambda array, local_replica: self._devices[local_replica].place(array)

    # ------------------------------------------- variables, across all replicas

    def update(
        self,
        variable: Variable,
        fn: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        group: bool = True,
    ) -> Any:
        """Change each component of a variable by a function, in the order of the components.

        Args:
            variable: made under this strategy.
            fn: called as ``fn(component, *args, **kwargs)``; in it, this and other variables stand for the component of the
                same number.
            args: of every `PerReplica` in them, a component's call gets its own part.
            kwargs: likewise.
            group: whether the results become a `Mirrored`; otherwise a tuple of them.

        Raises:
            ValueError: a variable of another strategy, or a sharded one; a `PerReplica` for a variable with one component.
        """
        context = current.get()
        if isinstance(context, ReplicaContext):
            return context.merge_call(
                lambda strategy, *a, **k: strategy.update(variable, fn, a, k, group),
                tuple(args),
                dict(kwargs or {}),
            )
        self._require_across("update")
        self._require_own(variable, "update")
        if isinstance(variable, ShardedVariable):
            raise ValueError(
                f"update: got {variable.name}, whose {len(variable.shards)} shards need each its own part of the arguments; update "
                "them one by one: for shard, part in zip(v.shards, v.split(array)): strategy.update(shard, fn, (part,))"
            )
        kwargs = dict(kwargs or {})
        depth = 0 if context is None else context.depth
        components = variable.components
        if isinstance(variable, CentralVariable) and (has_distributed(args) or has_distributed(kwargs)):
            raise ValueError(
                f"update: got a PerReplica for {variable.name}, which has one component; "
                "reduce it first: strategy.reduce('MEAN', value, axis=None)"
            )
        results = []
        for number, component in enumerate(components):
            with entered(CrossReplicaContext(self, updating=number, depth=depth)):
                result = fn(component, *select(args, number), **select(kwargs, number))
            results.append(
                map_structure(lambda leaf: leaf.value() if isinstance(leaf, LocalVariable) else leaf, result)
            )
        if len(components) == 1:
            return results[0]
        return regroup(results, Mirrored) if group else regroup(results, tuple, always=True)

    def reduce_to(self, reduce_op: ReduceOp | str, value: Any, destinations: Any) -> Any:
        """One value out of all replicas' values, where a variable or another value is.

        Args:
            reduce_op: a `ReduceOp` or its name.
            value: a `PerReplica`; a `Mirrored` with MEAN is itself.
            destinations: a variable, a distributed value, an array, or the name of a device.

        Returns:
            A `Mirrored` with a copy for each component of ``destinations``, or an array where there is one.

        Raises:
            ValueError: as `reduce`; destinations that are none of these.
            ReplicaContextError: inside a step.
        """
        op = ReduceOp.parse(reduce_op)
        self._require_across("reduce_to")
        count = _count_destinations(destinations)
        link = self._link
        if link is not None and not isinstance(value, Mirrored):
            return _copies(self.across(lambda: reduce_linked(link, op, value, None)), count)
        if isinstance(value, DistributedValues) and not isinstance(value, Mirrored):
            return _copies(reduce_components(op, value.values), count)
        if isinstance(value, Mirrored) and op is ReduceOp.MEAN:
            return value
        return _copies(reduce_leaf(op, value, None, len(self._devices)), count)

    def batch_reduce_to(
        self, reduce_op: ReduceOp | str, value_destination_pairs: Sequence[tuple[Any, Any]]
    ) -> list[Any]:
        """`reduce_to` of several pairs of a value and its destinations, in order."""
        return [
            self.reduce_to(reduce_op, value, destinations) for value, destinations in value_destination_pairs
        ]

    def broadcast_to(self, value: Any, destinations: Any) -> Any:
        """A `Mirrored` with a copy of one array for each component of ``destinations``, as in `reduce_to`.

        Raises:
            ValueError: the value is distributed.
        """
        self._require_across("broadcast_to")
        if components_of(value) is not None:
            raise ValueError(
                f"broadcast_to: got {value!r}; need one array — reduce_to puts distributed values together"
            )
        return _copies(np.array(value), _count_destinations(destinations))

    @contextmanager
    def colocate_vars_with(self, colocate_with_variable: Variable) -> Iterator[None]:
        """A block in which variables are made where this one is: all of a strategy's variables are.

        Raises:
            ValueError: the variable was not made under this strategy.
        """
        self._require_own(colocate_with_variable, "colocate_vars_with")
        with self.scope():
            yield

    def variable_created_in_scope(self, variable: Variable) -> bool:
        """Whether a variable was made under this strategy; the default one counts those made under none."""
        return variable.owner is self or (variable.owner is None and self._is_default)

    def across(self, work: Callable[[], T]) -> T:
        """Do what all processes do together outside of steps; again, where processes were lost in it and the job goes on."""
        return work() if self._recovery is None else self._recovery.again(work)

    # ---------------------------------------------------------------- its life

    def close(self) -> None:
        """End the replica threads. The variables stay readable; `run`, `scope` and writes to variables raise.

        Raises:
            ReplicaContextError: in a step, which needs them.
        """
        context: Context | None = current.get()
        in_step = isinstance(context, ReplicaContext) or (context is not None and context.depth > 0)
        if context is not None and context.strategy is self and in_step:
            raise ReplicaContextError(
                f"{self!r}.close: called in a step of this strategy; need it to have ended — call it after run has returned"
            )
        self._steps.close()

    @property
    def is_closed(self) -> bool:
        """Whether `close` was called."""
        return self._steps.is_closed

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"{type(self).__name__}([{', '.join(repr(str(device)) for device in self._devices)}])"

    # ------------------------------------------------------------ for the kinds

    @abstractmethod
    def _create(self, spec: VariableSpec, name: str) -> Variable:
        """A new variable of the kind that this strategy spreads."""

    def create_variable(self, spec: VariableSpec) -> Variable:
        """A new variable of this strategy's; `Variable` calls it inside `scope`."""
        if spec.name is None:
            name = "variable" if not self._num_names else f"variable_{self._num_names}"
            self._num_names += 1
        else:
            name = spec.name
        link = self._link
        if link is not None and self._takes_initial_values:
            call, own = Call("Variable", (), spec.name), spec.initial_value
            # The copies of all processes start from the chief's value, whatever each has drawn at random.
            spec = replace(spec, initial_value=self.across(lambda: broadcast_over(link, call, own)))
        return self._create(spec, name)

    # -------------------------------------------- TensorFlow's longer spellings

    experimental_local_results = local_results
    experimental_distribute_values_from_function = distribute_values_from_function
    experimental_distribute_dataset = distribute_dataset
    experimental_distribute_datasets_from_function = distribute_datasets_from_function

    # ------------------------------------------------------------------ inside

    def _require_across(self, method: str) -> CrossReplicaContext | None:
        context: Context | None = current.get()
        if context is None:
            return None
        if type(context) is ReplicaContext:
            raise ReplicaContextError(
                f"{type(self).__name__}.{method}: called inside replica {context.replica_id_in_sync_group} of "
                f"{context.strategy!r}, in a step; it needs the view across replicas — call it outside strategy.run"
                + (
                    ""
                    if method in ("run", "scope")
                    else ", or use get_replica_context().all_reduce or all_gather"
                )
            )
        if context.strategy is not self:
            raise ReplicaContextError(
                f"{self!r}.{method}: called in the scope of another strategy, {context.strategy!r}; "
                "leave that scope first — strategies don't nest"
            )
        assert isinstance(context, CrossReplicaContext)
        return context

    def _require_own(self, variable: Any, method: str) -> None:
        if not isinstance(variable, Variable) or not self.variable_created_in_scope(variable):
            named = variable.name if isinstance(variable, Variable) else repr(variable)
            raise ValueError(
                f"{method}: got {named}, which was not made under {self!r}; make it with strategy.scope(): Variable(...)"
            )


def _like(result: Any, like: Any) -> Any:
    return result if like is None else asarray(result, like=like)


def _count_destinations(destinations: Any) -> int:
    if isinstance(destinations, (str, Device)):
        Device.parse(destinations)
        return 1
    components = components_of(destinations)
    if components is not None:
        return len(components)
    if isinstance(destinations, (Variable, np.ndarray, np.generic)):
        return 1
    raise ValueError(
        f"destinations: got {destinations!r}; need a variable, a distributed value, an array, or the name of a device"
    )


def _copies(value: Any, count: int) -> Any:
    if count == 1:
        return value
    return Mirrored(
        [value, *(value.copy() if isinstance(value, np.ndarray) else value for _ in range(count - 1))]
    )
