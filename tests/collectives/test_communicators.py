"""The contract of `Communicator`: every backend passes every test here."""

from __future__ import annotations

import mmap
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest

from collectives import Communicator, ReduceOp

OnEveryRank = Callable[[Callable[[Communicator], Any]], list[Any]]


def of_rank(rank: int, shape: tuple[int, ...] = (2, 3)) -> np.ndarray[Any, Any]:
    """Different on every rank and in every element."""
    return 100.0 * (rank + 1) + np.arange(float(np.prod(shape))).reshape(shape)


def of_all(world_size: int, shape: tuple[int, ...] = (2, 3)) -> np.ndarray[Any, Any]:
    """All ranks' arrays, by rank."""
    return np.stack([of_rank(rank, shape) for rank in range(world_size)])


every_op = pytest.mark.parametrize(
    ("op", "fold"),
    [
        (ReduceOp.SUM, np.sum),
        (ReduceOp.MEAN, np.mean),
        (ReduceOp.MAX, np.max),
        (ReduceOp.MIN, np.min),
        (ReduceOp.PROD, np.prod),
    ],
    ids=lambda value: getattr(value, "name", ""),
)


def test_ranks_are_numbered_from_0(on_every_rank: OnEveryRank) -> None:
    told = on_every_rank(lambda communicator: (communicator.rank, communicator.world_size))
    assert told == [(rank, len(told)) for rank in range(len(told))]


# ------------------------------------------------------------------------------------- reductions


@every_op
def test_all_reduce_gives_every_rank_the_reduction(
    on_every_rank: OnEveryRank, op: ReduceOp, fold: Callable[..., Any]
) -> None:
    def body(communicator: Communicator) -> None:
        result = communicator.all_reduce(of_rank(communicator.rank), op)
        np.testing.assert_allclose(result, fold(of_all(communicator.world_size), axis=0), rtol=1e-15)

    on_every_rank(body)


def test_a_reduction_may_be_told_by_its_name(on_every_rank: OnEveryRank) -> None:
    def body(communicator: Communicator) -> None:
        for name in ("SUM", "sum", "Sum"):
            assert communicator.all_reduce(np.ones(()), name) == communicator.world_size

    on_every_rank(body)


def test_all_reduce_leaves_its_argument_alone(on_every_rank: OnEveryRank) -> None:
    def body(communicator: Communicator) -> None:
        array = of_rank(communicator.rank)
        result = communicator.all_reduce(array)
        np.testing.assert_array_equal(array, of_rank(communicator.rank))
        assert not np.shares_memory(array, result)

    on_every_rank(body)


def test_each_rank_has_a_result_of_its_own(on_every_rank: OnEveryRank) -> None:
    def body(communicator: Communicator) -> None:
        result = communicator.all_reduce(np.ones(3))
        communicator.barrier()
        result += communicator.rank
        communicator.barrier()
        np.testing.assert_array_equal(result, np.full(3, communicator.world_size + communicator.rank))

    on_every_rank(body)


def test_all_reduce_into_out_returns_out(on_every_rank: OnEveryRank) -> None:
    def body(communicator: Communicator) -> None:
        out = np.full((2, 3), np.nan)
        assert communicator.all_reduce(of_rank(communicator.rank), out=out) is out
        np.testing.assert_array_equal(out, of_all(communicator.world_size).sum(0))

    on_every_rank(body)


@every_op
def test_all_reduce_works_in_place(
    on_every_rank: OnEveryRank, op: ReduceOp, fold: Callable[..., Any]
) -> None:
    def body(communicator: Communicator) -> None:
        array = of_rank(communicator.rank)
        assert communicator.all_reduce(array, op, out=array) is array
        np.testing.assert_allclose(array, fold(of_all(communicator.world_size), axis=0), rtol=1e-15)

    on_every_rank(body)


def test_some_ranks_may_reduce_in_place_and_others_not(on_every_rank: OnEveryRank) -> None:
    def body(communicator: Communicator) -> None:
        for in_place in range(communicator.world_size):
            array = of_rank(communicator.rank)
            out = array if communicator.rank == in_place else None
            result = communicator.all_reduce(array, out=out)
            np.testing.assert_array_equal(result, of_all(communicator.world_size).sum(0))

    on_every_rank(body)


