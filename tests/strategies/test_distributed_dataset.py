"""How global batches and whole elements reach the replicas."""

from __future__ import annotations

import itertools
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from strategies import MirroredStrategy
from strategies.datasets.dataset import Dataset, from_arrays, from_generator
from strategies.datasets.dataset_iterator import OutOfRangeError
from strategies.datasets.distributed_dataset import DistributedDataset
from strategies.datasets.distributed_dataset_from_function import (
    DistributedDatasetFromFunction,
    distribute_from_function,
)
from strategies.datasets.input_options import (
    AutoShardPolicy,
    InputContext,
    InputOptions,
    InputReplicationMode,
)
from strategies.datasets.splitting import share_bounds, share_sizes, split_sizes
from strategies.datasets.stage import INFINITE_CARDINALITY, UNKNOWN_CARDINALITY
from variables.values import PerReplica


def rows(value: Any) -> list[Any]:
    """Each replica's array as a list."""
    assert isinstance(value, PerReplica)
    return [array.tolist() for array in value.values]


def steps(dataset: DistributedDataset | DistributedDatasetFromFunction) -> list[list[Any]]:
    return [rows(step) for step in dataset]


# ------------------------------------------------------------------------------------------- splitting


@pytest.mark.parametrize("num_shares", range(1, 9))
@pytest.mark.parametrize("num_rows", [0, 1, 2, 5, 8, 9, 64])
def test_shares_are_even_and_the_first_are_the_larger_ones(num_rows: int, num_shares: int) -> None:
    sizes = share_sizes(num_rows, num_shares)
    assert list(sizes) == [len(part) for part in np.array_split(np.arange(num_rows), num_shares)]
    assert share_bounds(num_rows, num_shares) == (0, *np.cumsum(sizes).tolist())


@pytest.mark.parametrize(
    ("global_batch", "num_workers", "replicas", "expected"),
    [
        (8, 2, 2, [[2, 2, 2, 2], [2, 2, 2, 2]]),
        (3, 2, 2, [[1, 1, 1, 0], [1, 0, 1, 1]]),
        (13, 2, 3, [[3, 2, 2, 2, 2, 2], [2, 2, 2, 3, 2, 2]]),
        (0, 2, 2, [[0, 0, 0, 0], [0, 0, 0, 0]]),
    ],
)
def test_split_sizes_begin_with_those_of_the_worker(
    global_batch: int, num_workers: int, replicas: int, expected: list[list[int]]
) -> None:
    sizes = [split_sizes(global_batch, num_workers, replicas, worker) for worker in range(num_workers)]
    np.testing.assert_array_equal(sizes, expected)
    assert sizes[0].dtype == np.int64


@pytest.mark.parametrize("wrong", [(-1, 1, 1, 0), (4, 0, 1, 0), (4, 1, 0, 0), (4, 2, 1, 2)], ids=str)
def test_split_sizes_refuses_workers_that_do_not_exist(wrong: tuple[int, int, int, int]) -> None:
    with pytest.raises(ValueError, match="split_sizes: got a batch of"):
        split_sizes(*wrong)


# -------------------------------------------------------------------------------------- global batches


def test_every_batch_is_split_by_its_own_size() -> None:
    assert steps(DistributedDataset(Dataset.range(13).batch(8), 4)) == [
        [[0, 1], [2, 3], [4, 5], [6, 7]],
        [[8, 9], [10], [11], [12]],
    ]
    assert steps(DistributedDataset(Dataset.range(4).batch(4), 3)) == [[[0, 1], [2], [3]]]
    assert steps(DistributedDataset(Dataset.range(5).batch(4).repeat(2), 2)) == [
        [[0, 1], [2, 3]],
        [[4], []],
        [[0, 1], [2, 3]],
        [[4], []],
    ]


def test_a_batch_means_the_global_batch_and_repr_says_so() -> None:
    dataset = DistributedDataset(from_arrays(np.arange(5)).batch(5), 3)
    shares = next(iter(dataset)).values
    assert [len(share) for share in shares] == [2, 2, 1]
    np.testing.assert_array_equal(np.concatenate(shares), np.arange(5))
    assert repr(dataset) == (
        "DistributedDataset(global_batch_size=5, per_replica_batch_sizes=(2, 2, 1), cardinality=1)"
    )


