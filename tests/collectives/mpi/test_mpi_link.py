"""Processes under mpiexec, each with its end of a link: every function without ``test`` in its name runs in all of them."""

from __future__ import annotations

import re
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from collectives import CollectiveError, CollectiveMismatchError, CollectiveTimeoutError, ReduceOp
from collectives.arrays import Array
from collectives.calls import Call
from collectives.control.channel import Channel
from collectives.hierarchical import HierarchicalCommunicator
from collectives.mpi.library import world
from collectives.mpi.mpi_link import MpiLink
from tests.mpi_runner import finish_ranks, run_ranks
from xpdistribute.hub import Hub

SMALL_PIECES = {"piece_bytes": 1000, "largest_message": 777}
"""So that small arrays are cut as large ones are."""
IN_ROUNDS = {"direct_up_to": 1}
"""So that few processes meet as many do."""


def link(counts: Sequence[int] | None = None, timeout: float = 20.0, **options: Any) -> MpiLink:
    comm = world()
    return MpiLink(comm, counts or [1] * comm.size, timeout=timeout, **options)


def raised(kind: type[BaseException], call: Callable[[], object]) -> BaseException:
    try:
        call()
    except kind as error:
        return error
    raise AssertionError(f"{kind.__name__} was not raised")


# ------------------------------------------------------------------------------------------- numbers

DTYPES = ["f2", "f4", "f8", "c8", "c16", "?", "i1", "u1", "i2", "i4", "i8", "u8", ml_dtypes.bfloat16]


def left_fold(rows: Array, op: ReduceOp) -> Array:
    """In plain NumPy: member 0 first, in what DESIGN says it is accumulated in."""
    dtype = rows.dtype
    is_half = dtype.itemsize == 2 and dtype.kind in "fV"
    is_extreme = op in (ReduceOp.MAX, ReduceOp.MIN)
    accumulator: Any = dtype
    if not is_extreme:
        if is_half:
            accumulator = np.float32
        elif dtype.kind in "biu":
            wide = {"b": "i8", "i": "i8", "u": "u8"}[dtype.kind] if dtype.itemsize <= 2 else dtype
            accumulator = np.float64 if op is ReduceOp.MEAN else wide
    total = rows[0].astype(accumulator)
    for row in rows[1:]:
        total = op.ufunc(total, row.astype(accumulator))
    if op is ReduceOp.MEAN:
        total = total / len(rows)
    result: Array = total.astype(dtype if is_half else accumulator)
    return result


def values(dtype: Any, size: int, length: int) -> Array:
    """The same in all processes: of each member, by member."""
    rng = np.random.default_rng(length)
    dtype = np.dtype(dtype)
    if dtype.kind in "biu":
        numbers: Any = rng.integers(0, 2 if dtype.kind == "b" else 100, size=(size, length))
    else:
        numbers = 100 * rng.normal(size=(size, length))
        if dtype.kind == "c":
            numbers = numbers + 1j * rng.normal(size=(size, length))
    rows: Array = np.asarray(numbers).astype(dtype)
    return rows


def reduce_everything() -> None:
    counts = [int(count) for count in sys.argv[1].split("+")]
    end = link(counts, **eval(sys.argv[2]))
    mine = slice(end.first, end.first + counts[end.process])
    for number, dtype in enumerate(DTYPES):
        for op in ReduceOp:
            if np.dtype(dtype).kind == "c" and op in (ReduceOp.MAX, ReduceOp.MIN):
                continue
            # Three columns: nothing, little, and more than what is brought to the meeting.
            columns = [values(dtype, end.size, length) for length in (0, 5, 1001 + number)]
            expected = [left_fold(column, op) for column in columns]
            sources = [[column[member].copy() for column in columns] for member in range(end.size)[mine]]
            result = expected[0].dtype
            targets = [[np.empty(column.shape[1], result) for column in columns] for _ in sources]
            if result == np.dtype(dtype):
                targets = sources
            call = Call("fold", (op, f"{np.dtype(dtype)}"))
            end.fold(call, op, sources, targets)
            for member in targets:
                for got, want in zip(member, expected, strict=True):
                    assert got.tobytes() == want.tobytes(), (op, dtype, len(want))
            scattered = values(dtype, end.size, end.size * 300).reshape(end.size, end.size, 300)
            wanted = left_fold(scattered, op)
            blocks = [np.empty(300, result) for _ in sources]
            end.reduce_scatter(Call("scatter", (op, f"{np.dtype(dtype)}")), op, list(scattered[mine]), blocks)
            for block, want in zip(blocks, wanted[mine], strict=True):
                assert block.tobytes() == want.tobytes(), (op, dtype)


