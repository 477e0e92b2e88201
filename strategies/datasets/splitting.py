"""How many rows of a global batch each replica gets.

Pure arithmetic. Sizes are as even as possible, and the first replicas get the one more.
"""

from __future__ import annotations

import itertools
from functools import lru_cache

import numpy as np
import numpy.typing as npt


@lru_cache(maxsize=1024)
def share_bounds(num_rows: int, num_shares: int, rotation: int = 0) -> tuple[int, ...]:
    """Where the shares of a batch begin and end: share i is ``rows[bounds[i]:bounds[i + 1]]``.

    Args:
        num_rows: rows of this batch, which may be fewer than the shares.
        num_shares: replicas of all workers.
        rotation: how many of the sizes come last instead of first.

    Returns:
        ``num_shares + 1`` bounds, from 0 to ``num_rows``.
    """
    return (0, *itertools.accumulate(share_sizes(num_rows, num_shares, rotation)))


def share_sizes(num_rows: int, num_shares: int, rotation: int = 0) -> tuple[int, ...]:
    """The rows of each share: they differ by at most one, and but for a rotation the larger ones are first."""
    size, rest = divmod(num_rows, num_shares)
    return tuple(size + ((share + rotation) % num_shares < rest) for share in range(num_shares))


def split_sizes(
    global_batch: int, num_workers: int, replicas_per_worker: int, worker: int
) -> npt.NDArray[np.int64]:
    """The shares into which a worker that sees all of the data cuts a global batch, in its own order.

    Every worker starts with the sizes of its own replicas' shares, so that in each step the workers together
    work through as many rows as a global batch has.

    Args:
        global_batch: rows.
        num_workers: workers, each with as many replicas as the others.
        replicas_per_worker: replicas of one worker.
        worker: which worker, in ``range(num_workers)``.

    Returns:
        Rows, shape ``(num_workers * replicas_per_worker,)``.

    Raises:
        ValueError: a count that is no count, or a worker that does not exist.
    """
    if global_batch < 0 or num_workers < 1 or replicas_per_worker < 1 or not 0 <= worker < num_workers:
        raise ValueError(
            f"split_sizes: got a batch of {global_batch} for worker {worker} of {num_workers}, each with "
            f"{replicas_per_worker} replicas; need a batch >= 0, counts >= 1 and a worker below {num_workers}"
        )
    num_shares = num_workers * replicas_per_worker
    return np.array(share_sizes(global_batch, num_shares, worker * replicas_per_worker), np.int64)
