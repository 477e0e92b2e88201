"""Losses of a batch that is spread over replicas."""

from __future__ import annotations

from typing import Any

import numpy as np

from collectives.arrays import as_array
from variables.replica_context import current_replica


def compute_average_loss(
    per_example_loss: Any, sample_weight: Any = None, global_batch_size: int | None = None
) -> Any:
    """This replica's part of the mean loss over the global batch.

    Summed over the replicas it is that mean: combine it with ``strategy.reduce("SUM", ...)``, not with MEAN, which would
    divide by the number of replicas once more.

    Args:
        per_example_loss: shape ``(replica_batch, ...)``; it may be empty.
        sample_weight: weights that broadcast against it.
        global_batch_size: examples of all replicas together. None counts them, which in a step is a collective that all
            replicas take part in, and right for shares of unequal length.

    Returns:
        A NumPy number: the (weighted) sum divided by the global batch size; 0 for an empty share.

    Raises:
        ValueError: a scalar loss, or a batch size that is not above 0.
    """
    loss = as_array(per_example_loss, "compute_average_loss")
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
    if sample_weight is not None:
        weight = np.asarray(sample_weight, loss.dtype)
        loss = loss * (
            weight.reshape(weight.shape + (1,) * (loss.ndim - weight.ndim)) if weight.ndim else weight
        )
    return np.sum(loss) / global_batch_size
