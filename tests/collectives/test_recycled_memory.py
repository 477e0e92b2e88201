"""Memory that is handed out again, but never while anybody can see it."""

from __future__ import annotations

import gc
import random
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from collectives.recycled_memory import RECYCLED_FROM, RecycledMemory

Array = np.ndarray[Any, Any]
BYTES = np.dtype(np.uint8)
SHAPE = (RECYCLED_FROM,)


def address(array: Array) -> int:
    return int(array.__array_interface__["data"][0])


def test_memory_that_nobody_holds_is_handed_out_again() -> None:
    memory = RecycledMemory()
    first = memory.empty(SHAPE, BYTES)
    place = address(first)
    del first
    for _ in range(5):
        again = memory.empty(SHAPE, BYTES)
        assert address(again) == place
        del again


def test_other_shapes_and_dtypes_of_about_that_size_use_it_too() -> None:
    memory = RecycledMemory()
    place = address(memory.empty((RECYCLED_FROM // 8, 2), np.dtype(np.float64)))
    again = memory.empty((RECYCLED_FROM // 8, 3), np.dtype(np.float32))
    assert address(again) == place
    assert again.shape == (RECYCLED_FROM // 8, 3)
    assert again.dtype == np.float32
    assert again.flags.c_contiguous
    assert again.flags.writeable


HOLDERS: dict[str, Callable[[Array], Any]] = {
    "the array": lambda array: array,
    "a slice": lambda array: array[3:5],
    "a slice of a slice": lambda array: array[3:50][1:4],
    "a reversed view": lambda array: array[::-1],
    "a reshaped view": lambda array: array.reshape(2, -1).T,
    "a view of another dtype": lambda array: array.view(np.int64),
    "a subclass's view": lambda array: array.view(np.recarray),
    "a memoryview": lambda array: array.data,
    "an array over a buffer": lambda array: np.frombuffer(array.data, np.uint8),
    "an array over DLPack": np.from_dlpack,
    "a flat iterator": lambda array: array.flat,
    "a closure": lambda array: lambda: array,
    "a cycle": lambda array: _cycle(array),
}


def _cycle(array: Array) -> list[Any]:
    cycle: list[Any] = [array[:1]]
    cycle.append(cycle)
    return cycle


@pytest.mark.parametrize("hold", HOLDERS.values(), ids=HOLDERS)
def test_what_anybody_still_sees_is_not_handed_out(hold: Callable[[Array], Any]) -> None:
    memory = RecycledMemory()
    first = memory.empty(SHAPE, BYTES)
    place = address(first)
    held = hold(first)
    del first
    others = [memory.empty(SHAPE, BYTES) for _ in range(4)]
    assert place not in {address(other) for other in others}
    assert len({address(other) for other in others}) == 4
    del held, others


def test_a_result_held_through_many_others_keeps_its_content() -> None:
    memory = RecycledMemory(num_blocks=2)
    choices = random.Random(0)
    held: list[tuple[Array, int]] = []
    for turn in range(300):
        array = memory.empty((RECYCLED_FROM + choices.randrange(5) * 100_000,), BYTES)
        array[:: len(array) - 1] = turn % 251
        held.append((array[choices.choice([0, -1]) :][:1], turn % 251))
        if len(held) > choices.randrange(6):
            del held[choices.randrange(len(held))]
        for view, value in held:
            assert view[0] == value


def test_it_keeps_no_more_blocks_than_it_says() -> None:
    memory = RecycledMemory(num_blocks=2)
    arrays = [memory.empty(SHAPE, BYTES) for _ in range(5)]
    places = {address(array) for array in arrays}
    del arrays
    gc.collect()
    again = [memory.empty(SHAPE, BYTES) for _ in range(2)]
    assert {address(array) for array in again} <= places


def test_a_much_larger_block_is_not_spent_on_a_small_array() -> None:
    memory = RecycledMemory()
    large = memory.empty((RECYCLED_FROM * 3,), BYTES)
    place = address(large)
    del large
    assert address(memory.empty(SHAPE, BYTES)) != place


@pytest.mark.parametrize("shape", [(), (0,), (3, 0), (10,)])
def test_small_arrays_are_plain_ones(shape: tuple[int, ...]) -> None:
    array = RecycledMemory().empty(shape, np.dtype(np.float64))
    assert array.shape == shape
    assert array.base is None


def test_views_that_another_thread_drops_meanwhile_do_no_harm() -> None:
    memory = RecycledMemory()
    handed: list[tuple[Array, int]] = []
    stop = threading.Event()
    wrong: list[int] = []

    def consume() -> None:
        while not stop.is_set() or handed:
            if handed:
                view, value = handed.pop(0)
                if view[0] != value or view[-1] != value:
                    wrong.append(value)
                del view

    consumer = threading.Thread(target=consume)
    consumer.start()
    for turn in range(2000):
        array = memory.empty(SHAPE, BYTES)
        array[0] = array[-1] = turn % 251
        handed.append((array[:], turn % 251))
        del array
        while len(handed) > 20:
            stop.wait(0.0005)
    stop.set()
    consumer.join(10)
    assert not consumer.is_alive()
    assert not wrong
