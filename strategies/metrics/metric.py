"""The interface of metrics: sums over examples, and the value that follows from the sums.

Sums of shares add up to the sums of the whole whatever the shares' lengths, where means of means do not. So a metric
keeps nothing but sums, in one ON_READ variable, and divides when read.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import numpy as np

from collectives.arrays import Array, is_host
from variables.replica_context import CrossReplicaContext, ReplicaContext, ReplicaContextError, current
from variables.synchronization import VariableAggregation, VariableSynchronization
from variables.values import flatten, has_distributed, is_distributed, select
from variables.variable import Variable


class Metric(ABC):
    """A figure of all examples that all replicas have seen since the last reset.

    Make it in ``strategy.scope()``, call `update` in the step, each replica with its own share, and `result` or `pop`
    outside. An update costs no communication, and replicas may make different numbers of them; under
    `CentralStorageStrategy`, which has one copy of everything, all replicas make it together. Shares may be of any length,
    also empty, and the value is that of the whole data in one piece. Made outside of any scope, a metric serves plain
    code.
    """

    sums: Variable
    """Its whole state, float64: for checkpoints. Counts are exact up to 2**53."""

    def __init__(self, name: str, shape: tuple[int, ...]) -> None:
        """For the kinds.

        Args:
            name: for error messages and checkpoints.
            shape: of the sums.
        """
        self.name = name
        # Floats, also for counts: weights are no integers, and a checkpoint that is dealt to another number of copies loses
        # nothing.
        self.sums = Variable(
            np.zeros(shape),
            name=name,
            trainable=False,
            synchronization=VariableSynchronization.ON_READ,
            aggregation=VariableAggregation.SUM,
        )

    @abstractmethod
    def update(self, *args: Any, **kwargs: Any) -> None:
        """Count examples: in a step those of the calling replica.

        Outside of a step it counts them once; of a `PerReplica`, as ``strategy.run`` returns, all replicas' parts.
        Examples of weight 0 may hold anything, as padding does.

        Raises:
            ValueError: shapes that do not belong together, weights below 0, or values that the metric has no meaning for.
            TypeError: what is no array of real numbers.
        """

    def result(self) -> Any:
        """The value for all examples of all replicas; nan where there were none.

        Raises:
            ReplicaContextError: called in a step, where a replica has the sums of its own share only.
        """
        self._require_whole("result")
        return self._value_of(np.array(self.sums))

    def update_state(self, *args: Any, **kwargs: Any) -> None:
        """TensorFlow's name for `update`."""
        self.update(*args, **kwargs)

    def reset_state(self) -> None:
        """TensorFlow's name for `reset`."""
        self.reset()

    def reset(self) -> None:
        """Forget all examples.

        Raises:
            ReplicaContextError: called in a step.
        """
        self._require_whole("reset")
        self.sums.assign(np.zeros(self.sums.shape), read_value=False)

    def pop(self) -> Any:
        """`result`, then `reset`: the value since the last time. Raises as they do."""
        value = self.result()
        self.reset()
        return value

    # ------------------------------------------------------------- checkpoints

    def state(self) -> dict[str, Any]:
        """What a checkpoint needs to continue it: its kind, and the sums over all replicas.

        Raises:
            ReplicaContextError: called in a step.
        """
        self._require_whole("state")
        return {"metric": type(self).__name__, "sums": np.array(self.sums)}

    def state_for_newcomer(self) -> dict[str, Any]:
        """The state of no examples, as a process has that joins the others; not a collective."""
        self._require_whole("state_for_newcomer")
        return {"metric": type(self).__name__, "sums": np.zeros(self.sums.shape)}

    def restore(self, state: Any) -> None:
        """Go on from a state, in any number of replicas: the sums are put to the first one's, so that nothing is rounded.

        Args:
            state: what `state` of a metric made with the same arguments returned.

        Raises:
            ValueError: another metric's, or of another shape.
            ReplicaContextError: called in a step.
        """
        self._require_whole("restore")
        kind = state.get("metric") if isinstance(state, dict) else None
        sums = np.asarray(state["sums"], np.float64) if kind == type(self).__name__ else None
        if sums is None or sums.shape != self.sums.shape:
            got = f"one of {kind or type(state).__name__}" + (
                "" if sums is None else f" of shape {sums.shape}"
            )
            raise ValueError(
                f"{self.name}.restore: got {got}; need a state of {type(self).__name__} with sums of shape {self.sums.shape} — make "
                "the metric with the arguments that it had"
            )
        self.reset()
        self.sums.assign_add(sums, read_value=False)

    def __repr__(self) -> str:
        return f"{type(self).__name__}(name={self.name!r})"

    # ------------------------------------------------------------ for the kinds

    @abstractmethod
    def _sums_of(self, *inputs: Any) -> Any:
        """What these examples add to the sums: array-like, of their shape."""

    @abstractmethod
    def _value_of(self, sums: Array) -> Any:
        """The value: a float, or an array of them."""

    def _require_whole(self, method: str) -> None:
        """Refuse to be called where only one replica's sums are seen."""
        context = current.get()
        if isinstance(context, ReplicaContext):
            raise ReplicaContextError(
                f"{self.name}.{method}: called inside replica {context.replica_id_in_sync_group}, which has the sums of its own "
                "share only; call it outside strategy.run, or in a merge function"
            )
        if isinstance(context, CrossReplicaContext) and context.updating is not None:
            raise ReplicaContextError(
                f"{self.name}.{method}: called in an update function, which sees the sums of one copy only; "
                "call it outside strategy.update"
            )

    @property
    def _where(self) -> str:
        return f"{self.name}.update"

    def _add(self, *inputs: Any) -> None:
        """Count examples; the inputs are `_sums_of`'s."""
        shares = [inputs]
        if has_distributed(inputs):
            shares = self._shares(inputs)
        for share in shares:
            sums = self._sums_of(*share)
            if not (isinstance(sums, (list, tuple)) or is_host(sums)):
                sums = sums.get()  # CuPy's way to the host: sums are small, and the variable knows its device
            self.sums.assign_add(np.asarray(sums, np.float64), read_value=False)

    def _shares(self, inputs: tuple[Any, ...]) -> list[tuple[Any, ...]]:
        distributed = [leaf for leaf in flatten(inputs)[0] if is_distributed(leaf)]
        if isinstance(current.get(), ReplicaContext):
            raise ValueError(
                f"{self._where}: got a {type(distributed[0]).__name__} in a step; need this replica's part alone — "
                "pass it in args of strategy.run"
            )
        sizes = {len(value.values) for value in distributed}
        if len(sizes) > 1:
            raise ValueError(
                f"{self._where}: got values of {' and '.join(map(str, sorted(sizes)))} replicas; need one number of "
                "replicas — values of one strategy"
            )
        return [select(inputs, replica) for replica in range(sizes.pop())]


class Comparison(Metric):
    """A metric of predictions against the truth."""

    def update(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        """Count examples, as `Metric.update` says.

        Args:
            y_true: the truth; the metric tells its shape.
            y_pred: the predictions.
            sample_weight: how much each example counts, ``(batch,)`` or of any shape that the examples' begins with; None
                means 1.
        """
        self._add(y_true, y_pred, sample_weight)
