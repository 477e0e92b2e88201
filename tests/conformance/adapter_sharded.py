"""The operations of the theme `sharded`: sharded variables and partitioners."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

import strategies as ours

_PARTITIONERS: dict[str, Callable[..., ours.Partitioner]] = {
    "fixed": ours.FixedShardsPartitioner,
    "min_size": ours.MinSizePartitioner,
    "max_size": ours.MaxSizePartitioner,
}


class ShardedOperations:
    """Part of the adapter."""

    def do_sharded(self, _: ours.Strategy, *initial_values: Any) -> ours.ShardedVariable:
        return ours.ShardedVariable([ours.Variable(value) for value in initial_values])

    def do_shards(self, _: ours.Strategy, v: ours.ShardedVariable) -> list[Any]:
        return [shard.read_value() for shard in v.variables]

    def do_iter_shards(self, _: ours.Strategy, v: ours.ShardedVariable) -> list[Any]:
        return [shard.read_value() for shard in v]

    def do_sparse_read(self, _: ours.Strategy, v: ours.ShardedVariable, ids: Any) -> Any:
        return v.sparse_read(ids)

    def do_embedding_lookup(self, _: ours.Strategy, v: Any, ids: Any) -> Any:
        return ours.embedding_lookup(v, ids)

    def do_partition(
        self, _: ours.Strategy, spec: dict[str, Any], shape: Sequence[int], dtype: str, axis: int = 0
    ) -> list[int]:
        options = {key: value for key, value in spec.items() if key != "kind"}
        dtypes = {"string": np.dtype(np.str_)}
        return _PARTITIONERS[spec["kind"]](**options)(tuple(shape), dtypes.get(dtype, dtype), axis)