def test_in_place_works_through_another_view_of_the_same_memory(on_every_rank: OnEveryRank) -> None:
    def body(communicator: Communicator) -> None:
        array = of_rank(communicator.rank)
        communicator.all_reduce(array, out=array.view())
        np.testing.assert_array_equal(array, of_all(communicator.world_size).sum(0))

    on_every_rank(body)


def test_coalesced_arrays_come_back_in_order_each_in_its_dtype_and_shape(on_every_rank: OnEveryRank) -> None:
    def body(communicator: Communicator) -> None:
        size, rank = communicator.world_size, communicator.rank
        arrays = [
            of_rank(rank),
            np.full((), rank, np.int32),
            np.full((4, 0), rank, np.float32),
            np.array([rank == 0]),
        ]
        results = communicator.all_reduce_coalesced(arrays)
        assert [r.shape for r in results] == [(2, 3), (), (4, 0), (1,)]
        assert [r.dtype for r in results] == [np.float64, np.int32, np.float32, np.int64]
        np.testing.assert_array_equal(results[0], of_all(size).sum(0))
        assert results[1] == size * (size - 1) // 2
        assert results[3] == 1

    on_every_rank(body)


def test_coalescing_no_arrays_gives_none(on_every_rank: OnEveryRank) -> None:
    assert all(result == [] for result in on_every_rank(lambda end: end.all_reduce_coalesced([])))


def test_coalesced_arrays_reduce_in_place(on_every_rank: OnEveryRank) -> None:
    def body(communicator: Communicator) -> None:
        arrays = [of_rank(communicator.rank), of_rank(communicator.rank, (5,)).astype(np.float32)]
        results = communicator.all_reduce_coalesced(arrays, "MEAN", outs=arrays)
        assert all(result is array for result, array in zip(results, arrays, strict=True))
        np.testing.assert_allclose(arrays[0], of_all(communicator.world_size).mean(0))
        np.testing.assert_allclose(arrays[1], of_all(communicator.world_size, (5,)).mean(0), rtol=1e-6)

    on_every_rank(body)


@every_op
def test_reduce_gives_the_root_alone_the_reduction(
    on_every_rank: OnEveryRank, op: ReduceOp, fold: Callable[..., Any]
) -> None:
    def body(communicator: Communicator) -> None:
        for root in range(communicator.world_size):
            result = communicator.reduce(of_rank(communicator.rank), op, root)
            if communicator.rank == root:
                assert result is not None
                np.testing.assert_allclose(result, fold(of_all(communicator.world_size), axis=0), rtol=1e-15)
            else:
                assert result is None

    on_every_rank(body)


def test_reduce_works_in_place_on_any_root(on_every_rank: OnEveryRank) -> None:
    def body(communicator: Communicator) -> None:
        for root in range(communicator.world_size):
            array = of_rank(communicator.rank)
            result = communicator.reduce(array, root=root, out=array)
            mine = (
                of_all(communicator.world_size).sum(0)
                if communicator.rank == root
                else of_rank(communicator.rank)
            )
            np.testing.assert_array_equal(array, mine)
            assert result is (array if communicator.rank == root else None)

    on_every_rank(body)


@every_op
def test_reduce_scatter_gives_each_rank_its_block(
    on_every_rank: OnEveryRank, op: ReduceOp, fold: Callable[..., Any]
) -> None:
    def body(communicator: Communicator) -> None:
        size, rank = communicator.world_size, communicator.rank
        shape = (2 * size, 3)
        expected = fold(of_all(size, shape), axis=0)[2 * rank : 2 * rank + 2]
        np.testing.assert_allclose(
            communicator.reduce_scatter(of_rank(rank, shape), op), expected, rtol=1e-15
        )
        out = np.full((3, 2), np.nan).T  # not contiguous
        assert communicator.reduce_scatter(of_rank(rank, shape), op, out=out) is out
        np.testing.assert_allclose(out, expected, rtol=1e-15)

    on_every_rank(body)


def test_reduce_scatter_of_nothing_gives_nothing(on_every_rank: OnEveryRank) -> None:
    def body(communicator: Communicator) -> None:
        assert communicator.reduce_scatter(np.empty((0, 4))).shape == (0, 4)
        assert communicator.reduce_scatter(np.empty((communicator.world_size, 0))).shape == (1, 0)

    on_every_rank(body)


# ----------------------------------------------------------------------------------------- copies


