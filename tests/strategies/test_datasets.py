"""Pipelines on one machine."""

from __future__ import annotations

import gc
import itertools
import os
import signal
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np
import pytest

from strategies.datasets.dataset import Dataset, from_arrays, from_generator
from strategies.datasets.dataset_iterator import OutOfRangeError
from strategies.datasets.stage import INFINITE_CARDINALITY, UNKNOWN_CARDINALITY

Source = Callable[[int], Dataset]


def rows_in_memory(n: int) -> Dataset:
    return Dataset.range(n)


def rows_of_a_generator(n: int) -> Dataset:
    return from_generator(lambda: iter(np.arange(n)))


every_source = pytest.mark.parametrize("source", [rows_in_memory, rows_of_a_generator])


def plain(dataset: Dataset) -> list[Any]:
    return [element.tolist() for element in dataset]


class Pair(NamedTuple):
    x: Any
    y: Any


# ------------------------------------------------------------------------------------------ sources


def test_from_arrays_slices_the_first_axis_of_every_leaf() -> None:
    image, label = np.arange(12.0).reshape(3, 2, 2), np.array([7, 8, 9], np.int8)
    elements = list(from_arrays({"image": image, "label": (label,)}))
    assert len(elements) == 3
    np.testing.assert_array_equal(elements[1]["image"], [[4, 5], [6, 7]])
    assert elements[1]["label"] == (8,)
    assert elements[1]["label"][0].dtype == np.int8


def test_from_arrays_keeps_named_tuples_and_the_order_of_keys() -> None:
    (element,) = from_arrays(Pair({"b": np.zeros(1), "a": np.ones(1)}, [np.ones(1)]))
    assert type(element) is Pair
    assert list(element.x) == ["b", "a"]
    assert element.y == [1.0]


def test_from_arrays_names_the_leaves_whose_lengths_differ() -> None:
    with pytest.raises(
        ValueError,
        match=r"from_arrays: element\['x'\] has 3 rows and element\['y'\]\[0\] has 4; need one length",
    ):
        from_arrays({"x": np.zeros((3, 2)), "y": [np.zeros(4)]})


