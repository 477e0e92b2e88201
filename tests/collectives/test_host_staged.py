"""Arrays on GPUs in groups whose backend works on the host; on simulated GPUs, in processes of a job."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest

import strategies as xd
from collectives.host_staged import HostStagedCommunicator
from tests import simulated_cupy as gpu
from tests.jobs import TIMEOUT, run_in_job

OPTIONS = xd.CommunicationOptions(timeout_seconds=TIMEOUT)


def group_on_gpus() -> xd.Communicator:
    """Of the processes of a job, in which CuPy is there."""
    gpu.install()
    group = xd.process_group(OPTIONS)
    assert isinstance(group, HostStagedCommunicator)
    return group


def read(array: Any, device: int = 0) -> Any:
    """What a later kernel would see."""
    assert isinstance(array, gpu.ndarray)
    assert array.device.id == device
    return array.get()


def test_every_collective_takes_arrays_of_a_gpu_and_gives_arrays_of_it() -> None:
    def body() -> bool:
        group = group_on_gpus()
        rank, size = group.rank, group.world_size
        of_all = np.stack([np.arange(6.0) + 10 * r for r in range(size)])
        mine = of_all[rank]
        on_gpu = partial(gpu.on_device, device=rank)
        same = np.testing.assert_array_equal
        for op, fold in (("SUM", np.sum), ("MEAN", np.mean), ("MAX", np.max), ("MIN", np.min)):
            same(read(group.all_reduce(on_gpu(mine), op), rank), fold(of_all, axis=0))
        reduced = group.reduce(on_gpu(mine), "SUM", root=1)
        if rank == 1:
            same(read(reduced, 1), of_all.sum(axis=0))
        else:
            assert reduced is None
        same(read(group.reduce_scatter(on_gpu(mine)), rank), of_all.sum(axis=0)[2 * rank : 2 * rank + 2])
        same(read(group.broadcast(on_gpu(mine), root=2), rank), of_all[2])
        same(
            read(group.all_gather(on_gpu(mine[: rank + 1])), rank),
            np.concatenate([of_all[r][: r + 1] for r in range(size)]),
        )
        same(read(group.all_to_all(on_gpu(mine)), rank), of_all[:, 2 * rank : 2 * rank + 2].reshape(-1))
        group.send(on_gpu(mine), (rank + 1) % size)
        same(group.recv((rank - 1) % size), of_all[(rank - 1) % size])
        return True

    assert run_in_job(3, body) == [True] * 3


def test_nothing_is_read_before_its_stream_has_filled_it_nor_returned_before_it_is_there() -> None:
    def body() -> bool:
        group = group_on_gpus()
        for n in range(100):
            total: Any = group.all_reduce(gpu.on_device(np.full(1000, float(n))))
            np.testing.assert_array_equal(total.get(), np.full(1000, 2.0 * n))
        return True

    assert run_in_job(2, body) == [True, True]


def test_results_go_into_out_on_the_gpu_also_in_place_and_from_one_side_to_the_other() -> None:
    def body() -> bool:
        group = group_on_gpus()
        mine = np.arange(4, dtype=np.int16) + group.rank
        both = 2 * np.arange(4) + 1
        array: Any = gpu.on_device(mine)
        assert id(group.all_reduce(array, out=array)) == id(array)
        np.testing.assert_array_equal(array.get(), both)
        assert array.dtype == np.int16
        out = gpu.on_device(np.zeros(4, np.int64))
        group.all_reduce(mine, out=out)
        np.testing.assert_array_equal(out.get(), both)
        np.testing.assert_array_equal(mine, np.arange(4) + group.rank, "what was passed is left alone")
        on_host = np.zeros(4, np.int64)
        group.all_reduce(gpu.on_device(mine), out=on_host)
        np.testing.assert_array_equal(on_host, both)
        gathered = gpu.on_device(np.zeros(8, np.int16))
        group.all_gather(gpu.on_device(mine), out=gathered)
        np.testing.assert_array_equal(gathered.get(), [0, 1, 2, 3, 1, 2, 3, 4])
        group.send(mine, 1 - group.rank)
        letter = gpu.on_device(np.zeros(4, np.int16))
        group.recv(1 - group.rank, out=letter)
        np.testing.assert_array_equal(letter.get(), np.arange(4) + 1 - group.rank)
        with pytest.raises(ValueError, match=r"need int64 of shape \(4,\)|need float64 of shape \(4,\)"):
            group.all_reduce(gpu.on_device(np.zeros(4)), out=gpu.on_device(np.zeros(3)))
        return True

    assert run_in_job(2, body) == [True, True]


def test_arrays_of_both_sides_go_together_and_each_result_lies_beside_its_array() -> None:
    def body() -> bool:
        group = group_on_gpus()
        on_host = np.full(3, 1.0 + group.rank)
        results: list[Any] = group.all_reduce_coalesced(
            [on_host, gpu.on_device(np.full((2, 2), 5.0), 1), np.ones(2, np.float32)]
        )
        np.testing.assert_array_equal(results[0], np.full(3, 3.0))
        np.testing.assert_array_equal(read(results[1], 1), np.full((2, 2), 10.0))
        np.testing.assert_array_equal(results[2], np.full(2, 2.0))
        np.testing.assert_array_equal(on_host, np.full(3, 1.0 + group.rank), "what was passed is left alone")
        # On one rank on the GPU, on the other on the host.
        mine = gpu.on_device(np.arange(3.0)) if group.rank else np.arange(3.0)
        total: Any = group.all_reduce(mine)
        np.testing.assert_array_equal(total.get() if group.rank else total, 2 * np.arange(3.0))
        return True

    assert run_in_job(2, body) == [True, True]


def test_transposed_empty_and_scalar_arrays_and_narrow_dtypes_keep_the_rules_of_numbers() -> None:
    def body() -> bool:
        group = group_on_gpus()
        matrix = np.arange(6.0).reshape(2, 3)
        result: Any = group.all_reduce(gpu.on_device(matrix).T)
        gpu.stream(0).synchronize()
        np.testing.assert_array_equal(result.get(), 2 * matrix.T)
        empty: Any = group.all_reduce(gpu.on_device(np.zeros((0, 3), np.float32)))
        assert (empty.shape, empty.dtype) == ((0, 3), np.float32)
        scalar: Any = group.all_reduce(gpu.on_device(np.float64(2.5)))
        assert (scalar.shape, scalar.get()) == ((), 5.0)
        counts: Any = group.all_reduce(gpu.on_device(np.full(3, 200, np.uint8)))
        np.testing.assert_array_equal(counts.get(), np.full(3, 400, np.uint64))
        assert counts.dtype == np.uint64
        halves: Any = group.all_reduce(gpu.on_device(np.full(3, 2049.0, np.float16)), "MEAN")
        assert halves.dtype == np.float16
        mean: Any = group.all_reduce(gpu.on_device(np.array([1, 2])), "MEAN")
        assert mean.dtype == np.float64
        return True

    assert run_in_job(2, body) == [True, True]


def test_memory_is_pinned_once_for_the_largest_and_never_for_arrays_of_the_host() -> None:
    def body() -> int:
        group = group_on_gpus()
        for _ in range(3):
            group.all_reduce(np.ones(1000))
        assert not gpu.NUM_PINNED
        for length in (1000, 10, 1000, 500):
            group.all_reduce(gpu.on_device(np.ones(length)))
        return len(gpu.NUM_PINNED)

    assert run_in_job(2, body) == [1, 1]


def test_the_background_takes_arrays_of_a_gpu_too() -> None:
    def body() -> bool:
        background = xd.NonBlocking(group_on_gpus())
        handles = [background.all_reduce(gpu.on_device(np.full(10, float(n)))) for n in range(5)]
        for n, handle in enumerate(handles):
            result: Any = handle.result(TIMEOUT)
            np.testing.assert_array_equal(result.get(), np.full(10, 2.0 * n))
        return True

    assert run_in_job(2, body) == [True, True]