def test_broadcast_gives_every_rank_the_roots_array(on_every_rank: OnEveryRank) -> None:
    def body(communicator: Communicator) -> None:
        for root in range(communicator.world_size):
            array = of_rank(communicator.rank)
            result = communicator.broadcast(array, root)
            np.testing.assert_array_equal(result, of_rank(root))
            np.testing.assert_array_equal(array, of_rank(communicator.rank))
            assert not np.shares_memory(array, result)

    on_every_rank(body)


def test_broadcast_works_in_place(on_every_rank: OnEveryRank) -> None:
    def body(communicator: Communicator) -> None:
        root = communicator.world_size - 1
        array = of_rank(communicator.rank)
        assert communicator.broadcast(array, root, out=array) is array
        np.testing.assert_array_equal(array, of_rank(root))

    on_every_rank(body)


@pytest.mark.parametrize("axis", [0, 1, -1, -2])
def test_all_gather_joins_along_the_axis_by_rank(on_every_rank: OnEveryRank, axis: int) -> None:
    def body(communicator: Communicator) -> None:
        expected = np.concatenate([of_rank(r) for r in range(communicator.world_size)], axis)
        result = communicator.all_gather(of_rank(communicator.rank), axis)
        np.testing.assert_array_equal(result, expected)
        out = np.empty_like(expected)
        assert communicator.all_gather(of_rank(communicator.rank), axis, out=out) is out
        np.testing.assert_array_equal(out, expected)

    on_every_rank(body)


def test_all_gather_joins_arrays_of_different_lengths_also_empty_ones(on_every_rank: OnEveryRank) -> None:
    def body(communicator: Communicator) -> None:
        expected = np.concatenate([of_rank(r, (2, r)) for r in range(communicator.world_size)], 1)
        np.testing.assert_array_equal(
            communicator.all_gather(of_rank(communicator.rank, (2, communicator.rank)), 1), expected
        )

    on_every_rank(body)


def test_all_to_all_gives_rank_r_the_rth_block_of_everybody(on_every_rank: OnEveryRank) -> None:
    def body(communicator: Communicator) -> None:
        size, rank = communicator.world_size, communicator.rank
        shape = (2 * size, 3)
        expected = np.concatenate([of_rank(peer, shape)[2 * rank : 2 * rank + 2] for peer in range(size)])
        np.testing.assert_array_equal(communicator.all_to_all(of_rank(rank, shape)), expected)
        out = np.empty((3, 2 * size)).T
        assert communicator.all_to_all(of_rank(rank, shape), out=out) is out
        np.testing.assert_array_equal(out, expected)

    on_every_rank(body)


def test_all_to_all_twice_is_where_it_began(on_every_rank: OnEveryRank) -> None:
    def body(communicator: Communicator) -> None:
        array = of_rank(communicator.rank, (3 * communicator.world_size,))
        np.testing.assert_array_equal(communicator.all_to_all(communicator.all_to_all(array)), array)

    on_every_rank(body)


def test_copies_work_for_every_memory_layout(on_every_rank: OnEveryRank) -> None:
    def body(communicator: Communicator) -> None:
        size, rank = communicator.world_size, communicator.rank
        for layout in (np.asfortranarray, lambda a: np.repeat(a, 2, 0)[::2], lambda a: a[::-1].copy()[::-1]):
            mine = layout(of_rank(rank, (size, 3)))
            mine.flags.writeable = False
            np.testing.assert_array_equal(communicator.broadcast(mine), of_rank(0, (size, 3)))
            np.testing.assert_array_equal(
                communicator.all_gather(mine), of_all(size, (size, 3)).reshape(-1, 3)
            )
            np.testing.assert_array_equal(communicator.all_to_all(mine), of_all(size, (size, 3))[:, rank])

    on_every_rank(body)


# ---------------------------------------------------------------------------------- point to point


def test_messages_go_round_a_ring(on_every_rank: OnEveryRank) -> None:
    def body(communicator: Communicator) -> None:
        size, rank = communicator.world_size, communicator.rank
        if size == 1:
            return
        communicator.send(of_rank(rank), (rank + 1) % size)
        np.testing.assert_array_equal(communicator.recv((rank - 1) % size), of_rank((rank - 1) % size))

    on_every_rank(body)