def test_a_replica_without_rows_gets_an_empty_array_of_the_right_shape_and_dtype() -> None:
    source = from_arrays(
        {"x": np.arange(8, dtype=np.float32).reshape(4, 2), "y": (np.arange(4, dtype=np.int16),)}
    )
    *_, last = DistributedDataset(source.batch(3), 3)
    assert [share.shape for share in last["x"].values] == [(1, 2), (0, 2), (0, 2)]
    assert {share.dtype for share in last["x"].values} == {np.dtype(np.float32)}
    assert [share.shape for share in last["y"][0].values] == [(1,), (0,), (0,)]
    assert {share.dtype for share in last["y"][0].values} == {np.dtype(np.int16)}


def test_an_empty_batch_is_a_step_of_empty_shares() -> None:
    (step,) = DistributedDataset([np.zeros((0, 3))], 2)
    assert [share.shape for share in step.values] == [(0, 3), (0, 3)]


def test_an_empty_dataset_has_no_steps() -> None:
    assert list(DistributedDataset(Dataset.range(0).batch(4), 2)) == []
    assert list(DistributedDataset([], 2)) == []


def test_shares_are_views_of_the_batch() -> None:
    array = np.arange(12.0).reshape(6, 2)
    for step in DistributedDataset(from_arrays(array).batch(4), 2):
        assert all(np.shares_memory(share, array) for share in step.values if len(share))


def test_any_iterable_of_nested_arrays_is_a_source() -> None:
    batches = [(np.arange(3), [np.ones((3, 2))]), (np.arange(1), [np.ones((1, 2))])]
    dataset = DistributedDataset(batches, 2)
    for _ in range(2):
        assert [rows(x) for x, _ in dataset] == [[[0, 1], [2]], [[0], []]]
    assert dataset.cardinality == 2
    assert dataset.global_batch_size is None
    assert dataset.per_replica_batch_sizes is None


def test_leaves_of_different_length_are_named() -> None:
    dataset = DistributedDataset([{"x": np.zeros(4), "y": np.zeros(3)}], 2)
    with pytest.raises(
        ValueError,
        match=r"distribute_dataset: element\['x'\] has 4 rows and element\['y'\] has 3; need one length",
    ):
        next(iter(dataset))


def test_unbatched_scalars_are_an_index_error_that_names_the_remedy() -> None:
    with pytest.raises(
        IndexError, match=r"element is the scalar .*; need a first axis — batch\(\) the dataset first"
    ):
        next(iter(DistributedDataset(Dataset.range(4), 2)))


def test_unbatched_vectors_are_taken_for_batches() -> None:
    vectors = from_arrays(np.arange(8).reshape(2, 4))
    assert steps(DistributedDataset(vectors, 2)) == [[[0, 1], [2, 3]], [[4, 5], [6, 7]]]


def test_a_leaf_that_is_no_array_is_a_type_error() -> None:
    with pytest.raises(TypeError, match=r"element\[1\] is str; need an array"):
        next(iter(DistributedDataset([(np.zeros(2), "label")], 2)))


@pytest.mark.parametrize("source", [np.zeros((4, 2)), {"x": np.zeros(4)}], ids=["array", "dict"])
def test_a_single_element_is_no_dataset(source: Any) -> None:
    with pytest.raises(
        TypeError, match="a single element; need an iterable of elements — slice arrays in memory"
    ):
        DistributedDataset(source, 2)


def test_one_replica_gets_the_elements_as_they_are() -> None:
    array = np.arange(5)
    batches = list(DistributedDataset(from_arrays(array).batch(2), 1))
    assert [batch.tolist() for batch in batches] == [[0, 1], [2, 3], [4]]
    assert all(np.shares_memory(batch, array) for batch in batches)
    assert list(DistributedDataset(Dataset.range(3), 1)) == [0, 1, 2]
    assert steps(DistributedDataset(Dataset.range(3).batch(2), 1, wrap=True)) == [[[0, 1]], [[2]]]


def test_several_replicas_can_not_be_bare() -> None:
    with pytest.raises(ValueError, match="got wrap=False for 2 replicas"):
        DistributedDataset([], 2, wrap=False)


