"""Statistics over the batch of all replicas, and the batch normalization that is made of them.

Each replica normalizing by its own share's moments is another model than the one that is meant, and with small shares a worse
one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, final

import numpy as np
import numpy.typing as npt
from numpy.lib.array_utils import normalize_axis_tuple

from collectives.arrays import Array, as_array, describe, is_narrow_float
from collectives.reduce_op import ReduceOp
from variables.replica_context import ReplicaContext, ReplicaContextError, current_replica
from variables.synchronization import VariableAggregation
from variables.values import is_distributed
from variables.variable import Variable


def sync_moments(x: Any, axis: int | Sequence[int], *, keepdims: bool = False) -> tuple[Any, Any]:
    """Mean and variance over all replicas' shares, as if they were one array.

    In a step it is a collective that all replicas call; they get equal results, to the last bit. Elsewhere it is of this array
    alone. The variance is that of the population: the mean of the squared distances from the mean.

    Args:
        x: this replica's share. Along ``axis`` shares may have any length, also 0; the other axes agree.
        axis: the axis or axes that are averaged over; negative ones count from the end.
        keepdims: whether they stay, with length 1.

    Returns:
        Two arrays of the shape of the remaining axes, or two numbers if there are none. Sums are float64, and float16 and
        bfloat16 are squared in float32; the results have the dtype of ``x``, of integers float64. nan where all shares are
        empty.

    Raises:
        ValueError: an axis that ``x`` does not have, or that comes twice; a `PerReplica`.
        TypeError: complex numbers, or what is no array.
        CollectiveMismatchError: shares whose other axes differ.
    """
    array = _as_real(x, "sync_moments")
    axes = _axes(array, axis, "sync_moments")
    moments = _moments(array, axes, current_replica())
    dtype = array.dtype if array.dtype.kind in "fV" else np.dtype(np.float64)
    shape = tuple(1 if i in axes else n for i, n in enumerate(array.shape) if keepdims or i not in axes)
    mean, variance = (moment.astype(dtype).reshape(shape)[()] for moment in (moments.mean, moments.variance))
    return mean, variance


@final
@dataclass(frozen=True)
class Normalized:
    """What `SyncBatchNorm.backward` needs of a forward pass; belongs to the step that made it."""

    values: Array
    """Shape ``x.shape``: the input minus the mean, divided by the deviation."""
    inverse_deviation: Array
    """float64, shape ``(num_features,)``."""
    count: float | None
    """Values of a feature in all replicas together; None for moments that did not come from the input."""
    dtype: np.dtype[Any]
    """The input's."""


