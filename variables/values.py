"""Values that each replica has its own of, and the nested structures they come in."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeGuard, final

import numpy as np
import optree

_CONTAINERS = (list, tuple, dict)


def _flattened(structure: Any) -> tuple[list[Any], Any]:
    return optree.tree_flatten(structure, none_is_leaf=True)


class DistributedValues:
    """One component for each local replica. Interface of `PerReplica` and `Mirrored`.

    Args:
        values: the components, by local replica.
    """

    __slots__ = ("values",)

    def __init__(self, values: Sequence[Any]) -> None:
        self.values = tuple(values)
        if not self.values:
            raise ValueError(f"{type(self).__name__}: got no components; need one for each local replica")

    def __array__(self, *_: Any, **__: Any) -> Any:
        raise TypeError(
            f"a {type(self).__name__} holds one value for each of {len(self.values)} replicas and is no array or number; "
            "use strategy.reduce('SUM' or 'MEAN', value, axis=None), strategy.gather(value, axis=0) or value.values"
        )

    __float__ = __int__ = __index__ = __complex__ = __array__

    def __repr__(self) -> str:
        listed = ", ".join(f"{index}: {value!r}" for index, value in enumerate(self.values))
        return f"{type(self).__name__}({listed})"


@final
class PerReplica(DistributedValues):
    """Components that may differ, also in shape.

    Attributes:
        whole: the array that the components are shares of, along its first axis, where they are: a dataset's global batch.
    """

    __slots__ = ("whole",)

    def __init__(self, values: Sequence[Any], whole: Any = None) -> None:
        super().__init__(values)
        self.whole = whole


@final
class Mirrored(DistributedValues):
    """Components that are equal."""

    __slots__ = ()


_FLAT_KINDS = frozenset({PerReplica, np.ndarray, int, float, bool, str, type(None)})
"""Kinds of arguments that hold nothing else that might be distributed."""


def is_distributed(value: object) -> TypeGuard[DistributedValues]:
    """Whether the value is a `PerReplica` or a `Mirrored`."""
    return isinstance(value, DistributedValues)


def map_structure(function: Callable[..., Any], structure: Any, *others: Any) -> Any:
    """The structure with the function's result in place of every leaf.

    Lists, tuples, named tuples and mappings are structure, at any depth; all else is a leaf, None too.

    Raises:
        ValueError: the structures differ.
    """
    if not isinstance(structure, _CONTAINERS) and not others:
        return function(structure)
    return optree.tree_map(function, structure, *others, none_is_leaf=True)


def flatten(structure: Any) -> tuple[list[Any], Callable[[Sequence[Any]], Any]]:
    """The leaves, and the function that puts others in their places."""
    if not isinstance(structure, _CONTAINERS):
        return [structure], lambda leaves: leaves[0]
    leaves, spec = _flattened(structure)
    return leaves, spec.unflatten


def has_distributed(structure: Any) -> bool:
    """Whether any leaf is a `PerReplica` or a `Mirrored`."""
    if isinstance(structure, _CONTAINERS):
        return any(isinstance(leaf, DistributedValues) for leaf in _flattened(structure)[0])
    return isinstance(structure, DistributedValues)


def select(structure: Any, local_replica_id: int) -> Any:
    """The structure as one replica sees it: its own component in place of each distributed value."""
    if isinstance(structure, DistributedValues):
        return structure.values[local_replica_id]
    if not has_distributed(structure):
        return structure
    return map_structure(
        lambda leaf: leaf.values[local_replica_id] if isinstance(leaf, DistributedValues) else leaf, structure
    )


def require_components(value: DistributedValues, num_replicas: int, where: str) -> None:
    """Refuse a value that was made for another number of replicas.

    Raises:
        ValueError: it has more or fewer components than there are local replicas.
    """
    if len(value.values) != num_replicas:
        raise ValueError(
            f"{where}: got a {type(value).__name__} of {len(value.values)} components for {num_replicas} replicas; "
            "need one for each — make it under the strategy that uses it"
        )


def select_arguments(
    args: Sequence[Any], kwargs: Mapping[str, Any], num_replicas: int
) -> list[tuple[Sequence[Any], Mapping[str, Any]]] | None:
    """Each replica's arguments of a call, or None if there is no distributed value among them, at any depth."""
    kinds = {type(arg) for arg in args}
    if not kwargs and kinds <= _FLAT_KINDS:  # by far the most frequent case, at the start of every step
        if PerReplica not in kinds:
            return None
        for arg in args:
            if type(arg) is PerReplica:
                require_components(arg, num_replicas, "run")
        return [
            (tuple([arg.values[i] if type(arg) is PerReplica else arg for arg in args]), kwargs)
            for i in range(num_replicas)
        ]
    if not has_distributed(args) and not has_distributed(kwargs):
        return None
    for leaf in (*_flattened(args)[0], *_flattened(kwargs)[0]):
        if isinstance(leaf, DistributedValues):
            require_components(leaf, num_replicas, "run")
    return [(select(args, i), select(kwargs, i)) for i in range(num_replicas)]


def _itself(leaf: Any) -> Any:
    return leaf


def regroup(
    structures: Sequence[Any],
    wrap: Callable[[Sequence[Any]], Any] = PerReplica,
    *,
    always: bool = False,
    one: Callable[[Any], Any] = _itself,
) -> Any:
    """One structure out of the replicas' structures, with a distributed value for each leaf.

    Args:
        structures: one for each local replica; where the first one is a leaf, the others may be anything.
        wrap: makes the distributed value of a leaf's components.
        always: wrap also a leaf that is the same object on all replicas; otherwise that object stands for itself.
        one: makes of that object what stands for it.

    Raises:
        ValueError: the replicas' structures differ.
    """
    first = structures[0]
    if not isinstance(first, _CONTAINERS):
        return _regroup_leaf(structures, wrap, always, one)
    leaves, spec = _flattened(first)
    by_replica = [leaves]
    for replica, other in enumerate(structures[1:], start=1):
        other_leaves, other_spec = _flattened(other)
        if other_spec != spec:
            raise ValueError(
                f"the replicas' results differ in structure: replica 0 has {sketch(first)}, replica {replica} has "
                f"{sketch(other)}; need the same containers, lengths and keys from every replica"
            )
        by_replica.append(other_leaves)
    return spec.unflatten([_regroup_leaf(leaf, wrap, always, one) for leaf in zip(*by_replica, strict=True)])


def _regroup_leaf(
    components: Sequence[Any],
    wrap: Callable[[Sequence[Any]], Any],
    always: bool,
    one: Callable[[Any], Any],
) -> Any:
    first = components[0]
    if not always and all(component is first for component in components):
        return one(first)
    # The components of one variable, one from each replica, are that variable.
    whole = getattr(first, "distributed", None)
    if whole is not None and all(
        getattr(component, "distributed", None) is whole for component in components
    ):
        return whole
    return wrap(components)


def sketch(structure: Any) -> str:
    """The structure in short, with a star for every leaf."""
    spec = optree.tree_structure(structure, none_is_leaf=True)
    return str(spec).removeprefix("PyTreeSpec(").removesuffix(", NoneIsLeaf)")