def test_shares_are_placed_on_their_replicas_devices() -> None:
    places: list[tuple[list[int], int]] = []

    def place(array: Any, replica: int) -> Any:
        places.append((array.tolist(), replica))
        return array + 100 * replica

    dataset = Dataset.range(3).batch(3)
    assert steps(DistributedDataset(dataset, 2, place=place)) == [[[0, 1], [102]]]
    assert places == [([0, 1], 0), ([2], 1)]
    on_host = InputOptions(experimental_fetch_to_device=False)
    assert steps(DistributedDataset(dataset, 2, place=place, options=on_host)) == [[[0, 1], [2]]]
    assert len(places) == 2


# ------------------------------------------------------------------------------------ iterating again


def test_a_distributed_dataset_can_be_iterated_again() -> None:
    dataset = DistributedDataset(from_arrays(np.arange(4)).batch(2), 2)
    assert [sum(1 for _ in dataset) for _ in range(2)] == [2, 2]


def test_each_iteration_is_an_epoch_of_the_shuffle() -> None:
    dataset = DistributedDataset(Dataset.range(8).shuffle(seed=4).batch(8), 2)
    for epoch in range(2):
        order = np.random.default_rng([4, epoch]).permutation(8).tolist()
        assert steps(dataset) == [[order[:4], order[4:]]]


def test_a_one_shot_generator_says_so_at_the_second_iteration() -> None:
    dataset = DistributedDataset(from_generator(i for i in range(2)).batch(2), 2)
    assert steps(dataset) == [[[0], [1]]]
    with pytest.raises(RuntimeError, match="one-shot"):
        iter(dataset)
    batches = DistributedDataset((np.arange(2) for _ in range(2)), 2)
    assert len(list(batches)) == 2
    with pytest.raises(RuntimeError, match="one-shot"):
        iter(batches)


def test_the_end_is_stop_iteration_out_of_range_or_an_empty_optional() -> None:
    elements = iter(DistributedDataset(Dataset.range(2).batch(2), 2))
    assert rows(elements.get_next()) == [[0], [1]]
    with pytest.raises(OutOfRangeError):
        elements.get_next()
    with pytest.raises(StopIteration):
        next(elements)
    assert not elements.get_next_as_optional().has_value()


def test_cardinality_counts_steps() -> None:
    assert DistributedDataset(Dataset.range(10).batch(4), 2).cardinality == 3
    assert len(DistributedDataset(Dataset.range(10).batch(4), 2)) == 3
    endless = DistributedDataset(Dataset.range(10).batch(4).repeat(), 2)
    assert endless.cardinality == INFINITE_CARDINALITY
    with pytest.raises(TypeError, match="this DistributedDataset has no end"):
        len(endless)
    assert DistributedDataset(iter([]), 2).cardinality == UNKNOWN_CARDINALITY


def test_a_saved_position_goes_on_in_a_new_iterator() -> None:
    dataset = DistributedDataset(from_arrays(np.arange(6)).batch(2), 2)
    elements = iter(dataset)
    next(elements), next(elements)
    again = iter(DistributedDataset(from_arrays(np.arange(6)).batch(2), 2))
    again.restore(elements.state())
    assert [rows(step) for step in again] == [[[4], [5]]]


def test_next_in_a_step_is_refused() -> None:
    strategy = MirroredStrategy(["cpu:0", "cpu:1"])
    elements = iter(strategy.distribute_dataset(Dataset.range(4).batch(2)))
    with pytest.raises(
        ValueError, match=r"next: got a call in replica [01], and a step feeds all replicas at once"
    ):
        strategy.run(lambda: next(elements))
    with strategy.scope():
        assert rows(next(elements)) == [[0], [1]]
    strategy.close()


def test_a_mean_over_a_short_last_batch_weights_by_rows() -> None:
    strategy = MirroredStrategy(["cpu:0", "cpu:1"])
    dataset = strategy.experimental_distribute_dataset(from_arrays(np.arange(5.0)).batch(4))
    shapes = [[share.shape for share in strategy.run(lambda x: x, args=(step,)).values] for step in dataset]
    assert shapes == [[(2,), (2,)], [(1,), (0,)]]
    assert [float(strategy.reduce("MEAN", step, axis=0)) for step in dataset] == [1.5, 4.0]
    strategy.close()


