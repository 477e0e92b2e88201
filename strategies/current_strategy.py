"""Which strategy and which replica the calling code is under."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

from collectives.communication_options import CommunicationOptions
from collectives.reduce_op import ReduceOp
from strategies.one_device_strategy import OneDeviceStrategy
from strategies.strategy import Strategy
from variables.replica_context import CrossReplicaContext, ReplicaContext, ReplicaContextError, current


@cache
def _default_strategy() -> OneDeviceStrategy:
    strategy = OneDeviceStrategy("cpu:0")
    strategy._is_default = True
    return strategy


def get_strategy() -> Strategy:
    """The strategy that has been entered; where none has, a default one with one replica on the CPU."""
    context = current.get()
    if context is None:
        return _default_strategy()
    assert isinstance(context.strategy, Strategy)
    return context.strategy


def has_strategy() -> bool:
    """Whether a strategy has been entered, by its scope or by running a step."""
    context = current.get()
    return context is not None and context.strategy is not _default_strategy()


def in_cross_replica_context() -> bool:
    """Whether the calling code sees all replicas: in a scope, a merge function or an update function."""
    return isinstance(current.get(), CrossReplicaContext)


def get_replica_context() -> ReplicaContext | None:
    """The replica that the calling code runs in.

    Returns:
        Inside a step the replica. None across replicas. Where no strategy has been entered, the one replica of the default
        strategy, so that code meant for steps works by itself.
    """
    context = current.get()
    if context is None:
        return _default_strategy()._steps.first_replica()
    return context if isinstance(context, ReplicaContext) else None


def all_reduce(
    reduce_op: ReduceOp | str, value: Any, options: CommunicationOptions | None = None, **named: Any
) -> Any:
    """`ReplicaContext.all_reduce` of the current replica.

    Raises:
        ReplicaContextError: called across replicas.
    """
    return _replica("all_reduce").all_reduce(reduce_op, value, options, **named)


def all_gather(
    value: Any, axis: int, options: CommunicationOptions | None = None, *, like: Any = None
) -> Any:
    """`ReplicaContext.all_gather` of the current replica. Raises as `all_reduce`."""
    return _replica("all_gather").all_gather(value, axis, options, like=like)


def merge_call(
    merge_fn: Callable[..., Any], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
) -> Any:
    """`ReplicaContext.merge_call` of the current replica. Raises as `all_reduce`."""
    return _replica("merge_call").merge_call(merge_fn, args, kwargs)


def _replica(method: str) -> ReplicaContext:
    replica = get_replica_context()
    if replica is None:
        raise ReplicaContextError(
            f"{method}: called across the replicas of {get_strategy()!r}, in its scope or in a merge or update function; it "
            "needs replica context — call it in the function passed to strategy.run, or use strategy.reduce or gather"
        )
    return replica
