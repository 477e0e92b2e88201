"""Variables side by side in blocks."""

from __future__ import annotations

import gc
import itertools
import sys
import threading
import weakref
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from collectives import Device
from collectives.arrays import ALIGNMENT
from variables.flat_memory import Block, FlatMemory, Place, is_variable_memory

CPUS = [Device("cpu", 0), Device("cpu", 1)]
F32: np.dtype[Any] = np.dtype(np.float32)
F64: np.dtype[Any] = np.dtype(np.float64)


def address(array: np.ndarray[Any, Any]) -> int:
    return int(array.__array_interface__["data"][0])


def views(place: Place) -> list[np.ndarray[Any, Any]]:
    return [place.view(flat) for flat in place.block.copies]


@pytest.mark.parametrize(
    "dtype",
    [np.bool_, np.int8, np.float16, ml_dtypes.bfloat16, np.float32, np.complex128, np.longdouble],
    ids=str,
)
@pytest.mark.parametrize("trainable", [True, False])
def test_every_place_is_aligned_zeroed_and_in_its_shape(dtype: Any, trainable: bool) -> None:
    memory = FlatMemory(CPUS)
    for shape in ((), (1,), (3, 5), (0,), (7, 0), (100_000,), (2,)):
        place = memory.place(shape, np.dtype(dtype), trainable=trainable)
        for view in views(place):
            assert view.shape == shape
            assert view.dtype == dtype
            assert view.flags.c_contiguous
            assert not view.any()
            if view.size:
                assert address(view) % ALIGNMENT == 0


def test_places_do_not_overlap_and_are_the_same_on_every_device() -> None:
    memory = FlatMemory(CPUS)
    shapes = [(n % 7, n) for n in range(60)]
    places = [memory.place(shape, F32, trainable=True) for shape in shapes]
    for number, place in enumerate(places):
        for device, view in enumerate(views(place)):
            view[...] = number + 1000 * device
    for number, place in enumerate(places):
        for device, view in enumerate(views(place)):
            assert (view == number + 1000 * device).all()


def test_small_variables_of_one_dtype_share_a_block() -> None:
    memory = FlatMemory(CPUS)
    places = [memory.place((100,), F32, trainable=True) for _ in range(50)]
    assert len({id(place.block) for place in places}) == 1
    assert [place.start for place in places] == [n * 112 for n in range(50)]  # 100 floats fill 7 units of 16


def test_dtypes_and_what_is_not_trained_lie_apart() -> None:
    memory = FlatMemory(CPUS)
    blocks = {
        id(memory.place((2,), dtype, trainable=trainable).block)
        for dtype in (F32, F64)
        for trainable in (True, False)
    }
    assert len(blocks) == 4


def test_blocks_grow_as_they_fill() -> None:
    memory = FlatMemory(CPUS[:1])
    blocks: list[Block] = []
    for _ in range(3000):
        block = memory.place((1000,), F32, trainable=True).block
        if not blocks or blocks[-1] is not block:
            blocks.append(block)
    assert len(blocks) < 12
    assert all(later.capacity >= 2 * earlier.capacity for earlier, later in itertools.pairwise(blocks))


def test_a_huge_variable_gets_a_block_of_its_own_and_small_ones_go_on_in_theirs() -> None:
    memory = FlatMemory(CPUS[:1])
    small = memory.place((10,), F32, trainable=True)
    huge = memory.place((1_000_000,), F32, trainable=True)
    after = memory.place((10,), F32, trainable=True)
    assert huge.block is not small.block
    assert after.block is small.block


def test_threads_never_get_one_place_for_two_variables() -> None:
    memory = FlatMemory(CPUS[:1])
    places: list[Place] = []

    def make() -> None:
        for _ in range(1500):
            places.append(memory.place((4,), F64, trainable=True))  # one at a time

    usual = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        threads = [threading.Thread(target=make) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
    finally:
        sys.setswitchinterval(usual)
    assert len({(id(place.block), place.start) for place in places}) == 8 * 1500


def test_it_is_known_what_is_a_view_of_a_block() -> None:
    place = FlatMemory(CPUS).place((4, 4), F32, trainable=True)
    view = views(place)[1]
    for part in (view, view[1:], view.T[::2], view.reshape(-1)[3:4], view.view(np.int32)):
        assert is_variable_memory(part)
    for other in (view.copy(), view + 1, np.zeros(3), np.zeros(3)[1:], view[[0]]):
        assert not is_variable_memory(other)


def test_a_block_is_freed_with_the_last_view_of_it() -> None:
    place = FlatMemory(CPUS[:1]).place((4,), F32, trainable=True)
    view = views(place)[0]
    owner = weakref.ref(view.base)
    del place
    gc.collect()
    assert owner() is not None
    assert is_variable_memory(view)
    del view
    gc.collect()
    assert owner() is None