def test_a_sent_array_may_be_changed_at_once(on_every_rank: OnEveryRank) -> None:
    def body(communicator: Communicator) -> None:
        size, rank = communicator.world_size, communicator.rank
        if size == 1:
            return
        array = of_rank(rank)
        communicator.send(array, (rank + 1) % size)
        array[...] = -1
        communicator.barrier()
        np.testing.assert_array_equal(communicator.recv((rank - 1) % size), of_rank((rank - 1) % size))

    on_every_rank(body)


def test_messages_of_one_tag_come_in_order_and_tags_keep_them_apart(on_every_rank: OnEveryRank) -> None:
    def body(communicator: Communicator) -> None:
        if communicator.world_size == 1:
            return
        if communicator.rank == 0:
            for value, tag in ((1, 7), (2, 8), (3, 7), (4, 8)):
                communicator.send(np.array(value), 1, tag)
        if communicator.rank == 1:
            received = [int(communicator.recv(0, tag)) for tag in (8, 8, 7, 7)]
            assert received == [2, 4, 1, 3]

    on_every_rank(body)


def test_recv_into_out_returns_out_and_refuses_one_that_does_not_fit(on_every_rank: OnEveryRank) -> None:
    def body(communicator: Communicator) -> None:
        if communicator.world_size == 1:
            return
        if communicator.rank == 0:
            communicator.send(np.arange(3.0), 1)
            communicator.send(np.arange(3.0), 1)
        if communicator.rank == 1:
            out = np.empty(3)
            assert communicator.recv(0, out=out) is out
            np.testing.assert_array_equal(out, [0, 1, 2])
            with pytest.raises(
                ValueError, match=r"recv: got out=float64 of shape \(4,\); need float64 of shape \(3,\)"
            ):
                communicator.recv(0, out=np.empty(4))

    on_every_rank(body)


# ------------------------------------------------------------------------------------------ others


def test_no_rank_passes_a_barrier_before_all_have_come(on_every_rank: OnEveryRank) -> None:
    came = np.frombuffer(mmap.mmap(-1, 8 * 64), np.int64)  # for ranks in processes of their own, too

    def body(communicator: Communicator) -> None:
        for turn in range(1, 20):
            came[communicator.rank] = turn
            communicator.barrier()
            assert (came[: communicator.world_size] >= turn).all()

    on_every_rank(body)


def test_all_gather_object_gives_every_rank_a_list_of_its_own(on_every_rank: OnEveryRank) -> None:
    def body(communicator: Communicator) -> None:
        gathered = communicator.all_gather_object({"rank": communicator.rank})
        assert gathered == [{"rank": rank} for rank in range(communicator.world_size)]
        gathered.clear()
        communicator.barrier()
        assert gathered == []

    on_every_rank(body)


def test_many_collectives_in_a_row_keep_apart(on_every_rank: OnEveryRank) -> None:
    def body(communicator: Communicator) -> None:
        size, rank = communicator.world_size, communicator.rank
        for turn in range(50):
            total = communicator.all_reduce(np.array([turn * rank]))
            assert total[0] == turn * size * (size - 1) // 2
            gathered = communicator.all_gather(np.array([rank + turn]))
            assert gathered.tolist() == [r + turn for r in range(size)]
            assert communicator.broadcast(np.array(rank), turn % size) == turn % size

    on_every_rank(body)


# ----------------------------------------------------------------------------------- wrong arguments
# They are refused at the call, before anybody waits: the group stays whole, as its last line shows.


def refuses(communicator: Communicator, error: type[Exception], words: str, call: Callable[[], Any]) -> None:
    with pytest.raises(error, match=words):
        call()
    assert communicator.all_reduce(np.ones(())) == communicator.world_size


def test_an_unknown_reduction_is_refused_with_the_known_ones(on_every_rank: OnEveryRank) -> None:
    words = "reduce_op: got 'MEDIAN'; need one of SUM, MEAN, MAX, MIN, PROD"
    on_every_rank(lambda end: refuses(end, ValueError, words, lambda: end.all_reduce(np.ones(2), "MEDIAN")))


def test_out_of_another_shape_is_refused(on_every_rank: OnEveryRank) -> None:
    words = r"all_reduce: got out=float64 of shape \(3,\); need float64 of shape \(2,\)"
    on_every_rank(
        lambda end: refuses(end, ValueError, words, lambda: end.all_reduce(np.ones(2), out=np.ones(3)))
    )


