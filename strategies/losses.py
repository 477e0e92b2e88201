"""Losses of a batch that is spread over replicas."""

from __future__ import annotations

from typing import Any

import numpy as np

from collectives.arrays import array_like, as_array, is_narrow_float, is_scalar
from variables.replica_context import CrossReplicaContext, ReplicaContextError, current, current_replica


def compute_average_loss(
    per_example_loss: Any, sample_weight: Any = None, global_batch_size: int | None = None
) -> Any:
    """This replica's part of the mean loss over the global batch.

    Summed over the replicas it is that mean: combine it with ``strategy.reduce("SUM", ...)``, not with MEAN, which would
    divide by the number of replicas once more.

    Args:
        per_example_loss: shape ``(replica_batch, ...)``; it may be empty. PyTorch tensors, JAX arrays, traced ones too, and
            autograd's boxes stay what they are, so that the result can be differentiated.
        sample_weight: weights that broadcast against it.
        global_batch_size: examples of all replicas together. None counts them, which in a step is a collective that all
            replicas take part in, and right for shares of unequal length.

    Returns:
        A NumPy number, or a scalar of the library of the losses: the (weighted) sum divided by the global batch size; 0 for
        an empty share. NumPy's float16 and bfloat16 are added up in float32; integers give float64.

    Raises:
        ValueError: a scalar loss, or a batch size that is not above 0.
    """
    loss = per_example_loss
    if not (hasattr(loss, "ndim") and hasattr(loss, "sum")):
        loss = as_array(loss, "compute_average_loss")
    if loss.ndim == 0:
        raise ValueError(
            "compute_average_loss: got a scalar; need one loss for each example, shape (replica_batch, ...)"
        )
    if global_batch_size is None:
        replica = current_replica()
        local = np.array(len(loss))
        total = local if replica is None else replica.communicator.all_reduce(local, name="global_batch_size")
        global_batch_size = int(total) or 1
    elif not global_batch_size > 0:
        raise ValueError(
            f"compute_average_loss: got global_batch_size={global_batch_size}; need a number above 0"
        )
    wide = _widened(loss)
    if sample_weight is not None:
        weight: Any = sample_weight
        if isinstance(wide, np.ndarray):
            weight = np.asarray(weight, wide.dtype)
        elif is_scalar(weight):
            weight = np.asarray(weight)[()]
        elif not hasattr(weight, "reshape") or isinstance(weight, np.ndarray):
            weight = array_like(as_array(weight, "compute_average_loss"), loss)
        wide = wide * (
            weight.reshape(weight.shape + (1,) * (wide.ndim - weight.ndim)) if weight.ndim else weight
        )
    return _narrowed(wide.sum() / global_batch_size, loss)


def scale_regularization_loss(regularization_loss: Any) -> Any:
    """This replica's part of a loss that is the same on all replicas, such as a penalty on the weights.

    Summed over the replicas, as `compute_average_loss` is, it counts once and not once for each replica.

    Args:
        regularization_loss: a number, or an array of losses of any shape, which are added up; as in `compute_average_loss`,
            arrays of other libraries stay what they are.

    Returns:
        A NumPy number, or a scalar of the library of the losses: the sum divided by the number of replicas; outside of any
        strategy the sum.

    Raises:
        ReplicaContextError: called across replicas, where no part is any replica's.
    """
    loss = regularization_loss
    if not (hasattr(loss, "ndim") and hasattr(loss, "sum")):
        loss = as_array(loss, "scale_regularization_loss")
    if isinstance(current.get(), CrossReplicaContext):
        raise ReplicaContextError(
            "scale_regularization_loss: called across replicas; it gives a replica's part — call it in the step"
        )
    replica = current_replica()
    parts = 1 if replica is None else replica.num_replicas_in_sync
    return _narrowed(_widened(loss).sum() / parts, loss)


def _widened(loss: Any) -> Any:
    """In a dtype that sums and weights fit into; what is not NumPy's as it is, with its library's rules."""
    if not isinstance(loss, np.ndarray):
        return loss
    if is_narrow_float(loss.dtype):
        return loss.astype(np.float32)
    return loss.astype(np.float64) if loss.dtype.kind in "biu" else loss


def _narrowed(result: Any, loss: Any) -> Any:
    return (
        result.astype(loss.dtype) if isinstance(loss, np.ndarray) and is_narrow_float(loss.dtype) else result
    )