@final
class SyncBatchNorm:
    """Batch normalization by the moments of all replicas' shares together.

    Forward and backward it computes what one replica would with the whole batch. Make it in ``strategy.scope()`` and call it in
    the step, all replicas at the same place: in training both passes are collectives.

    The moving moments are ON_WRITE variables: all replicas get equal batch moments, to the last bit, so each writes its own copy
    without a collective, the copies stay equal, and a checkpoint holds one exact value. Averaged on reading, as TensorFlow's
    are, equal copies would be rounded, and inference in a step would have no need to read across replicas either.

    Args:
        num_features: the length of the feature axis.
        axis: the feature axis; moments are over all others. 1 for images with channels first, as PyTorch's.
        momentum: how much of the moving moments is kept at each step; PyTorch's momentum is 1 minus this.
        epsilon: what is added to the variance before its root is taken.
        correction: what is subtracted from the count in the moving variance: 0 as in Keras, 1 as in PyTorch. The batch itself
            is normalized with 0.
        dtype: of its variables; float32 also for half precision inputs.
        name: for error messages and checkpoints.

    Raises:
        ValueError: no features, a momentum outside of [0, 1], an epsilon below 0, another correction.
    """

    gamma: Variable
    """Trainable, shape ``(num_features,)``: what normalized values are multiplied by; 1 at first."""
    beta: Variable
    """Trainable, shape ``(num_features,)``: what is added then; 0 at first."""
    moving_mean: Variable
    """Shape ``(num_features,)``; 0 at first."""
    moving_variance: Variable
    """Shape ``(num_features,)``; 1 at first."""

    def __init__(
        self,
        num_features: int,
        *,
        axis: int = -1,
        momentum: float = 0.99,
        epsilon: float = 1e-3,
        correction: int = 0,
        dtype: npt.DTypeLike = np.float32,
        name: str = "batch_norm",
    ) -> None:
        for wrong, got, need in (
            (num_features < 1, f"num_features={num_features}", "1 or more"),
            (not 0 <= momentum <= 1, f"momentum={momentum}", "a number from 0 to 1"),
            (not epsilon >= 0, f"epsilon={epsilon}", "a number of 0 or more"),
            (correction not in (0, 1), f"correction={correction}", "0 or 1"),
        ):
            if wrong:
                raise ValueError(f"{name}: got {got}; need {need}")
        self.name = name
        self._num_features = num_features
        self._axis = axis
        self._momentum = momentum
        self._epsilon = epsilon
        self._correction = correction
        zeros, ones = np.zeros(num_features, dtype), np.ones(num_features, dtype)
        self.gamma = Variable(ones, name=f"{name}/gamma")
        self.beta = Variable(zeros, name=f"{name}/beta")
        # The first replica's value is the value of all, exactly; a MEAN of equal values is rounded.
        first = VariableAggregation.ONLY_FIRST_REPLICA
        self.moving_mean = Variable(zeros, name=f"{name}/moving_mean", trainable=False, aggregation=first)
        self.moving_variance = Variable(
            ones, name=f"{name}/moving_variance", trainable=False, aggregation=first
        )

    @property
    def variables(self) -> dict[str, Variable]:
        """Its variables by name: for checkpoints."""
        return {
            "gamma": self.gamma,
            "beta": self.beta,
            "moving_mean": self.moving_mean,
            "moving_variance": self.moving_variance,
        }

    def forward(self, x: Any, *, training: bool = True) -> tuple[Array, Normalized]:
        """The normalized input, scaled by `gamma` and moved by `beta`.

        Args:
            x: this replica's share, floats, with `num_features` along the feature axis; it may be empty.
            training: normalize by the batch's moments, and move the moving ones towards them; otherwise by the moving ones.

        Returns:
            An array like ``x``, and what `backward` takes. float16 and bfloat16 are computed in float32.

        Raises:
            ValueError: another shape.
            TypeError: no floats.
            ReplicaContextError: in a step, if it was not made in the strategy's scope.
        """
        array, axes = self._checked(x, "forward")
        replica = self._replica("forward")
        if training:
            moments = _moments(array, axes, replica)
            mean, variance = moments.mean, moments.variance
            self._remember(moments)
        else:
            moments = None
            mean = self.moving_mean.value().astype(np.float64)
            variance = self.moving_variance.value().astype(np.float64)
        inverse = 1 / np.sqrt(variance + self._epsilon)
        wide = array.astype(_accumulator(array.dtype), copy=False)
        values = (wide - self._spread(mean, wide)) * self._spread(inverse, wide)
        y = values * self._spread(self.gamma.value(), wide) + self._spread(self.beta.value(), wide)
        count = None if moments is None else moments.count
        return y.astype(array.dtype, copy=False), Normalized(values, inverse, count, array.dtype)

    def backward(self, dy: Any, saved: Normalized) -> tuple[Array, Array, Array]:
        """The gradients of the sum of all replicas' losses.

        Args:
            dy: the gradient by what `forward` returned, of that shape.
            saved: what `forward` returned beside it.

        Returns:
            The gradients by ``x``, through the moments and so through the other replicas' losses too; and by `gamma` and
            `beta`, this replica's part of each, which ``apply_gradients`` adds up as it does other gradients.

        Raises:
            ValueError: another shape.
            TypeError: no floats.
        """
        array, axes = self._checked(dy, "backward")
        if array.shape != saved.values.shape:
            raise ValueError(
                f"{self.name}.backward: got dy of shape {array.shape}; need {saved.values.shape}, as forward returned"
            )
        replica = self._replica("backward")
        wide = array.astype(np.result_type(saved.values.dtype, _accumulator(array.dtype)), copy=False)
        by_beta = wide.sum(axis=axes, dtype=np.float64)
        by_gamma = (wide * saved.values).sum(axis=axes, dtype=np.float64)
        gradient = wide
        if saved.count is not None:
            sums = np.concatenate([by_beta, by_gamma])
            if replica is not None:
                sums = replica.communicator.all_reduce(sums, ReduceOp.SUM, name=f"{self.name}.backward")
            through_mean, through_variance = np.split(sums / max(saved.count, 1), 2)
            gradient = (
                wide - self._spread(through_mean, wide) - saved.values * self._spread(through_variance, wide)
            )
        scale = self.gamma.value() * saved.inverse_deviation
        by_x = (gradient * self._spread(scale, wide)).astype(saved.dtype, copy=False)
        dtype = self.gamma.dtype
        return by_x, by_gamma.astype(dtype), by_beta.astype(dtype)

    # ------------------------------------------------------------------ pieces

    def _checked(self, x: Any, method: str) -> tuple[Array, tuple[int, ...]]:
        """The input as an array, and the axes that are averaged over."""
        where = f"{self.name}.{method}"
        array = _as_real(x, where)
        if array.dtype.kind not in "fV":
            raise TypeError(f"{where}: got {describe(array)}; need floats — astype(np.float32)")
        (feature_axis,) = _axes(array, self._axis, where)
        if array.shape[feature_axis] != self._num_features:
            raise ValueError(
                f"{where}: got {describe(array)}; need {self._num_features} features along axis {self._axis}"
            )
        return array, tuple(i for i in range(array.ndim) if i != feature_axis)

    def _replica(self, method: str) -> ReplicaContext | None:
        replica = current_replica()
        if replica is not None and self.gamma.owner is not replica.strategy:
            raise ReplicaContextError(
                f"{self.name}.{method}: called in a replica of {replica.strategy!r}, but made "
                f"{'outside any scope' if self.gamma.owner is None else f'under {self.gamma.owner!r}'}; "
                "make it in the scope of the strategy that runs it"
            )
        return replica

    def _remember(self, moments: _Moments) -> None:
        if not moments.count:  # nothing was seen
            return
        corrected = moments.count / max(moments.count - self._correction, 1)
        for variable, new in (
            (self.moving_mean, moments.mean),
            (self.moving_variance, moments.variance * corrected),
        ):
            moved = variable.value() * self._momentum + new * (1 - self._momentum)
            variable.assign(moved.astype(variable.dtype), read_value=False, already_identical=True)

    def _spread(self, by_feature: Array, like: Array) -> Array:
        """A value for each feature, in the shape that broadcasts against an array, and in its dtype."""
        shape = [1] * like.ndim
        shape[self._axis] = self._num_features
        return by_feature.astype(like.dtype, copy=False).reshape(shape)


