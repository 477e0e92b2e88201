"""What `CheckedCommunicator` finds that its inner communicator may not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from collectives import CheckedCommunicator, CollectiveMismatchError, Communicator, InProcessCommunicator


def checked(size: int) -> list[Communicator]:
    return [CheckedCommunicator(end) for end in InProcessCommunicator.group(size, 10)]


DIFFERENT: dict[str, tuple[Callable[[Communicator], Any], str]] = {
    "shape": (lambda end: end.all_reduce(np.ones(3 if end.rank == 2 else 2)), r"all_reduce SUM of float64 of shape \(3,\)"),
    "dtype": (lambda end: end.all_reduce(np.ones(2, "f4" if end.rank == 2 else "f8")), "all_reduce SUM of float32"),
    "op": (lambda end: end.all_reduce(np.ones(2), "MAX" if end.rank == 2 else "SUM"), "all_reduce MAX of"),
    "name": (lambda end: end.all_reduce(np.ones(2), name=f"{end.rank == 2}"), "all_reduce 'True' SUM of"),
    "root": (lambda end: end.reduce(np.ones(2), root=end.rank // 2), r"reduce SUM of float64 of shape \(2,\) to 1"),
    "copied root": (lambda end: end.broadcast(np.ones(2), root=end.rank // 2), r"broadcast of .* from 1"),
    "kind": (lambda end: end.barrier() if end.rank == 2 else end.all_gather(np.ones(2)), "barrier"),
    "gathered": (lambda end: end.all_gather(np.ones((1, 2 + end.rank // 2))), r"all_gather of .*\('...', 3\)"),
    "scattered": (lambda end: end.reduce_scatter(np.ones(4 + 4 * (end.rank // 2))), r"reduce_scatter SUM of .*\(8,\)"),
    "exchanged": (lambda end: end.all_to_all(np.ones(4 + 4 * (end.rank // 2))), r"all_to_all of .*\(8,\)"),
    "objects": (lambda end: end.all_gather_object(1) if end.rank == 2 else end.barrier(), "all_gather_object"),
}  # fmt: skip


@pytest.mark.parametrize(("call", "words"), DIFFERENT.values(), ids=DIFFERENT)
def test_the_rank_that_disagrees_is_named_on_every_rank(
    on_threads: Callable[..., list[Any]], call: Callable[[Communicator], Any], words: str
) -> None:
    def body(communicator: Communicator) -> tuple[str | None, ...]:
        with pytest.raises(
            CollectiveMismatchError, match=f"^rank 2 calls {words}.*, rank 0 calls "
        ) as failure:
            call(communicator)
        return failure.value.calls

    calls = on_threads(checked(4), body)
    # Of four ranks the third is the odd one, and the fourth where it follows from halving the rank.
    assert all(each == calls[0] for each in calls)
    assert len(calls[0]) == 4


def test_the_group_is_whole_after_a_mismatch_as_no_data_has_moved(
    on_threads: Callable[..., list[Any]],
) -> None:
    def body(communicator: Communicator) -> float:
        for _ in range(3):
            with pytest.raises(CollectiveMismatchError):
                communicator.all_reduce(np.ones(1 + communicator.rank))
        return float(communicator.all_reduce(np.ones(())))

    assert on_threads(checked(3), body) == [3, 3, 3]


def test_lengths_of_gathered_arrays_may_differ(on_threads: Callable[..., list[Any]]) -> None:
    results = on_threads(
        checked(3), lambda end: end.all_gather(np.full((2, end.rank), end.rank), axis=1).tolist()
    )
    assert results == [[[1, 2, 2], [1, 2, 2]]] * 3


def test_it_can_be_wrapped_again(on_threads: Callable[..., list[Any]]) -> None:
    twice = [CheckedCommunicator(end) for end in checked(2)]
    assert on_threads(twice, lambda end: float(end.all_reduce(np.ones(())))) == [2, 2]