def test_prefetch_before_distribution_changes_nothing() -> None:
    source = Dataset.range(10).batch(8)
    assert steps(DistributedDataset(source.prefetch(2), 4)) == steps(DistributedDataset(source, 4))


def test_an_abandoned_step_leaves_no_prefetch_thread() -> None:
    before = set(threading.enumerate())
    elements = iter(DistributedDataset(Dataset.range(100).batch(2).prefetch(2), 2))
    next(elements)
    (thread,) = set(threading.enumerate()) - before
    del elements
    thread.join(5)
    assert not thread.is_alive()


# ---------------------------------------------------------------------------------------- auto-sharding


@pytest.mark.parametrize("policy", ["AUTO", "DATA", "OFF", "FILE", "off", AutoShardPolicy.DATA], ids=str)
def test_on_one_worker_every_policy_is_the_same_and_silent(policy: Any) -> None:
    source = Dataset.range(7).batch(5)
    expected = [[[0, 1], [2, 3], [4]], [[5], [6], []]]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert steps(DistributedDataset(source, 3, auto_shard_policy=policy)) == expected
        assert steps(DistributedDataset(source.with_options(auto_shard_policy=policy), 3)) == expected


def test_an_unknown_policy_is_refused() -> None:
    with pytest.raises(ValueError, match="auto_shard_policy: got 'SOME'; need one of AUTO, DATA, FILE, OFF"):
        DistributedDataset([], 2, auto_shard_policy="SOME")


def on_two_workers(source: Dataset, replicas: int, **options: Any) -> list[list[list[Any]]]:
    """The steps of each of two workers with as many replicas."""
    return [
        steps(
            DistributedDataset(source, replicas, num_input_pipelines=2, input_pipeline_id=worker, **options)
        )
        for worker in range(2)
    ]


@pytest.mark.parametrize("policy", [None, "DATA"])
def test_workers_share_each_global_batch(policy: str | None) -> None:
    first, second = on_two_workers(Dataset.range(9).batch(5), 2, auto_shard_policy=policy)
    assert first == [[[0, 1], [2]], [[5], [6]]]
    assert second == [[[3], [4]], [[7], [8]]]


def test_a_worker_without_rows_has_as_many_steps_as_the_others() -> None:
    first, second = on_two_workers(Dataset.range(4).batch(3), 1)
    assert first == [[[0, 1]], [[3]]]
    assert second == [[[2]], [[]]]


def test_workers_with_different_numbers_of_replicas_share_by_replica() -> None:
    dataset = DistributedDataset(
        Dataset.range(7).batch(7),
        2,
        num_input_pipelines=2,
        input_pipeline_id=1,
        num_replicas_in_sync=5,
        first_replica_id=3,
    )
    assert steps(dataset) == [[[5], [6]]]
    assert dataset.per_replica_batch_sizes == (1, 1)


def test_with_policy_off_every_worker_sees_all_of_the_data() -> None:
    source = Dataset.range(9).batch(3).with_options(auto_shard_policy="OFF")
    first, second = on_two_workers(source, 1)
    assert first == [[[0, 1]], [[2]], [[3, 4]], [[5]], [[6, 7]], [[8]]]
    assert second == [[[0]], [[1, 2]], [[3]], [[4, 5]], [[6]], [[7, 8]]]
    dataset = DistributedDataset(source, 1, num_input_pipelines=2, input_pipeline_id=1)
    assert dataset.cardinality == 6
    assert dataset.per_replica_batch_sizes == (1,)
    elements = iter(dataset)
    elements.restore({"epoch": 0, "step": 3, "shuffle_seeds": []})
    assert rows(next(elements)) == [[4, 5]]


def test_several_workers_need_a_seed_to_share_shuffled_data() -> None:
    shuffled = Dataset.range(8).shuffle().batch(4)
    with pytest.raises(
        ValueError, match=r"got a shuffle without a seed and 2 workers; .* pass seed= to shuffle"
    ):
        on_two_workers(shuffled, 1)
    first, second = on_two_workers(Dataset.range(8).shuffle(seed=1).batch(4), 1)
    assert sorted(itertools.chain(*[row for step in first + second for row in step])) == list(range(8))
    assert len(on_two_workers(shuffled, 1, auto_shard_policy="OFF")[0]) == 4