@final
@dataclass(frozen=True)
class _Moments:
    """Of all replicas together; float64, flat."""

    mean: Array
    variance: Array
    count: float
    """Of the values that each mean is over."""


def _moments(array: Array, axes: tuple[int, ...], replica: ReplicaContext | None) -> _Moments:
    """Mean and variance over the given axes, in one collective.

    Each share is centred about its own mean, then the shares are put together by the formula of Chan, Golub and LeVeque,
    Updating formulae and a pairwise algorithm for computing sample variances, 1979: sums of squares about 0 would
    lose the variance of data far from 0.
    """
    wide = array.astype(_accumulator(array.dtype), copy=False)
    count = float(np.prod([array.shape[axis] for axis in axes], dtype=np.float64))
    size = int(np.prod([n for i, n in enumerate(array.shape) if i not in axes], dtype=np.int64))
    rough = rest = squares = np.zeros_like(wide, np.float64, shape=(size,))
    if count:
        # NumPy adds rows up one after the other, which in float32 loses digits with every thousand of them.
        about = wide.mean(axis=axes, keepdims=True, dtype=np.float64).astype(wide.dtype)
        centred = wide - about
        rough = about.astype(np.float64).reshape(size)
        # What rounding left of the mean shows in the centred values, which are small.
        rest = centred.mean(axis=axes, dtype=np.float64).reshape(size)
        np.square(centred, out=centred)
        squares = centred.sum(axis=axes, dtype=np.float64).reshape(size) - count * rest * rest
    # float64 also counts beyond 2**24, where float32 stops.
    own = np.concatenate([rough, rest, squares, np.full_like(rough, count, shape=(1,))])[None]
    told = own if replica is None else replica.communicator.all_gather(own)
    counts = told[:, -1:]
    roughs, rests, all_squares = (told[:, start : start + size] for start in (0, size, 2 * size))
    total = float(counts.sum())
    if not total:
        nothing = np.full_like(rough, np.nan)
        return _Moments(nothing, nothing, 0.0)
    # Any number near the means will do: what counts are the distances from it, which keep all their digits.
    near = (roughs * counts).sum(axis=0) / total
    distances = roughs - near + rests
    distance = (distances * counts).sum(axis=0) / total
    spread = (all_squares + counts * np.square(distances - distance)).sum(axis=0)
    return _Moments(near + distance, np.maximum(spread / total, 0), total)


def _as_real(x: Any, where: str) -> Array:
    if is_distributed(x):
        raise ValueError(
            f"{where}: got a {type(x).__name__}; need this replica's part alone — call it in a step, with the value in "
            "args of strategy.run"
        )
    array = as_array(x, where)
    if array.dtype.kind not in "biuf" and not is_narrow_float(array.dtype):
        raise TypeError(f"{where}: got {describe(array)}; need real numbers")
    return array


def _axes(array: Array, axis: Any, where: str) -> tuple[int, ...]:
    axes = tuple(axis) if isinstance(axis, (list, tuple)) else (axis,)
    if not all(isinstance(a, (int, np.integer)) and not isinstance(a, bool) for a in axes):
        raise TypeError(f"{where}: got axis={axis!r}; need an integer or a tuple of integers")
    try:
        return normalize_axis_tuple(tuple(int(a) for a in axes), array.ndim)
    except ValueError as error:
        raise ValueError(
            f"{where}: got axis={axis!r} for {describe(array)} ({error}); need axes that it has, each once"
        ) from None


def _accumulator(dtype: np.dtype[Any]) -> np.dtype[Any]:
    if is_narrow_float(dtype):
        return np.dtype(np.float32)
    return dtype if dtype.kind == "f" else np.dtype(np.float64)