def test_out_of_another_dtype_is_refused(on_every_rank: OnEveryRank) -> None:
    words = r"all_reduce: got out=float32 of shape \(2,\); SUM of float64 gives float64"
    on_every_rank(
        lambda end: refuses(
            end, TypeError, words, lambda: end.all_reduce(np.ones(2), out=np.ones(2, np.float32))
        )
    )


def test_a_read_only_out_is_refused_also_in_place(on_every_rank: OnEveryRank) -> None:
    fixed = np.ones(2)
    fixed.flags.writeable = False

    def body(communicator: Communicator) -> None:
        for array in (np.ones(2), fixed):
            refuses(
                communicator,
                ValueError,
                "read-only",
                partial(communicator.all_reduce, array, out=fixed),
            )
        refuses(communicator, ValueError, "read-only", lambda: communicator.broadcast(fixed, out=fixed))

    on_every_rank(body)


def test_as_many_outs_as_arrays_are_needed(on_every_rank: OnEveryRank) -> None:
    words = "got 1 outs for 2 arrays; need one each"
    on_every_rank(
        lambda end: refuses(
            end,
            ValueError,
            words,
            lambda: end.all_reduce_coalesced([np.ones(1), np.ones(1)], outs=[np.ones(1)]),
        )
    )


def test_an_array_that_is_to_hold_two_results_is_refused(on_every_rank: OnEveryRank) -> None:
    def body(end: Communicator) -> None:
        out = np.zeros(2)
        refuses(
            end,
            ValueError,
            "got the same array twice in outs; need one each",
            lambda: end.all_reduce_coalesced([np.ones(2), np.zeros(2)], outs=[out, out]),
        )

    on_every_rank(body)


def test_coalesced_arrays_and_outs_may_come_from_generators(on_every_rank: OnEveryRank) -> None:
    def body(end: Communicator) -> None:
        results = end.all_reduce_coalesced(np.full(2, n) for n in (1.0, 2.0))  # type: ignore[arg-type]  # as a user may
        np.testing.assert_array_equal(results, [[end.world_size] * 2, [2.0 * end.world_size] * 2])
        rooms = [np.empty(2), np.empty(2)]
        arrays = (np.full(2, n) for n in (1.0, 2.0))
        given = end.all_reduce_coalesced(arrays, outs=(room for room in rooms))  # type: ignore[arg-type]  # as a user may
        assert all(one is room for one, room in zip(given, rooms, strict=True))
        np.testing.assert_array_equal(rooms, results)

    on_every_rank(body)


def test_a_name_or_a_like_that_is_none_is_refused(on_every_rank: OnEveryRank) -> None:
    def body(end: Communicator) -> None:
        name: Any = 3
        refuses(end, TypeError, "got name=3; need a str", lambda: end.all_reduce(np.ones(1), name=name))
        for like in ("torch", 3, float, np.ndarray):
            with pytest.raises(TypeError, match="need an array of the library"):
                end.all_reduce(np.ones(1), like=like)

    on_every_rank(body)


@pytest.mark.parametrize("root", [-1, 8])
def test_a_root_that_is_no_rank_is_refused(on_every_rank: OnEveryRank, root: int) -> None:
    def body(communicator: Communicator) -> None:
        words = f"root: got {root}; need a rank from 0 to {communicator.world_size - 1}"
        refuses(
            communicator, ValueError, f"reduce: {words}", lambda: communicator.reduce(np.ones(1), root=root)
        )
        refuses(
            communicator, ValueError, f"broadcast: {words}", lambda: communicator.broadcast(np.ones(1), root)
        )

    on_every_rank(body)


def test_a_peer_that_is_no_other_rank_is_refused(on_every_rank: OnEveryRank) -> None:
    def body(communicator: Communicator) -> None:
        rank, size = communicator.rank, communicator.world_size
        refuses(
            communicator,
            ValueError,
            f"send: got this rank itself, {rank}",
            lambda: communicator.send(np.ones(1), rank),
        )
        refuses(communicator, ValueError, f"recv: peer: got {size}", lambda: communicator.recv(size))

    on_every_rank(body)