def test_policy_file_with_several_workers_says_that_there_are_no_files() -> None:
    with pytest.raises(
        ValueError, match="got auto_shard_policy FILE and 2 workers; need a dataset that is read from"
    ):
        on_two_workers(Dataset.range(8).batch(4), 1, auto_shard_policy="FILE")


def test_policy_off_needs_workers_of_one_size() -> None:
    with pytest.raises(ValueError, match="got auto_shard_policy OFF with 2 replicas here and 5 on 2 workers"):
        on_two_workers(Dataset.range(8).batch(4), 2, auto_shard_policy="OFF", num_replicas_in_sync=5)


@pytest.mark.parametrize(
    ("num_replicas", "numbers"),
    [
        (0, {}),
        (2, {"num_replicas_in_sync": 3}),
        (1, {"num_input_pipelines": 2, "input_pipeline_id": 2}),
        (2, {"num_input_pipelines": 2, "num_replicas_in_sync": 3, "first_replica_id": 2}),
    ],
    ids=["none", "others_nowhere", "no_such_worker", "too_many"],
)
def test_replicas_that_do_not_fit_together_are_refused(num_replicas: int, numbers: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="distribute: got replicas"):
        DistributedDataset([], num_replicas, **numbers)


# ---------------------------------------------------------------------------------- from a function


def batches_of(n: int, size: int) -> Callable[[InputContext], Dataset]:
    return lambda _: Dataset.range(n).batch(size)


def test_elements_of_a_function_are_dealt_out_whole() -> None:
    assert steps(distribute_from_function(batches_of(12, 4), 2)) == [
        [[0, 1, 2, 3], [4, 5, 6, 7]],
        [[8, 9, 10, 11], []],
    ]
    assert steps(distribute_from_function(batches_of(7, 1), 3)) == [
        [[0], [1], [2]],
        [[3], [4], [5]],
        [[6], [], []],
    ]


def test_a_short_last_round_keeps_shapes_and_dtypes() -> None:
    def dataset_fn(_: InputContext) -> Dataset:
        return from_arrays({"x": np.ones((3, 4), np.float32)}).batch(1, drop_remainder=True)

    *_, last = distribute_from_function(dataset_fn, 2)
    assert [share.shape for share in last["x"].values] == [(1, 4), (0, 4)]
    assert {share.dtype for share in last["x"].values} == {np.dtype(np.float32)}


def test_scalars_are_dealt_in_turn_and_an_incomplete_round_is_not_dropped() -> None:
    assert [step.values for step in distribute_from_function(lambda _: Dataset.range(4), 2)] == [
        (0, 1),
        (2, 3),
    ]
    elements = iter(distribute_from_function(lambda _: Dataset.range(3), 2))
    assert next(elements).values == (0, 1)
    with pytest.raises(ValueError, match="has elements for 1 of 2 replicas, and scalars have no empty form"):
        next(elements)


def test_the_function_is_called_once_with_its_context() -> None:
    contexts = []

    def dataset_fn(context: InputContext) -> Dataset:
        contexts.append(context)
        return Dataset.range(8).batch(context.get_per_replica_batch_size(8))

    dataset = distribute_from_function(dataset_fn, 4)
    assert contexts == [InputContext(1, 0, 4)]
    assert steps(dataset) == steps(dataset) == [[[0, 1], [2, 3], [4, 5], [6, 7]]]
    assert len(contexts) == 1
    assert repr(dataset) == (
        "DistributedDatasetFromFunction(per_replica_batch_sizes=(2, 2, 2, 2), cardinality=1)"
    )


def test_a_worker_is_told_which_pipeline_it_is() -> None:
    def dataset_fn(context: InputContext) -> Dataset:
        return Dataset.range(8).shard(context.num_input_pipelines, context.input_pipeline_id).batch(2)

    second = distribute_from_function(dataset_fn, 2, num_input_pipelines=2, input_pipeline_id=1)
    assert steps(second) == [[[1, 3], [5, 7]]]


def test_with_one_pipeline_for_each_replica_the_function_is_called_for_each() -> None:
    def dataset_fn(context: InputContext) -> Dataset:
        first = 10 * context.input_pipeline_id
        return from_arrays(np.arange(first, first + 1 + 2 * context.input_pipeline_id)).batch(2)

    options = InputOptions(experimental_replication_mode="PER_REPLICA")
    dataset = distribute_from_function(dataset_fn, 2, options=options)
    assert steps(dataset) == [[[0], [10, 11]], [[], [12]]]
    assert dataset.cardinality == len(dataset) == 2