@pytest.mark.parametrize(
    ("arrays", "error", "message"),
    [
        ([1, 2], IndexError, r"element\[0\] is the scalar 1; need a first axis — make it an array"),
        (np.float32(1), IndexError, r"element is the scalar"),
        ({"name": "mnist"}, TypeError, r"element\['name'\] is str; need an array"),
        ((np.zeros(2), None), TypeError, r"element\[1\] is NoneType; need an array"),
        ((), ValueError, r"got \(\), which holds no array"),
    ],
    ids=["numbers", "scalar", "text", "none", "nothing"],
)
def test_from_arrays_refuses_what_has_no_rows(arrays: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        from_arrays(arrays)


def test_a_generator_function_starts_over_in_every_epoch() -> None:
    dataset = from_generator(lambda: (i for i in range(3)))
    assert [list(dataset), list(dataset)] == [[0, 1, 2], [0, 1, 2]]


def test_a_list_is_a_source_that_knows_its_length() -> None:
    dataset = from_generator([{"x": np.zeros(2)}, {"x": np.ones(3)}])
    assert len(dataset) == 2
    assert [len(element["x"]) for element in dataset] == [2, 3]


def test_a_one_shot_source_says_so_when_iterated_again() -> None:
    dataset = from_generator(i for i in range(3)).batch(2)
    assert plain(dataset) == [[0, 1], [2]]
    with pytest.raises(RuntimeError, match="one-shot iterator that has been iterated before; need a source"):
        iter(dataset)


def test_a_one_shot_source_can_not_be_repeated() -> None:
    elements = iter(from_generator(iter([5])).repeat(2))
    assert next(elements) == 5
    with pytest.raises(RuntimeError, match="one-shot"):
        next(elements)


@pytest.mark.parametrize(
    "source", [np.zeros(3), {"x": np.zeros(3)}, "rows.csv"], ids=["array", "dict", "str"]
)
def test_from_generator_refuses_a_single_element(source: Any) -> None:
    with pytest.raises(TypeError, match="a single element; need an iterable of elements — slice arrays"):
        from_generator(source)


def test_from_generator_refuses_what_can_not_be_iterated() -> None:
    with pytest.raises(TypeError, match="from_generator: got int; need an iterable, or a function"):
        from_generator(3)  # type: ignore[arg-type]  # the mistake under test
    not_a_generator: Any = from_generator(lambda: 3)  # type: ignore[arg-type, return-value]  # likewise
    with pytest.raises(TypeError, match="the function returned int; need an iterable of elements"):
        iter(not_a_generator)


# ------------------------------------------------------------------------------------------ batches


@every_source
def test_the_last_batch_is_short(source: Source) -> None:
    assert plain(source(7).batch(3)) == [[0, 1, 2], [3, 4, 5], [6]]


@every_source
def test_drop_remainder_leaves_out_a_short_last_batch(source: Source) -> None:
    assert plain(source(7).batch(3, drop_remainder=True)) == [[0, 1, 2], [3, 4, 5]]
    assert plain(source(2).batch(3, drop_remainder=True)) == []


@every_source
def test_an_empty_dataset_has_no_batches(source: Source) -> None:
    assert plain(source(0).batch(3)) == []
    assert plain(source(0).shuffle(seed=1).repeat(2).batch(3)) == []


@every_source
def test_batches_of_batches_have_another_axis(source: Source) -> None:
    assert plain(source(6).batch(2).batch(2)) == [[[0, 1], [2, 3]], [[4, 5]]]


def test_batches_in_stored_order_lend_the_memory_of_the_arrays() -> None:
    array = np.arange(10.0)
    assert all(np.shares_memory(batch, array) for batch in from_arrays(array).skip(1).batch(4))


def test_batches_of_a_generator_stack_every_leaf_and_take_numbers() -> None:
    (batch,) = from_generator([(np.zeros(2, np.float32), 1), (np.ones(2, np.float32), 2)]).batch(2)
    np.testing.assert_array_equal(batch[0], [[0, 0], [1, 1]])
    assert batch[0].dtype == np.float32
    assert batch[1].tolist() == [1, 2]


def test_ragged_rows_name_their_shapes_and_padded_batch() -> None:
    ragged = from_generator([{"x": np.zeros(2)}, {"x": np.zeros(3)}])
    with pytest.raises(
        ValueError,
        match=r"batch: rows of element\['x'\] have shapes \(2,\), \(3,\); need one shape — call padded_batch",
    ):
        list(ragged.batch(2))


def test_padded_batch_fills_up_with_zeros_to_the_longest_in_the_batch() -> None:
    ragged = from_generator([np.full((i, 2), i, np.int16) for i in (1, 3, 2)])
    first, second = ragged.padded_batch(2)
    np.testing.assert_array_equal(first, [[[1, 1], [0, 0], [0, 0]], [[3, 3], [3, 3], [3, 3]]])
    assert first.dtype == np.int16
    assert second.shape == (1, 2, 2)
    assert [len(batch) for batch in ragged.padded_batch(2, drop_remainder=True)] == [2]


def test_padded_batch_of_rows_in_memory_is_batch() -> None:
    assert plain(Dataset.range(3).padded_batch(2)) == [[0, 1], [2]]


def test_padded_batch_takes_scalars_and_texts_along() -> None:
    (batch,) = from_generator([{"n": 1, "t": "a"}, {"n": 2, "t": "abc"}]).padded_batch(3)
    assert batch["n"].tolist() == [1, 2]
    assert batch["t"].tolist() == ["a", "abc"]


def test_padded_batch_needs_one_number_of_axes() -> None:
    with pytest.raises(ValueError, match=r"padded_batch: rows of element have \[1, 2\] axes"):
        list(from_generator([np.zeros(2), np.zeros((2, 2))]).padded_batch(2))


def test_batch_refuses_elements_of_different_structure() -> None:
    with pytest.raises(ValueError, match=r"batch: got elements of structure .* need one structure"):
        list(from_generator([(1, 2), (1, 2, 3)]).batch(2))


def test_batch_refuses_leaves_that_are_no_arrays() -> None:
    with pytest.raises(TypeError, match=r"batch: element\[1\] is object; need an array or a number"):
        list(from_generator([(1, object())]).batch(2))


def test_unbatch_gives_the_rows_back() -> None:
    pairs = from_arrays((np.arange(5), np.arange(5) * 2)).batch(2).unbatch()
    assert list(pairs) == [(i, 2 * i) for i in range(5)]


def test_unbatch_refuses_scalars() -> None:
    with pytest.raises(IndexError, match="unbatch: element is the scalar"):
        list(Dataset.range(2).unbatch())


# --------------------------------------------------------------------------------- parts and repeats


@every_source
def test_take_skip_and_shard_choose_by_position(source: Source) -> None:
    assert list(source(7).take(3)) == [0, 1, 2]
    assert list(source(7).take(9)) == list(source(7).take(-1)) == list(range(7))
    assert list(source(7).skip(5)) == [5, 6]
    assert list(source(7).skip(-1)) == list(source(7).skip(9)) == []
    assert list(source(7).shard(3, 1)) == [1, 4]
    assert list(source(7).skip(1).shard(2, 1).take(2)) == [2, 4]
    assert plain(source(7).shard(2, 0).batch(3)) == [[0, 2, 4], [6]]


def test_take_asks_for_no_element_too_many() -> None:
    endless = itertools.count()
    assert list(from_generator(endless).take(3)) == [0, 1, 2]
    assert next(endless) == 3


@every_source
def test_repeat_before_batch_goes_on_across_the_border(source: Source) -> None:
    assert plain(source(5).repeat(2).batch(4)) == [[0, 1, 2, 3], [4, 0, 1, 2], [3, 4]]
    assert plain(source(2).repeat(4).batch(5)) == [[0, 1, 0, 1, 0], [1, 0, 1]]


@every_source
def test_repeat_after_batch_keeps_the_short_batch_in_the_middle(source: Source) -> None:
    assert plain(source(3).batch(2).repeat(2)) == [[0, 1], [2], [0, 1], [2]]


@every_source
def test_repeat_has_no_end_by_default(source: Source) -> None:
    assert list(itertools.islice(source(2).repeat(), 5)) == [0, 1, 0, 1, 0]
    assert plain(source(3).repeat(-1).batch(2).take(3)) == [[0, 1], [2, 0], [1, 2]]


@every_source
def test_repeating_nothing_for_ever_ends(source: Source) -> None:
    assert list(source(0).repeat()) == []
    assert plain(source(0).repeat().batch(2)) == []
    assert list(source(3).filter(lambda x: x > 5).repeat()) == []
    assert list(source(3).repeat(0)) == []


# ------------------------------------------------------------------------------------------ shuffles


def test_a_shuffle_of_rows_in_memory_is_the_permutation_of_seed_and_epoch() -> None:
    x = np.arange(20.0).reshape(10, 2)
    dataset = from_arrays({"x": x, "y": np.arange(10)}).shuffle(seed=7).batch(4)
    for epoch in range(3):
        order = np.random.default_rng([7, epoch]).permutation(10)
        batches = list(dataset)
        np.testing.assert_array_equal(np.concatenate([batch["x"] for batch in batches]), x[order])
        np.testing.assert_array_equal(np.concatenate([batch["y"] for batch in batches]), order)


@every_source
@pytest.mark.parametrize("buffer_size", [None, 4])
def test_each_epoch_has_its_own_order_the_same_in_every_run(source: Source, buffer_size: int | None) -> None:
    def run() -> list[list[int]]:
        dataset = source(20).shuffle(buffer_size, seed=3)
        return [list(dataset) for _ in range(3)]

    epochs = run()
    assert epochs == run()
    assert all(sorted(order) == list(range(20)) for order in epochs)
    assert epochs[0] != epochs[1] != epochs[2] != epochs[0]


@every_source
def test_repeat_counts_epochs_as_iterating_does(source: Source) -> None:
    dataset = source(10).shuffle(seed=5)
    assert list(source(10).shuffle(seed=5).repeat(2)) == [*dataset, *dataset]


@every_source
def test_an_order_can_be_kept_over_the_epochs(source: Source) -> None:
    dataset = source(20).shuffle(seed=3, reshuffle_each_iteration=False)
    first = list(dataset)
    assert first == list(dataset)
    assert list(dataset.repeat(2)) == first + first
    assert first != list(range(20))


@every_source
def test_a_buffer_keeps_elements_near_their_place(source: Source) -> None:
    order = list(source(50).shuffle(4, seed=0))
    assert sorted(order) == list(range(50))
    assert order != list(range(50))
    # An element can't come before it has been read into the buffer.
    assert all(element <= place + 3 for place, element in enumerate(order))
    assert list(source(50).shuffle(1, seed=0)) == list(range(50))


def test_shuffles_are_not_the_same_without_a_seed() -> None:
    first, second = Dataset.range(1000).shuffle(), Dataset.range(1000).shuffle()
    assert list(first) != list(second)


def test_shuffling_a_part_of_shuffled_rows_stays_within_it() -> None:
    part = Dataset.range(10).skip(5).shuffle(seed=1).shuffle(seed=2)
    assert sorted(part) == [5, 6, 7, 8, 9]
    assert list(part.take(2)) == list(part.take(2))  # epoch 0 of two datasets


def test_an_endless_dataset_needs_a_buffer_to_shuffle() -> None:
    endless = Dataset.range(3).repeat()
    with pytest.raises(ValueError, match="shuffle: got an endless dataset and no buffer_size"):
        endless.shuffle(seed=1)
    assert set(itertools.islice(endless.shuffle(5, seed=1), 30)) == {0, 1, 2}


# ------------------------------------------------------------------------------- functions of the user


def test_map_passes_the_parts_of_a_tuple_separately() -> None:
    pairs = from_arrays((np.arange(3), np.arange(3) * 10))
    assert list(pairs.map(lambda x, y: x + y)) == [0, 11, 22]


def test_map_passes_dicts_and_named_tuples_as_one() -> None:
    assert list(from_arrays({"x": np.arange(2)}).map(lambda d: d["x"] + 1)) == [1, 2]
    assert list(from_arrays(Pair(np.arange(2), np.arange(2))).map(lambda p: p.x + p.y)) == [0, 2]


def test_map_after_batch_sees_whole_batches() -> None:
    assert plain(from_arrays(np.arange(1.0, 7)).batch(4).map(lambda x: x + x.sum())) == [
        [11, 12, 13, 14],
        [16, 17],
    ]


@every_source
def test_filter_keeps_what_the_predicate_holds_of(source: Source) -> None:
    assert list(source(7).filter(lambda x: x % 3 == 0)) == [0, 3, 6]


def test_an_error_in_a_function_comes_out_as_itself_and_again_when_asked_again() -> None:
    def picky(x: Any) -> Any:
        if x == 1:
            raise KeyError("no one")
        return x

    elements = iter(Dataset.range(3).map(picky))
    assert next(elements) == 0
    for _ in range(2):
        with pytest.raises(KeyError, match="no one"):
            next(elements)


def test_after_a_passing_error_the_same_element_is_tried_again() -> None:
    failures = [OSError("the disk was busy")]

    def flaky(x: Any) -> Any:
        if x == 1 and failures:
            raise failures.pop()
        return x

    elements = iter(Dataset.range(3).map(flaky))
    assert next(elements) == 0
    with pytest.raises(OSError, match="busy"):
        next(elements)
    assert list(elements) == [1, 2]


def test_a_stop_iteration_from_a_function_does_not_pass_for_the_end() -> None:
    def stop(x: Any) -> Any:
        raise StopIteration

    with pytest.raises(RuntimeError, match="StopIteration"):
        list(Dataset.range(3).map(stop))


# --------------------------------------------------------------------------------------- wrong numbers


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda d: d.batch(0), "batch: batch_size: got 0; need at least 1"),
        (lambda d: d.batch(-4), "batch: batch_size: got -4; need at least 1"),
        (lambda d: d.padded_batch(0), "padded_batch: batch_size: got 0"),
        (lambda d: d.repeat(-2), "repeat: count: got -2; need at least -1"),
        (lambda d: d.take(-2), "take: count: got -2"),
        (lambda d: d.skip(-2), "skip: count: got -2"),
        (lambda d: d.shard(0, 0), "shard: num_shards: got 0"),
        (lambda d: d.shard(2, 2), "shard: got index 2 of 2 shards; need an index below 2"),
        (lambda d: d.shard(2, -1), "shard: index: got -1"),
        (lambda d: d.shuffle(0), "shuffle: buffer_size: got 0"),
        (lambda d: d.shuffle(seed=-1), "shuffle: seed: got -1"),
        (lambda d: d.prefetch(0), "prefetch: buffer_size: got 0"),
        (
            lambda d: d.with_options(auto_shard_policy="HALF"),
            "auto_shard_policy: got 'HALF'; need one of AUTO, DATA",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_wrong_number_is_refused_at_the_call(wrong: Callable[[Dataset], Dataset], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        wrong(Dataset.range(3))


def test_what_is_no_integer_or_function_is_refused_at_the_call() -> None:
    anything: Any = Dataset.range(3)
    with pytest.raises(TypeError, match=r"batch: batch_size: got 2\.5; need an integer"):
        anything.batch(2.5)
    with pytest.raises(TypeError, match="take: count: got None; need an integer"):
        anything.take(None)
    with pytest.raises(TypeError, match="map: got int; need a function"):
        anything.map(3)


# ------------------------------------------------------------------------------------------ cardinality


@pytest.mark.parametrize(
    ("dataset", "cardinality"),
    [
        pytest.param(Dataset.range(10).batch(4), 3, id="batches"),
        pytest.param(Dataset.range(10).batch(4, drop_remainder=True), 2, id="whole_batches"),
        pytest.param(Dataset.range(10).repeat(3).batch(4), 8, id="repeat_before_batch"),
        pytest.param(Dataset.range(10).repeat(), INFINITE_CARDINALITY, id="endless"),
        pytest.param(Dataset.range(10).repeat().batch(4).take(5), 5, id="part_of_endless"),
        pytest.param(Dataset.range(10).repeat().skip(3), INFINITE_CARDINALITY, id="endless_but_a_part"),
        pytest.param(Dataset.range(0).repeat(), 0, id="endless_nothing"),
        pytest.param(Dataset.range(10).skip(4).shard(4, 1).map(abs).prefetch(), 2, id="parts"),
        pytest.param(Dataset.range(10).batch(4).shuffle(2, seed=0), 3, id="shuffled_batches"),
        pytest.param(Dataset.range(10).filter(bool), UNKNOWN_CARDINALITY, id="filtered"),
        pytest.param(Dataset.range(10).filter(bool).take(0), 0, id="nothing_of_filtered"),
        pytest.param(Dataset.range(10).batch(4).unbatch(), UNKNOWN_CARDINALITY, id="unbatched"),
        pytest.param(from_generator(lambda: iter([1, 2])).repeat(2), UNKNOWN_CARDINALITY, id="generator"),
        pytest.param(from_generator([1, 2, 3]).repeat(2), 6, id="list"),
        pytest.param(
            from_generator(Dataset.range(3).repeat()), UNKNOWN_CARDINALITY, id="loader_of_unknown_length"
        ),
    ],
)
def test_cardinality_is_what_iterating_would_count(dataset: Dataset, cardinality: int) -> None:
    assert dataset.cardinality == cardinality
    if cardinality >= 0:
        assert len(dataset) == len(list(dataset)) == cardinality


def test_len_says_why_it_does_not_know() -> None:
    with pytest.raises(TypeError, match="this Dataset has no end"):
        len(Dataset.range(3).repeat())
    with pytest.raises(TypeError, match="this Dataset must be iterated to be counted"):
        len(Dataset.range(3).filter(bool))
    assert Dataset.range(0)  # a dataset is true, as an object is


def test_the_global_batch_size_is_known_until_a_function_may_change_it() -> None:
    batched = Dataset.range(10).batch(4)
    assert batched.repeat().prefetch().take(2).global_batch_size == 4
    assert batched.map(abs).global_batch_size is None
    assert Dataset.range(10).global_batch_size is None
    assert repr(batched) == "Dataset(cardinality=3, global_batch_size=4)"


# ------------------------------------------------------------------------------------------ prefetching


def prefetch_threads() -> int:
    return sum(thread.name == "prefetch" for thread in threading.enumerate())


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 5
    while not condition():
        assert time.monotonic() < deadline, "waited 5 s in vain"
        time.sleep(0.001)


@every_source
def test_prefetch_gives_the_same_elements(source: Source) -> None:
    dataset = source(20).batch(3).prefetch(2)
    assert plain(dataset) == plain(source(20).batch(3))
    assert plain(dataset.prefetch()) == plain(source(20).batch(3))
    wait_until(lambda: not prefetch_threads())


def test_prefetch_makes_as_many_elements_ahead_as_asked_and_no_more() -> None:
    made: list[int] = []

    def source() -> Iterator[int]:
        for i in range(100):
            made.append(i)
            yield i

    elements = iter(from_generator(source).prefetch(3))
    assert not made  # the thread starts with the first element
    assert next(elements) == 0
    wait_until(lambda: len(made) == 5)  # 3 in the buffer, one in hand
    time.sleep(0.05)
    assert len(made) == 5


def test_an_error_in_a_prefetched_pipeline_is_raised_in_its_place_as_itself() -> None:
    error = OSError("no more disk")

    def source() -> Iterator[int]:
        yield 0
        yield 1
        raise error

    elements = iter(from_generator(source).prefetch(8))
    assert [next(elements), next(elements)] == [0, 1]
    with pytest.raises(OSError, match="no more disk") as failure:
        next(elements)
    assert failure.value is error
    wait_until(lambda: not prefetch_threads())


def test_an_abandoned_iterator_ends_its_thread_and_closes_its_source() -> None:
    wait_until(lambda: not prefetch_threads())  # of the tests before
    closed = threading.Event()

    def source() -> Iterator[int]:
        try:
            yield from itertools.count()
        finally:
            closed.set()

    elements = iter(from_generator(source).prefetch(2).map(lambda x: x).prefetch(2).batch(2))
    assert next(elements).tolist() == [0, 1]
    assert prefetch_threads() == 2
    del elements
    gc.collect()
    assert closed.wait(5)
    wait_until(lambda: not prefetch_threads())


def test_breaking_out_of_a_loop_leaves_no_thread() -> None:
    for element in Dataset.range(100).prefetch(4):
        if element == 3:
            break
    wait_until(lambda: not prefetch_threads())


def test_ctrl_c_ends_the_wait_for_a_prefetched_element() -> None:
    go_on = threading.Event()

    def source() -> Iterator[int]:
        go_on.wait(10)
        yield 0

    elements = iter(from_generator(source).prefetch())
    main = threading.main_thread().ident
    assert main is not None
    interrupt = threading.Timer(0.05, signal.pthread_kill, (main, signal.SIGINT))
    interrupt.start()
    started = time.monotonic()
    try:
        with pytest.raises(KeyboardInterrupt):
            next(elements)
        assert time.monotonic() - started < 1
    finally:
        go_on.set()
        interrupt.join(5)
    assert list(elements) == [0]
    wait_until(lambda: not prefetch_threads())


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_a_forked_child_is_told_that_the_thread_is_gone() -> None:
    made: list[int] = []

    def source() -> Iterator[int]:
        for i in range(100):
            made.append(i)
            yield i

    elements = iter(from_generator(source).prefetch(2))
    next(elements)
    wait_until(lambda: len(made) == 4)  # the thread waits for room, and holds no lock
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # newer Pythons warn of what is tested here
        child = os.fork()
    if not child:
        try:
            list(elements)
        except RuntimeError as error:
            os._exit(7 if "after a fork, make a new iterator" in str(error) else 1)
        finally:
            os._exit(2)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 7
    assert list(elements) == list(range(1, 100))


# ------------------------------------------------------------------------------------------- iterators


def test_an_iterator_shared_by_threads_gives_each_element_to_one_of_them() -> None:
    elements = iter(from_generator(lambda: iter(range(2000))).map(lambda x: x))
    with ThreadPoolExecutor(4) as threads:
        parts = list(threads.map(lambda _: list(elements), range(4)))
    assert sorted(itertools.chain(*parts)) == list(range(2000))


def test_a_pipeline_that_asks_itself_for_elements_is_an_error_not_a_deadlock() -> None:
    elements: Iterator[Any] = iter(Dataset.range(3).map(lambda _: next(elements)))
    with pytest.raises(ValueError, match="already executing"):
        next(elements)


def test_get_next_past_the_end_is_out_of_range() -> None:
    elements = iter(Dataset.range(1))
    assert elements.get_next() == 0
    for _ in range(2):
        with pytest.raises(OutOfRangeError, match="exhausted after 1 steps; need a new epoch"):
            elements.get_next()


def test_get_next_past_the_end_does_not_end_a_generator_quietly() -> None:
    elements = iter(Dataset.range(1))

    def pairs() -> Iterator[Any]:
        while True:
            yield elements.get_next(), elements.get_next()

    with pytest.raises(RuntimeError, match="generator raised StopIteration"):
        list(pairs())


def test_an_optional_says_whether_there_is_an_element() -> None:
    elements = iter(Dataset.range(1))
    first, second = elements.get_next_as_optional(), elements.get_next_as_optional()
    assert first.has_value()
    assert first.get_value() == 0
    assert not second.has_value()
    with pytest.raises(ValueError, match="ask has_value"):
        second.get_value()


PIPELINES: dict[str, Callable[[], Dataset]] = {
    "batch": lambda: Dataset.range(11).batch(3),
    "shuffle": lambda: Dataset.range(11).shuffle(seed=1).batch(3),
    "buffer": lambda: Dataset.range(11).shuffle(4, seed=1).batch(3),
    "repeat": lambda: Dataset.range(5).shuffle(seed=1).repeat(3).batch(4),
    "endless": lambda: Dataset.range(5).shuffle(seed=1).repeat().batch(4).take(6),
    "parts": lambda: Dataset.range(30).shuffle(seed=1).skip(3).shard(2, 1).take(11).batch(2),
    "repeated_batches": lambda: Dataset.range(5).shuffle(seed=1).batch(2).repeat(3),
    "repeated_generator": lambda: rows_of_a_generator(4).repeat(3).batch(3),
    "sliced_generator": lambda: rows_of_a_generator(30).skip(1).shard(3, 1).take(7),
    "shuffled_batches": lambda: Dataset.range(20).batch(2).shuffle(4, seed=2).map(lambda x: x * 2),
    "filter": lambda: Dataset.range(20).shuffle(seed=3).filter(lambda x: x % 2).padded_batch(3).prefetch(2),
    "unbatch": lambda: Dataset.range(7).batch(3).unbatch().map(lambda x: x + 1),
    "options": lambda: Dataset.range(7).batch(3).with_options(auto_shard_policy="OFF"),
    "one_shot": lambda: from_generator(iter(range(7))).batch(2),
}


@pytest.mark.parametrize("make", PIPELINES.values(), ids=PIPELINES)
def test_a_restored_position_goes_on_as_the_saved_one(make: Callable[[], Dataset]) -> None:
    epoch = 0 if make().stage.traits.one_shot else 2
    dataset = make()
    for _ in range(epoch):
        list(dataset)
    elements = iter(dataset)
    states, expected = [], []
    while True:
        states.append(elements.state())
        element = elements.get_next_as_optional()
        if not element.has_value():
            break
        expected.append(element.get_value().tolist())
    assert len(expected) >= 3
    for step, state in enumerate(states):
        restored = iter(make())
        restored.restore(state)
        assert restored.state() == state
        assert [element.tolist() for element in restored] == expected[step:]


def test_the_epoch_after_a_restored_one_is_the_next() -> None:
    orders = [list(epoch) for epoch in itertools.repeat(Dataset.range(9).shuffle(seed=1), 4)]
    again = Dataset.range(9).shuffle(seed=1)
    elements = iter(again)
    elements.restore({"epoch": 2, "step": 8, "shuffle_seeds": [1]})
    assert [list(elements), list(again)] == [orders[2][8:], orders[3]]


def test_restoring_neither_touches_the_rows_nor_calls_the_functions_before() -> None:
    calls: list[list[int]] = []

    def seen(batch: Any) -> Any:
        calls.append(batch.tolist())
        return batch

    elements = iter(Dataset.range(10).batch(2).map(seen).repeat())
    elements.restore({"epoch": 0, "step": 5_000_000_003, "shuffle_seeds": []})
    assert next(elements).tolist() == [6, 7]
    assert calls == [[6, 7]]


def test_a_position_goes_back_as_well() -> None:
    elements = iter(Dataset.range(5))
    start = elements.state()
    assert [next(elements), next(elements)] == [0, 1]
    elements.restore(start)
    assert list(elements) == [0, 1, 2, 3, 4]


def test_a_one_shot_source_can_not_go_back() -> None:
    elements = iter(from_generator(iter(range(5))))
    start = elements.state()
    next(elements)
    with pytest.raises(RuntimeError, match="one-shot"):
        elements.restore(start)


def test_a_position_in_another_shuffle_is_refused() -> None:
    state = iter(Dataset.range(5).shuffle().batch(2)).state()
    elements = iter(Dataset.range(5).shuffle().batch(2))
    with pytest.raises(
        ValueError, match=r"restore: the position was saved under shuffle seeds .* pass seed="
    ):
        elements.restore(state)


@pytest.mark.parametrize(
    "state",
    [{}, {"epoch": 0, "step": -1, "shuffle_seeds": []}, {"epoch": "a", "step": 0, "shuffle_seeds": []}],
    ids=str,
)
def test_what_is_no_position_is_refused(state: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="need epoch, step and shuffle_seeds as state"):
        iter(Dataset.range(5)).restore(state)
