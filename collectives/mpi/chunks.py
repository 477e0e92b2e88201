"""Cutting what is too long for one message of MPI, whose counts have 32 bits."""

from __future__ import annotations

LARGEST_COUNT = 2**31 - 1
"""Elements of one message: MPI counts them in a C int until version 4, which not every MPI has."""
MESSAGE_BYTES = 256 << 20
"""Of one message, so that on a slow network too something arrives now and then: whoever waits sees that the other one lives."""


def plan_chunks(nelem: int, limit: int = LARGEST_COUNT) -> list[tuple[int, int]]:
    """Where each of as few chunks as possible starts, and how long it is, in order; none for nothing.

    Args:
        nelem: how many elements there are.
        limit: how many a chunk may have.

    Raises:
        ValueError: fewer than no elements, or chunks that can't have any.
    """
    if nelem < 0 or limit < 1:
        raise ValueError(f"plan_chunks: got nelem={nelem}, limit={limit}; need at least 0 and 1")
    return [(start, min(limit, nelem - start)) for start in range(0, nelem, limit)]