def test_the_first_axis_has_to_split_evenly_and_the_length_that_would_is_named(
    on_every_rank: OnEveryRank,
) -> None:
    def body(communicator: Communicator) -> None:
        size = communicator.world_size
        if size > 1:
            words = f"does not split over {size} ranks; pad the first axis to {2 * size}"
            array = np.ones(size + 1)
            refuses(
                communicator,
                ValueError,
                f"reduce_scatter: .*{words}",
                lambda: communicator.reduce_scatter(array),
            )
            refuses(
                communicator, ValueError, f"all_to_all: .*{words}", lambda: communicator.all_to_all(array)
            )
        refuses(communicator, ValueError, "got a scalar", lambda: communicator.all_to_all(np.ones(())))
        refuses(communicator, ValueError, "got a scalar", lambda: communicator.reduce_scatter(np.ones(())))

    on_every_rank(body)


def test_all_gather_refuses_scalars_and_axes_that_are_not_there(on_every_rank: OnEveryRank) -> None:
    def body(communicator: Communicator) -> None:
        refuses(
            communicator, ValueError, "all_gather: got a scalar", lambda: communicator.all_gather(np.ones(()))
        )
        for axis in (2, -3):
            words = rf"all_gather: got axis {axis} of float64 of shape \(1, 1\); need one from 0 to 1"
            refuses(
                communicator,
                ValueError,
                words,
                partial(communicator.all_gather, np.ones((1, 1)), axis),
            )

    on_every_rank(body)


@pytest.mark.parametrize(
    ("array", "words"),
    [
        (np.array(["a"]), "dtype <U1; need booleans"),
        (np.array([b"a"]), r"dtype \|S1; need booleans"),
        (np.array([object()]), "dtype object; need booleans"),
        (np.array(["2020-01-01"], "datetime64[D]"), r"dtype datetime64\[D\]"),
        (np.array([1], "timedelta64[s]"), r"dtype timedelta64\[s\]"),
        (np.zeros(2, [("weight", "f4"), ("count", "i8")]), "pass the fields one by one"),
    ],
    ids=["str", "bytes", "object", "datetime", "timedelta", "record"],
)
def test_what_cannot_be_added_up_is_refused_by_name(
    on_every_rank: OnEveryRank, array: np.ndarray[Any, Any], words: str
) -> None:
    def body(communicator: Communicator) -> None:
        for call in (communicator.all_reduce, communicator.reduce, communicator.reduce_scatter):
            refuses(communicator, TypeError, f"{call.__name__}: got array of .*{words}", partial(call, array))

    on_every_rank(body)


@pytest.mark.parametrize("op", [ReduceOp.MAX, ReduceOp.MIN])
def test_complex_numbers_have_no_maximum(on_every_rank: OnEveryRank, op: ReduceOp) -> None:
    words = f"got complex64, and {op.name} needs an order"
    on_every_rank(
        lambda end: refuses(end, TypeError, words, lambda: end.all_reduce(np.ones(2, np.complex64), op))
    )


@pytest.mark.parametrize("call", ["broadcast", "all_gather", "all_to_all", "send"])
@pytest.mark.parametrize("of", ["objects", "strings of any length"])
def test_copies_of_objects_are_refused_and_nobody_waits(
    on_every_rank: OnEveryRank, call: str, of: str
) -> None:
    def work(communicator: Communicator) -> None:
        values = ["a"] * communicator.world_size
        array = np.array(values, object if of == "objects" else np.dtypes.StringDType())
        arguments = [(communicator.rank + 1) % communicator.world_size] if call == "send" else []
        if call == "send" and communicator.world_size == 1:
            return  # there is nobody to send to
        refuses(
            communicator,
            TypeError,
            f"{call}: got an array of dtype",
            lambda: getattr(communicator, call)(array, *arguments),
        )

    on_every_rank(work)


def test_copies_take_dates_text_and_records(on_every_rank: OnEveryRank) -> None:
    arrays = [
        np.array(["2026-11-30", "NaT"], "datetime64[D]"),
        np.array(["loss", "accuracy"]),
        np.array([(1, 2.5), (3, 4.5)], [("step", "i4"), ("loss", "f8")]),
    ]

    def work(communicator: Communicator) -> None:
        for array in arrays:
            np.testing.assert_array_equal(communicator.broadcast(array), array)
            np.testing.assert_array_equal(
                communicator.all_gather(array), np.concatenate([array] * communicator.world_size)
            )

    on_every_rank(work)