@pytest.mark.parametrize(
    ("counts", "options"),
    [("1+1", {}), ("1+1", SMALL_PIECES), ("2+1", {}), ("1+2+1", IN_ROUNDS), ("1+2+1", SMALL_PIECES)],
    ids=["two", "two_in_small_pieces", "uneven", "uneven_in_rounds", "uneven_in_small_pieces"],
)
def test_reductions_are_folds_in_the_order_of_the_members(counts: str, options: dict[str, int]) -> None:
    # https://github.com/pytorch/pytorch/issues/170073, https://github.com/horovod/horovod/issues/278: half precision over MPI
    run_ranks(1 + counts.count("+"), reduce_everything, arguments=[counts, repr(options)])


def reduce_large() -> None:
    end = link()
    for length in (200_000, 3_000_001):
        rows = values("f4", end.size, length)
        # Large ones beside ones that go together.
        sources = [rows[end.process].copy(), *(rows[end.process][:n].copy() for n in (10, 60_000, 0, 1))]
        end.fold(Call("fold", (length,)), ReduceOp.SUM, [sources], [sources])
        total = left_fold(rows, ReduceOp.SUM)
        for source in sources:
            assert source.tobytes() == total[: len(source)].tobytes()


def test_large_and_small_arrays_are_reduced_together() -> None:
    run_ranks(3, reduce_large)


def reduce_for_one() -> None:
    end = link([2, 1, 1], **eval(sys.argv[1]))
    for length in (3, 5000):
        rows = values("f4", end.size, length)
        sources = [[rows[member].copy()] for member in range(end.first, end.first + end.counts[end.process])]
        target = np.zeros(length, np.float32)
        end.fold(Call("reduce", (length,)), ReduceOp.SUM, sources, [[target]] if end.process == 1 else [])
        if end.process == 1:
            assert target.tobytes() == left_fold(rows, ReduceOp.SUM).tobytes()
        assert sources[0][0].tobytes() == rows[end.first].tobytes()


@pytest.mark.parametrize("options", [{}, SMALL_PIECES], ids=["as_it_is", "in_small_pieces"])
def test_a_result_goes_only_where_it_is_wanted(options: dict[str, int]) -> None:
    run_ranks(3, reduce_for_one, arguments=[repr(options)])


def reduce_too_much() -> None:
    end = link(**eval(sys.argv[1]))
    for length in (2, 5000):
        # Only the last element is too large, so that only one process sees it where the work is shared.
        source = np.ones(length, np.int8)
        source[-1] = 100
        error = raised(
            OverflowError,
            lambda source=source, length=length: end.fold(  # type: ignore[misc]  # bound at once
                Call("fold", (length,)), ReduceOp.SUM, [[source]], [[np.empty(length, np.int8)]]
            ),
        )
        assert "int8 from -128 to 127" in str(error)
        blocks = np.full((end.size, length), 1, np.int8)
        blocks[-1] = 100  # of the last member alone
        error = raised(
            OverflowError,
            lambda blocks=blocks, length=length: end.reduce_scatter(  # type: ignore[misc]  # bound at once
                Call("scatter", (length,)), ReduceOp.SUM, [blocks], [np.empty(length, np.int8)]
            ),
        )
        assert "int8 from -128 to 127" in str(error)
        narrow = np.ones(length, np.int8)
        end.fold(Call("again", (length,)), ReduceOp.SUM, [[narrow]], [[narrow]])
        assert (narrow == end.size).all()


@pytest.mark.parametrize("options", [{}, SMALL_PIECES], ids=["as_it_is", "in_small_pieces"])
def test_a_result_that_does_not_fit_raises_in_every_process_and_the_link_goes_on(
    options: dict[str, int],
) -> None:
    run_ranks(2, reduce_too_much, arguments=[repr(options)])


def reduce_by_names() -> None:
    communicator = HierarchicalCommunicator.alone(link())
    for dtype in ("f2", "?", "c8", "i1", "u8"):
        total = communicator.all_reduce(np.ones(3, dtype), "SUM" if dtype != "?" else "MAX")
        assert (total == (True if dtype == "?" else communicator.world_size)).all()
    error = raised(TypeError, lambda: communicator.all_reduce(np.ones(3, "c8"), "MAX"))
    assert "complex64" in str(error)
    assert "MAX" in str(error)


def test_half_precision_booleans_and_complex_numbers_are_reduced() -> None:
    # https://github.com/pytorch/pytorch/issues/170073, https://github.com/pytorch/pytorch/issues/139178
    run_ranks(2, reduce_by_names)


