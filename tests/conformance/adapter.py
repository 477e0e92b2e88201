"""What the operations of the conformance cases are in this project.

In the case language values never change, while a variable read in a replica is its live array: the adapter takes
snapshots where a case would keep one.
"""

from __future__ import annotations

import builtins
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, TypeAlias, final

import numpy as np

import strategies as ours
from collectives.buckets import group_by_size
from collectives.clusters import ClusterTask
from collectives.indexed_slices import to_dense
from collectives.link import Link
from tests.conformance.adapter_checkpoint import CheckpointOperations
from tests.conformance.adapter_optimizers import OptimizerOperations, Slot
from tests.conformance.adapter_sharded import ShardedOperations
from tests.conformance.interp import Function
from variables.replica_context import CrossReplicaContext, current
from variables.values import DistributedValues, map_structure

TIMEOUT = 10.0
"""Seconds that a replica waits for the others, so that a case which would hang fails."""

Strategy: TypeAlias = ours.Strategy
Options: TypeAlias = Mapping[str, Any]

_STANDS_FOR: dict[type[Exception], str] = {
    ours.CollectiveMismatchError: "InvalidArgumentError",
    ours.OutOfRangeError: "OutOfRangeError",
    # Where TensorFlow's kernels refuse shapes and indices, NumPy's classes are ours.
    ValueError: "InvalidArgumentError",
    IndexError: "InvalidArgumentError",
}
"""TensorFlow's error classes that have no like in Python."""

_DTYPES = {"string": np.dtype(np.str_)}


