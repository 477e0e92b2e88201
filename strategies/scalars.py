"""Numbers to be shown: one for all replicas, and never silently one replica's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from collectives.reduce_op import ReduceOp
from strategies.cross_replica import reduce_components
from variables.replica_context import ReplicaContext, ReplicaContextError, current
from variables.values import Mirrored, PerReplica

Scalar = bool | int | float
Reductions = ReduceOp | str | Mapping[str, ReduceOp | str] | None
"""How distributed values become one: the same for all, or by name."""


def require_outside_steps(where: str) -> None:
    """Refuse to show what one replica alone knows.

    Raises:
        ReplicaContextError: called in a step.
    """
    context = current.get()
    if isinstance(context, ReplicaContext):
        raise ReplicaContextError(
            f"{where}: called in replica {context.replica_id_in_sync_group}, in a step, where each replica has its own "
            "values; need those of all — return them from the step, and call it outside of strategy.run"
        )


def as_scalars(values: Mapping[str, Any], reduce: Reductions, where: str) -> dict[str, Scalar]:
    """The numbers by name.

    Args:
        values: numbers, arrays of one element, variables, metrics with ``result()``, or distributed values of these.
        reduce: how distributed values become one.
        where: for error messages.

    Raises:
        ValueError: a `PerReplica` without a reduction; a name that ``reduce`` has and ``values`` has not; an array of more
            than one element.
        TypeError: what is no number.
    """
    if isinstance(reduce, Mapping):
        unknown = sorted(set(reduce) - set(values))
        if unknown:
            raise ValueError(
                f"{where}: got reduce= for {', '.join(unknown)}; need names that are logged: {', '.join(values)}"
            )
    return {
        name: _as_scalar(
            value, reduce.get(name) if isinstance(reduce, Mapping) else reduce, f"{where}: {name}"
        )
        for name, value in values.items()
    }


def _as_scalar(value: Any, reduce: ReduceOp | str | None, where: str) -> Scalar:
    if isinstance(value, PerReplica):
        if reduce is None:
            raise ValueError(
                f"{where} is a PerReplica of {len(value.values)} replicas; need one number — name how they become one, "
                "such as reduce='SUM' or reduce='MEAN'"
            )
        value = reduce_components(ReduceOp.parse(reduce), value.values)
    elif isinstance(value, Mirrored):
        value = value.values[0]  # they are equal
    result = getattr(value, "result", None)
    if callable(result):
        value = result()
    if isinstance(value, (bool, int, float)):
        return value
    detach = getattr(value, "detach", None)  # a tensor of PyTorch's that gradients go through is no array yet
    array = np.asarray(detach() if callable(detach) else value)
    if array.size != 1:
        raise ValueError(
            f"{where}: got an array of shape {array.shape}; need one number — reduce it, or index it"
        )
    number = array.reshape(()).item()
    if not isinstance(number, (bool, int, float)):
        raise TypeError(f"{where}: got {type(number).__name__} {number!r}; need a real number")
    return number
