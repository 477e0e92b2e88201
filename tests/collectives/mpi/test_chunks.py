"""Messages of MPI hold 2 ** 31 - 1 elements at most."""

from __future__ import annotations

import pytest

from collectives.mpi.chunks import plan_chunks


def test_what_is_too_long_for_one_message_is_cut() -> None:
    # https://github.com/NVIDIA-Merlin/HugeCTR/issues/382, https://github.com/NVIDIA/recsys-examples/issues/72
    assert plan_chunks(2**31 + 5, 2**31 - 1) == [(0, 2147483647), (2147483647, 6)]


def test_what_fits_is_not() -> None:
    assert plan_chunks(2**31 - 1) == [(0, 2**31 - 1)]
    assert plan_chunks(1, 1) == [(0, 1)]
    assert plan_chunks(6, 3) == [(0, 3), (3, 3)]


def test_nothing_needs_no_message() -> None:
    assert plan_chunks(0) == []


@pytest.mark.parametrize(("nelem", "limit"), [(-1, 5), (5, 0), (5, -1)])
def test_impossible_sizes_are_refused(nelem: int, limit: int) -> None:
    with pytest.raises(ValueError, match=f"got nelem={nelem}, limit={limit}; need at least 0 and 1"):
        plan_chunks(nelem, limit)