def test_a_position_of_dealt_elements_is_restored() -> None:
    make = batches_of(14, 2)
    for mode in InputReplicationMode:
        options = InputOptions(experimental_replication_mode=mode)
        elements = iter(distribute_from_function(make, 3, options=options))
        next(elements)
        again = iter(distribute_from_function(make, 3, options=options))
        again.restore(elements.state())
        expected = [rows(step) for step in elements]
        assert [rows(step) for step in again] == expected
        assert expected


def test_one_replica_gets_the_elements_of_a_function_as_they_are() -> None:
    assert [x.tolist() for x in distribute_from_function(batches_of(3, 2), 1)] == [[0, 1], [2]]


def test_a_function_may_return_any_iterable_and_must_return_one() -> None:
    assert steps(distribute_from_function(lambda _: [np.arange(1), np.arange(2)], 2)) == [[[0], [0, 1]]]
    nothing: Any = lambda _: None  # noqa: E731 - as users write it
    with pytest.raises(
        TypeError, match="the function returned NoneType; need a Dataset, or another iterable"
    ):
        distribute_from_function(nothing, 2)


def test_replicas_of_one_step_need_elements_of_one_structure() -> None:
    mixed = distribute_from_function(lambda _: [(np.zeros(1),), np.zeros(1)], 2)
    with pytest.raises(ValueError, match="in one step replica 1 got an element of structure"):
        next(iter(mixed))


@pytest.mark.parametrize(
    ("cardinality", "expected"),
    [
        (7, 4),
        (INFINITE_CARDINALITY, INFINITE_CARDINALITY),
        (UNKNOWN_CARDINALITY, UNKNOWN_CARDINALITY),
        (0, 0),
    ],
)
def test_cardinality_of_dealt_elements_counts_rounds(cardinality: int, expected: int) -> None:
    source = {
        7: Dataset.range(7),
        0: Dataset.range(0),
        INFINITE_CARDINALITY: Dataset.range(7).repeat(),
        UNKNOWN_CARDINALITY: Dataset.range(7).filter(bool),
    }[cardinality]
    assert distribute_from_function(lambda _: source, 2).cardinality == expected


# ------------------------------------------------------------------------------------------- options


def test_per_replica_batch_size_divides_the_global_one() -> None:
    assert InputContext(1, 0, 4).get_per_replica_batch_size(12) == 3
    assert InputContext().get_per_replica_batch_size(8) == 8
    with pytest.raises(
        ValueError, match="got a global batch of 10 for 4 replicas; need a multiple of 4 — take 8, or let"
    ):
        InputContext(1, 0, 4).get_per_replica_batch_size(10)


def test_one_dataset_can_not_be_replicated_for_each_replica() -> None:
    options = InputOptions(experimental_replication_mode=InputReplicationMode.PER_REPLICA)
    with pytest.raises(NotImplementedError, match="use distribute_datasets_from_function"):
        DistributedDataset([], 2, options=options)
    with pytest.raises(NotImplementedError, match="got replication mode PER_REPLICA and 2 workers"):
        distribute_from_function(batches_of(4, 2), 1, options=options, num_input_pipelines=2)


def test_options_refuse_what_they_do_not_know() -> None:
    with pytest.raises(
        ValueError, match="experimental_replication_mode: got 'PER_HOST'; need one of PER_WORKER"
    ):
        InputOptions(experimental_replication_mode="PER_HOST")
    with pytest.raises(ValueError, match="per_replica_buffer_size: got 0; need at least 1"):
        InputOptions(experimental_per_replica_buffer_size=0)


def test_a_failing_source_is_raised_as_itself_through_every_layer() -> None:
    def source() -> Iterator[Any]:
        yield np.arange(4)
        raise LookupError("row 4 is missing")

    elements = iter(DistributedDataset(from_generator(source).prefetch(), 2))
    assert rows(next(elements)) == [[0, 1], [2, 3]]
    with pytest.raises(LookupError, match="row 4 is missing"):
        next(elements)