# -------------------------------------------------------------------------------------------- copies


def copy_everything() -> None:
    end = link([1, 2, 1, 1], **eval(sys.argv[1]))
    local = range(end.first, end.first + end.counts[end.process])
    for length in (0, 3, 300_000):
        for root in range(end.size):
            data = np.full(length, root, np.uint8)
            is_here = end.process_of(root) == end.process
            targets = [np.zeros(length, np.uint8) for _ in local]
            end.broadcast(Call("broadcast", (length, root)), root, data if is_here else None, targets)
            assert all((target == root).all() for target in targets)

        brought = [np.full(length * (member % 3), member, np.uint8) for member in range(end.size)]

        def use(found: list[Array], brought: list[Array] = brought) -> str:
            for got, want in zip(found, brought, strict=True):
                np.testing.assert_array_equal(got, want)
            return "used"

        used = end.all_gather(Call("all_gather", (length,)), [brought[member] for member in local], use)
        assert used == "used"

        blocks = np.random.default_rng(length).integers(0, 255, (end.size, end.size, length), np.uint8)
        received = [np.zeros((end.size, length), np.uint8) for _ in local]
        end.all_to_all(Call("all_to_all", (length,)), [blocks[member] for member in local], received)
        for member, got in zip(local, received, strict=True):
            np.testing.assert_array_equal(got, blocks[:, member])

        objects = end.gather_objects(Call("gather", (length,)), [("x" * length, member) for member in local])
        assert objects == [("x" * length, member) for member in range(end.size)]


@pytest.mark.parametrize(
    "options",
    [{}, {"direct_up_to": 1, "piece_bytes": 10_000, "largest_message": 7_777}],
    ids=["as_it_is", "in_rounds_and_small_pieces"],
)
def test_copies_arrive_whatever_their_size(options: dict[str, int]) -> None:
    run_ranks(4, copy_everything, arguments=[repr(options)])


# ------------------------------------------------------------------------------------ point to point


def send_before_receiving() -> None:
    end = link([2, 1])
    large = np.arange(1 << 20, dtype=np.float64)
    record = np.zeros(3, np.dtype([("name", "U5"), ("value", "<f4")]))
    record["name"] = "abc"
    half = np.ones((2, 3), ml_dtypes.bfloat16)
    others = {0: [2], 1: [2], 2: [0, 1]}
    for member in range(end.first, end.first + end.counts[end.process]):
        for peer in others[member]:
            sent = large + member
            end.send(member, sent, peer, 5)
            sent[:] = -1  # it has been copied
            end.send(member, record, peer, 6)
            end.send(member, half, peer, 6)
            end.send(member, np.empty((0, 4), np.int16), peer, -7)
            end.send(member, np.array(3.5), peer, 6)
    end.barrier(Call("barrier"))
    for member in range(end.first, end.first + end.counts[end.process]):
        for peer in others[member]:
            first, second, third = (end.receive(member, peer, 6) for _ in range(3))
            assert first.dtype == record.dtype
            assert (first == record).all()
            assert second.dtype == half.dtype
            assert second.shape == (2, 3)
            assert third.shape == ()
            assert third[()] == 3.5
            assert end.receive(member, peer, -7).shape == (0, 4)
            np.testing.assert_array_equal(end.receive(member, peer, 5), large + peer)


def test_all_can_send_before_any_receives() -> None:
    run_ranks(2, send_before_receiving)