@final
class Adapter(CheckpointOperations, OptimizerOperations, ShardedOperations):
    """The project's side of the evaluator; holds the strategies of one case.

    Args:
        worker: which of the processes that evaluate the case this is.
        num_workers: how many these are.
    """

    def __init__(self, worker: int = 0, num_workers: int = 1) -> None:
        self._worker = worker
        self._num_workers = num_workers
        self._made: list[Strategy] = []
        self._variables_of: dict[int, list[ours.Variable]] = {}

    def close(self) -> None:
        """End the replica threads of all strategies that the case made."""
        for strategy in self._made:
            strategy.close()
        self.close_checkpoints()

    def link_of_case(self) -> Link | None:
        return self._made[0].link if self._made else None

    # ------------------------------------------------------------------ scaffolding

    def make_strategy(self, kind: str, num_replicas: int) -> Strategy:
        devices = [f"cpu:{index}" for index in range(num_replicas)]
        options = ours.CommunicationOptions(timeout_seconds=TIMEOUT)
        makers: dict[str, Callable[[], Strategy]] = {
            "mirrored": lambda: ours.MirroredStrategy(devices, communication_options=options),
            "mirrored_hier": lambda: ours.MirroredStrategy(
                devices, ours.HierarchicalCopyAllReduce(), communication_options=options
            ),
            "mirrored_one": lambda: ours.MirroredStrategy(
                devices, ours.ReductionToOneDevice(), communication_options=options
            ),
            "one_device": lambda: ours.OneDeviceStrategy("cpu:0", communication_options=options),
            "central_storage": lambda: ours.CentralStorageStrategy(
                devices, "cpu:0", communication_options=options
            ),
            "multi_worker": lambda: ours.MultiWorkerMirroredStrategy(
                communication_options=options, devices=devices[: num_replicas // self._num_workers]
            ),
        }
        if kind == "default":
            return ours.get_strategy()
        if kind not in makers:
            raise ValueError(f"make_strategy: got {kind!r}; need default or one of {', '.join(makers)}")
        self._made.append(makers[kind]())
        return self._made[-1]

    def error_names(self, error: Exception) -> list[str]:
        names = [
            cls.__name__ for cls in type(error).__mro__ if issubclass(cls, Exception) and cls is not Exception
        ]
        if isinstance(error, ours.CollectiveMismatchError) and None in error.calls:
            return names  # another number of calls is a RuntimeError in TensorFlow too
        return names + [name for cls, name in _STANDS_FOR.items() if isinstance(error, cls)]

    def make_error(self, name: str) -> Exception:
        found: type[Exception] = getattr(builtins, name, None) or getattr(ours, name)
        return found("raised by the case")

    def array(self, data: Any, dtype: str) -> Any:
        return np.array(data, _DTYPES.get(dtype, dtype))

    def replica_id_int(self) -> int:
        replica = ours.get_replica_context()
        if replica is not None:
            return int(replica.replica_id_in_sync_group)
        context = current.get()
        assert isinstance(context, CrossReplicaContext)
        assert context.updating is not None, "pick: needs a replica or an update function"
        return context.updating

    def to_py(self, value: Any) -> Any:
        return (
            np.asarray(value).tolist()
            if isinstance(value, (np.ndarray, np.generic, ours.Variable))
            else value
        )

    def classify(self, value: Any) -> tuple[str, Any]:
        if isinstance(value, Slot):
            return "var", value.components
        if isinstance(value, ours.Variable):
            return "var", [component.value() for component in value.components]
        if isinstance(value, ours.PerReplica):
            return "per_replica", value.values
        if isinstance(value, ours.Mirrored):
            return "mirrored", value.values
        if isinstance(value, ours.IndexedSlices):
            return "slices", (value.values, value.indices, value.dense_shape)
        if isinstance(value, (np.ndarray, np.generic)):
            dtype = "string" if value.dtype.kind == "U" else value.dtype.name
            return "array", (dtype, value.shape, value.tolist())
        return "opaque", type(value).__name__

    # -------------------------------------------------------------------- arithmetic

    def do_add(self, _: Strategy, a: Any, b: Any) -> Any:
        return a + b

    def do_sub(self, _: Strategy, a: Any, b: Any) -> Any:
        return a - b

    def do_mul(self, _: Strategy, a: Any, b: Any) -> Any:
        return a * b

    def do_div(self, _: Strategy, a: Any, b: Any) -> Any:
        return a / b

    def do_sum(self, _: Strategy, x: Any) -> Any:
        return np.sum(x, dtype=x.dtype)  # TensorFlow's keeps the dtype of narrow integers

    def do_cast(self, _: Strategy, x: Any, dtype: str) -> Any:
        return np.asarray(x).astype(dtype)

    def do_tensor(self, _: Strategy, x: Any) -> Any:
        return np.array(x)

    def do_dense(self, _: Strategy, x: Any) -> Any:
        return to_dense(x) if isinstance(x, ours.IndexedSlices) else np.array(x)

    def do_np(self, _: Strategy, x: Any) -> Any:
        return x.numpy() if isinstance(x, ours.Variable) else np.array(x)

    def do_zeros(self, _: Strategy, shape: Sequence[int]) -> Any:
        return np.zeros(tuple(shape), np.float32)

    def do_shape(self, _: Strategy, x: Any) -> list[int]:
        return list(x.shape)

    def do_dtype(self, _: Strategy, x: Any) -> str:
        return str(x.dtype.name)

    def do_slices(self, _: Strategy, values: Any, indices: Any, dense_shape: Any = None) -> Any:
        return ours.IndexedSlices(values, indices, dense_shape)

    def do_is_mirrored(self, _: Strategy, x: Any) -> bool:
        return isinstance(x, ours.Mirrored)

    def do_is_per_replica(self, _: Strategy, x: Any) -> bool:
        return isinstance(x, ours.PerReplica)

    def do_is_dist_var(self, _: Strategy, x: Any) -> bool:
        return isinstance(x, (ours.MirroredVariable, ours.SyncOnReadVariable))

    def do_kind(self, _: Strategy, x: Any) -> str:
        plain = isinstance(x, (list, tuple, dict, int, float, str, type(None)))
        return type(x).__name__ if plain else self.classify(x)[0]

    # --------------------------------------------------------------------- variables

    def do_var(self, strategy: Strategy, initial_value: Any, options: Options | None = None) -> Any:
        options = options or {}
        named = {"sync": "synchronization", "agg": "aggregation"}
        kwargs = {named.get(key, key): value for key, value in options.items() if key != "where"}
        if options.get("where") == "here":
            return ours.Variable(initial_value, **kwargs)
        with strategy.scope():
            return ours.Variable(initial_value, **kwargs)

    def do_assign(self, _: Strategy, v: Any, x: Any) -> Any:
        return _snapshot(v.assign(x))

    def do_assign_add(self, _: Strategy, v: Any, x: Any) -> Any:
        return _snapshot(v.assign_add(x))

    def do_assign_sub(self, _: Strategy, v: Any, x: Any) -> Any:
        return _snapshot(v.assign_sub(x))

    def do_assign_noread(self, _: Strategy, v: Any, x: Any) -> Any:
        return v.assign(x, read_value=False)

    def do_scatter_add(self, _: Strategy, v: Any, x: Any) -> Any:
        return _snapshot(v.scatter_add(x))

    def do_scatter_sub(self, _: Strategy, v: Any, x: Any) -> Any:
        return _snapshot(v.scatter_sub(x))

    def do_scatter_mul(self, _: Strategy, v: Any, x: Any) -> Any:
        return _snapshot(v.scatter_mul(x))

    def do_scatter_div(self, _: Strategy, v: Any, x: Any) -> Any:
        return _snapshot(v.scatter_div(x))

    def do_scatter_min(self, _: Strategy, v: Any, x: Any) -> Any:
        return _snapshot(v.scatter_min(x))

    def do_scatter_max(self, _: Strategy, v: Any, x: Any) -> Any:
        return _snapshot(v.scatter_max(x))

    def do_scatter_update(self, _: Strategy, v: Any, x: Any) -> Any:
        return _snapshot(v.scatter_update(x))

    def do_read(self, _: Strategy, v: Any) -> Any:
        return v.read_value()

    def do_value(self, _: Strategy, v: Any) -> Any:
        return _snapshot(v.value())

    def do_getitem(self, _: Strategy, v: Any, index: Any) -> Any:
        return _snapshot(v[index])

    def do_trainable(self, _: Strategy, v: Any) -> bool:
        return bool(v.trainable)

    def do_aggregation(self, _: Strategy, v: Any) -> str:
        return str(v.aggregation.name)

    def do_synchronization(self, _: Strategy, v: Any) -> str:
        return str(v.synchronization.name)

    def do_created_in_scope(self, _: Strategy, strategy: Strategy, v: Any) -> bool:
        return strategy.extended.variable_created_in_scope(v)

    # ---------------------------------------------------------------------- strategy

    def do_worker(self, _: Strategy) -> int:
        return self._worker

    def do_num_replicas(self, strategy: Strategy) -> int:
        return strategy.num_replicas_in_sync

    def do_run(self, strategy: Strategy, fn: Any, args: Any = (), kwargs: Any = None) -> Any:
        return strategy.run(fn, args=tuple(args), kwargs=kwargs)

    def do_run_raw_args(self, strategy: Strategy, fn: Any, args: Any) -> Any:
        return strategy.run(fn, args=args)

    def do_reduce(self, strategy: Strategy, op: str, value: Any, axis: Any = None) -> Any:
        return strategy.reduce(op, value, axis)

    def do_gather(self, strategy: Strategy, value: Any, axis: Any) -> Any:
        return strategy.gather(value, axis)

    def do_local(self, strategy: Strategy, value: Any) -> Any:
        return strategy.experimental_local_results(value)

    def do_per_replica(self, strategy: Strategy, *values: Any) -> Any:
        return strategy.experimental_distribute_values_from_function(
            lambda context: values[context.replica_id_in_sync_group]
        )

    def do_values_from_function(self, strategy: Strategy, fn: Any) -> Any:
        return strategy.experimental_distribute_values_from_function(fn)

    def do_ctx_rid(self, _: Strategy, context: ours.ValueContext) -> int:
        return context.replica_id_in_sync_group

    def do_ctx_n(self, _: Strategy, context: ours.ValueContext) -> int:
        return context.num_replicas_in_sync

    def do_update(
        self, strategy: Strategy, v: Any, fn: Any, args: Any = (), kwargs: Any = None, group: bool = True
    ) -> Any:
        return _snapshot(strategy.extended.update(v, fn, args=tuple(args), kwargs=kwargs, group=group))

    def do_reduce_to(self, strategy: Strategy, op: str, value: Any, destinations: Any) -> Any:
        return strategy.extended.reduce_to(op, value, destinations)

    def do_batch_reduce_to(self, strategy: Strategy, op: str, pairs: Any) -> Any:
        return strategy.extended.batch_reduce_to(op, [tuple(pair) for pair in pairs])

    def do_in_cross(self, _: Strategy) -> bool:
        return ours.in_cross_replica_context()

    def do_has_strategy(self, _: Strategy) -> bool:
        return ours.has_strategy()

    def do_has_replica_ctx(self, _: Strategy) -> bool:
        return ours.get_replica_context() is not None

    def do_is_current(self, _: Strategy, strategy: Strategy) -> bool:
        return ours.get_strategy() is strategy

    # --------------------------------------------------------------- replica context

    def do_rid(self, _: Strategy) -> Any:
        return np.asarray(_replica().replica_id_in_sync_group, np.int32)

    def do_ridf(self, _: Strategy) -> Any:
        return np.asarray(_replica().replica_id_in_sync_group, np.float32)

    def do_pyrid(self, _: Strategy) -> int:
        return self.replica_id_int()

    def do_ctx_num_replicas(self, _: Strategy) -> int:
        return int(_replica().num_replicas_in_sync)

    def do_merge_call(self, _: Strategy, fn: Function, args: Any = (), kwargs: Any = None) -> Any:
        return _replica().merge_call(_with_own_code(fn), args=tuple(args), kwargs=kwargs)

    def do_all_reduce(self, _: Strategy, op: str, value: Any) -> Any:
        return _replica().all_reduce(op, value)

    def do_all_gather(self, _: Strategy, value: Any, axis: Any) -> Any:
        return _replica().all_gather(value, axis)

    # ---------------------------------------------------------------------- datasets

    def do_ds_range(self, _: Strategy, n: Any) -> ours.Dataset:
        return ours.Dataset.range(int(n))

    def do_ds_slices(self, _: Strategy, arrays: Any) -> ours.Dataset:
        return ours.from_arrays(np.stack(arrays) if isinstance(arrays, list) else arrays)

    def do_ds_batch(self, _: Strategy, dataset: ours.Dataset, size: Any, drop: bool = False) -> ours.Dataset:
        return dataset.batch(int(size), drop_remainder=drop)

    def do_ds_padded_batch(self, _: Strategy, dataset: ours.Dataset, size: Any) -> ours.Dataset:
        return dataset.padded_batch(int(size))

    def do_ds_repeat(self, _: Strategy, dataset: ours.Dataset, count: int | None = None) -> ours.Dataset:
        return dataset.repeat(count)

    def do_ds_take(self, _: Strategy, dataset: ours.Dataset, count: int) -> ours.Dataset:
        return dataset.take(count)

    def do_ds_skip(self, _: Strategy, dataset: ours.Dataset, count: int) -> ours.Dataset:
        return dataset.skip(count)

    def do_ds_shard(self, _: Strategy, dataset: ours.Dataset, num_shards: int, index: int) -> ours.Dataset:
        return dataset.shard(num_shards, index)

    def do_ds_prefetch(self, _: Strategy, dataset: ours.Dataset, size: int) -> ours.Dataset:
        return dataset.prefetch(size)

    def do_ds_map(self, _: Strategy, dataset: ours.Dataset, fn: Any) -> ours.Dataset:
        return dataset.map(fn)

    def do_ds_filter_lt(self, _: Strategy, dataset: ours.Dataset, bound: Any) -> ours.Dataset:
        return dataset.filter(lambda x: x < bound)

    def do_ds_options(self, _: Strategy, dataset: ours.Dataset, policy: str) -> ours.Dataset:
        return dataset.with_options(auto_shard_policy=policy)

    def do_ds_interleave_pad(self, _: Strategy, dataset: ours.Dataset) -> ours.Dataset:
        return dataset.map(lambda x: np.full(int(x), x))

    def do_distribute(self, strategy: Strategy, dataset: Any, options: Options | None = None) -> Any:
        return strategy.experimental_distribute_dataset(dataset, _input_options(options))

    def do_distribute_fn(self, strategy: Strategy, fn: Any, options: Options | None = None) -> Any:
        return strategy.distribute_datasets_from_function(fn, _input_options(options))

    def do_ictx(self, _: Strategy, context: ours.InputContext, attribute: str) -> int:
        return int(getattr(context, attribute))

    def do_per_replica_batch(self, _: Strategy, context: ours.InputContext, global_batch_size: int) -> int:
        return context.get_per_replica_batch_size(global_batch_size)

    def do_input_context(
        self, _: Strategy, num_pipelines: int, pipeline: int, num_replicas: int
    ) -> ours.InputContext:
        return ours.InputContext(num_pipelines, pipeline, num_replicas)

    def do_iterate(self, _: Strategy, dataset: Any, limit: int = 100) -> list[Any]:
        return [element for element, _ in zip(dataset, range(limit), strict=False)]

    def do_iter(self, _: Strategy, dataset: Any) -> Any:
        return iter(dataset)

    def do_next(self, _: Strategy, iterator: Any) -> Any:
        return next(iterator)

    def do_get_next(self, _: Strategy, iterator: Any) -> Any:
        return iterator.get_next()

    def do_next_optional(self, _: Strategy, iterator: Any) -> list[Any]:
        optional = iterator.get_next_as_optional()
        return [True, optional.get_value()] if optional.has_value() else [False]

    def do_cardinality(self, _: Strategy, dataset: Any) -> int:
        return int(dataset.cardinality)

    def do_rebatch_sizes(self, _: Strategy, batch: int, num_workers: int, replicas: int, worker: int) -> Any:
        return ours.split_sizes(batch, num_workers, replicas, worker)

    # ------------------------------------------------------------------ communication

    def do_comm_options(self, _: Strategy, fields: Options) -> dict[str, Any]:
        return _told(ours.CommunicationOptions(**fields))

    def do_comm_merge(self, _: Strategy, first: Options, second: Options | None) -> dict[str, Any]:
        other = None if second is None else ours.CommunicationOptions(**second)
        return _told(ours.CommunicationOptions(**first).merge(other))

    def do_pack(self, _: Strategy, shapes: Any, dtype: str, bytes_per_pack: int) -> list[Any]:
        groups = group_by_size([np.empty(tuple(shape), dtype) for shape in shapes], bytes_per_pack)
        return [[list(array.shape) for array in group] for group in groups]

    def do_tf_config(self, _: Strategy, config: Any, what: str) -> Any:
        text = config if isinstance(config, str) else json.dumps(config)
        task = ClusterTask.from_tf_config({"TF_CONFIG": text})
        return getattr(task, {"cluster": "cluster_spec"}.get(what, what))


def _with_own_code(function: Function) -> Callable[..., Any]:
    """A Python function that is told from others by what its case function says, as written ones are by their code."""

    def call(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    call.__code__ = call.__code__.replace(co_name=f"case function {json.dumps(function.body)}")
    return call


def _replica() -> Any:
    # As in TensorFlow, None where there is no replica, so that a call on it fails.
    return ours.get_replica_context()


def _snapshot(value: Any) -> Any:
    def copied(leaf: Any) -> Any:
        if isinstance(leaf, np.ndarray):
            return leaf.copy()
        if isinstance(leaf, DistributedValues):
            return type(leaf)([copied(component) for component in leaf.values])
        return leaf

    return map_structure(copied, value)


def _input_options(options: Options | None) -> ours.InputOptions | None:
    if options is None:
        return None
    fields: dict[Literal["mode", "fetch"], str] = {
        "mode": "experimental_replication_mode",
        "fetch": "experimental_fetch_to_device",
    }
    return ours.InputOptions(**{name: options[key] for key, name in fields.items() if key in options})


def _told(options: ours.CommunicationOptions) -> dict[str, Any]:
    implementation = options.implementation
    return {
        "bytes_per_pack": options.bytes_per_pack,
        "timeout_seconds": options.timeout_seconds,
        "implementation": implementation if isinstance(implementation, str) else implementation.name,
    }