def send_in_threads() -> None:
    end = link([3, 3], largest_message=10_000)
    errors: list[BaseException] = []

    def exchange(member: int) -> None:
        try:
            peer = (member + 3) % 6
            for turn in range(30):
                end.send(member, np.full(turn * 700, member * 1000 + turn), peer, turn % 3)
            for turn in range(30):
                got = end.receive(member, peer, turn % 3)
                assert got.shape == (turn * 700,)
                assert (got == peer * 1000 + turn).all()
        except BaseException as error:  # noqa: BLE001  # raised below
            errors.append(error)

    threads = [threading.Thread(target=exchange, args=(end.first + number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for turn in range(20):  # and collectives meanwhile
        rows = np.full(1000 * turn, 1.0)
        end.fold(Call("fold", (turn,)), ReduceOp.SUM, [[rows], [rows], [rows]], [[np.empty_like(rows)]])
    for thread in threads:
        thread.join(20)
        assert not thread.is_alive()
    if errors:
        raise errors[0]


def test_threads_send_and_receive_while_others_reduce() -> None:
    run_ranks(2, send_in_threads)


def send_and_compute() -> None:
    end = link()
    if end.process == 0:
        end.send(0, np.ones(1 << 22), 1, 0)
        time.sleep(3)  # outside of MPI
    else:
        started = time.monotonic()
        assert end.receive(1, 0, 0).sum() == 1 << 22
        assert time.monotonic() - started < 2


def test_what_is_sent_arrives_while_its_sender_computes() -> None:
    run_ranks(2, send_and_compute, env={"OMPI_MCA_btl": "self,tcp"})


def send_and_end() -> None:
    end = link()
    if end.process == 0:
        end.send(0, np.ones(1 << 22), 1, 0)
    else:
        time.sleep(0.5)
        assert end.receive(1, 0, 0).sum() == 1 << 22


def test_what_is_sent_arrives_although_its_sender_has_ended() -> None:
    run_ranks(2, send_and_end, env={"OMPI_MCA_btl": "self,tcp"})


def receive_nothing() -> None:
    end = link(timeout=0.5)
    if end.process == 0:
        error = raised(CollectiveTimeoutError, lambda: end.receive(0, 1, 7))
        assert str(error).startswith(
            "recv from 1 (tag 7): member 0 waited 0.5 s for process 1; did member 1 send to it?"
        )
        assert error.missing == (1,)  # type: ignore[attr-defined]  # it is a CollectiveTimeoutError
    time.sleep(0.5 * end.process)
    end.barrier(Call("barrier"))  # nothing is broken


def test_a_message_that_does_not_come_times_out() -> None:
    run_ranks(2, receive_nothing)


# ---------------------------------------------------------------------------------------- disagreeing


def disagree() -> None:
    end = link(**eval(sys.argv[1]))
    calls = [Call("all_reduce", (ReduceOp.SUM, (np.dtype(np.float32), (3,)))), Call("barrier")]
    for _ in range(3):
        mine = calls[end.process == 1]
        array = np.ones(3, np.float32)
        error = raised(
            CollectiveMismatchError,
            lambda mine=mine, array=array: (  # type: ignore[misc]  # bound at once
                end.barrier(mine)
                if mine.kind == "barrier"
                else end.fold(mine, ReduceOp.SUM, [[array]], [[array]])
            ),
        )
        assert isinstance(error, CollectiveMismatchError)
        words = ["all_reduce SUM float32 of shape (3,)"] * end.size
        words[1] = "barrier"
        assert error.calls == tuple(words)
        assert "process 1 calls barrier" in str(error)
        array = np.ones(3, np.float32)
        end.fold(calls[0], ReduceOp.SUM, [[array]], [[array]])
        assert (array == end.size).all()
    # Arrays of other sizes, small ones and large ones.
    length = 10 if end.process == 0 else 500_000
    array = np.ones(length, np.float32)
    call = Call("all_reduce", ((array.dtype, array.shape),))
    raised(CollectiveMismatchError, lambda: end.fold(call, ReduceOp.SUM, [[array]], [[array]]))
    end.barrier(Call("x" * 1000))


@pytest.mark.parametrize(
    ("ranks", "options"), [(2, {}), (3, {}), (5, IN_ROUNDS)], ids=["two", "three", "five_in_rounds"]
)
def test_different_calls_raise_in_every_process_and_the_link_goes_on(
    ranks: int, options: dict[str, int]
) -> None:
    run_ranks(ranks, disagree, arguments=[repr(options)])


def come_late() -> None:
    end = link(timeout=1.0, **eval(sys.argv[1]))
    if end.process == 2:
        time.sleep(2.5)
        raised(CollectiveTimeoutError, lambda: end.barrier(Call("barrier")))
        return
    error = raised(CollectiveTimeoutError, lambda: end.barrier(Call("barrier")))
    assert isinstance(error, CollectiveTimeoutError)
    assert 2 in error.missing
    assert f"barrier: process {end.process} of 3 waited 1 s for the others at seq 1; missing: " in str(error)
    again = raised(CollectiveTimeoutError, lambda: end.send(0, np.ones(1), 1, 0))
    assert str(again) == str(error)
    end.close()
    end.close()
    sys.stdout.write("told")


@pytest.mark.parametrize("options", [{}, IN_ROUNDS], ids=["directly", "in_rounds"])
def test_who_does_not_come_is_named_and_the_link_is_broken(options: dict[str, int]) -> None:
    run = finish_ranks(3, come_late, arguments=[repr(options)], timeout=15)
    assert run.outputs[:2] == ["told", "told"], str(run)


@pytest.fixture
def hub() -> Iterator[Hub]:
    hub = Hub(2, "secret").start()
    yield hub
    hub.close()


def be_watched() -> None:
    """The first waits for the second, which does what the test says."""
    address, deed = sys.argv[1:]
    comm = world()
    channel = Channel.connect(address, "secret", comm.rank, host="here", size=2, timeout=20)
    channel.install_hooks()
    end = link(timeout=1.0 if deed == "sleep" else 20.0, watch=channel)
    end.barrier(Call("barrier"))
    if comm.rank == 1:
        if deed == "raise":
            raise RuntimeError("out of coffee")
        if deed == "exit":
            sys.exit(3)
        if deed == "sleep":
            time.sleep(3)
        return
    started = time.monotonic()
    error = raised(CollectiveError, lambda: end.barrier(Call("the next one")))
    sys.stdout.write(f"{type(error).__name__} after {time.monotonic() - started:.0f} s: {error}\n")
    sys.stdout.write("\n".join(getattr(error, "__notes__", ())))


def test_a_process_that_raises_ends_the_waiting_of_the_others_with_its_text(hub: Hub) -> None:
    run = finish_ranks(2, be_watched, arguments=[hub.address, "raise"], timeout=20)
    assert run.returncode != 0
    assert re.match(r"PeerFailedError after [01] s: .*RuntimeError: out of coffee", run.outputs[0]), str(run)


def test_a_process_that_exits_with_a_status_ends_the_waiting_of_the_others(hub: Hub) -> None:
    run = finish_ranks(2, be_watched, arguments=[hub.address, "exit"], timeout=20)
    # That of whichever mpiexec sees first: the other one, which caught the error, ends without MPI_Finalize.
    assert run.returncode in (1, 3), str(run)
    assert re.match(r"PeerFailedError after [01] s: .*it ended with status 3", run.outputs[0]), str(run)


def test_a_process_that_has_ended_is_not_waited_for(hub: Hub) -> None:
    run = finish_ranks(2, be_watched, arguments=[hub.address, "end"], timeout=20)
    assert re.match(r"PeerFailedError after [01] s: process 1 .* has ended its program", run.outputs[0]), str(
        run
    )


def test_a_late_process_is_reported_with_its_stack(hub: Hub) -> None:
    run = finish_ranks(2, be_watched, arguments=[hub.address, "sleep"], timeout=20)
    assert re.match(
        r"CollectiveTimeoutError after [12] s: the next one: process 1 did not come within 1.*at seq 2",
        run.outputs[0],
    ), str(run)
    assert "in be_watched" in run.outputs[0]


# ---------------------------------------------------------------------------------------------- others


def close_alone() -> None:
    end, other = link(), link()
    end.barrier(Call("barrier"))
    if end.process == 0:
        started = time.monotonic()
        end.close()
        end.close()
        assert time.monotonic() - started < 0.3
        assert "it is closed" in str(raised(CollectiveError, lambda: end.barrier(Call("barrier"))))
    time.sleep(0.6 * end.process)
    other.barrier(Call("barrier"))
    end.close()


def test_closing_is_no_collective() -> None:
    run_ranks(2, close_alone)


def make_wrongly() -> None:
    comm = world()
    for counts in ([1], [1, 1, 1], [1, 0]):
        error = raised(ValueError, lambda counts=counts: MpiLink(comm, counts, timeout=1))  # type: ignore[misc]  # bound at once
        assert f"MpiLink: got counts {counts} for 2 processes; need a number from 1 for each" in str(error)
    assert "piece_bytes=0" in str(raised(ValueError, lambda: link(piece_bytes=0)))
    assert "timeout=0" in str(raised(ValueError, lambda: link(timeout=0)))
    error = raised(CollectiveMismatchError, lambda: link([1, 1 + comm.rank]))
    assert "of [1, 1] members" in str(error)
    if comm.rank == 0:
        error = raised(CollectiveTimeoutError, lambda: link(timeout=0.3))
        assert "missing: process 1" in str(error)


def test_links_that_do_not_fit_are_refused() -> None:
    finish_ranks(2, make_wrongly, timeout=15)


def take_memory() -> None:
    end = link()
    for num_bytes in (0, 1, 1000, 1 << 20):
        memory = end.memory(num_bytes)
        assert memory.shape == (num_bytes,)
        assert memory.ctypes.data % 64 == 0 or not num_bytes
        assert not memory.any()
        memory[:] = 1


def test_memory_is_zeroed_and_begins_on_a_cache_line() -> None:
    run_ranks(1, take_memory)
