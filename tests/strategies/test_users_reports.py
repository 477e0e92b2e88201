"""What users of other frameworks ran into: one or more tests for each public report, named after the right behaviour."""

from __future__ import annotations

import json
import logging
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import strategies as xpd
from strategies import (
    SGD,
    CentralStorageStrategy,
    CollectiveMismatchError,
    IndexedSlices,
    MirroredStrategy,
    OneDeviceStrategy,
    Strategy,
    Variable,
    from_arrays,
    from_generator,
    get_replica_context,
)

OPTIONS = xpd.CommunicationOptions(timeout_seconds=10)
SIZES = [1, 2, 3, 4]


def mirrored(size: int) -> MirroredStrategy:
    return MirroredStrategy([f"cpu:{i}" for i in range(size)], communication_options=OPTIONS)


@pytest.fixture
def two() -> Iterator[MirroredStrategy]:
    with mirrored(2) as strategy:
        yield strategy


@pytest.fixture(params=SIZES, ids="{}_replicas".format)
def any_size(request: pytest.FixtureRequest) -> Iterator[MirroredStrategy]:
    with mirrored(request.param) as strategy:
        yield strategy


def values(strategy: Strategy, components: list[Any]) -> Any:
    return strategy.distribute_values_from_function(
        lambda context: components[context.replica_id_in_sync_group]
    )


def replica() -> xpd.ReplicaContext:
    context = get_replica_context()
    assert context is not None
    return context


def rid() -> int:
    return replica().replica_id_in_sync_group


# ------------------------------------------------- A: loss, gradient and metric reduction


# https://github.com/tensorflow/tensorflow/issues/28956, https://github.com/keras-team/keras/issues/16285
def test_the_average_losses_of_all_replicas_sum_to_the_mean_of_the_batch(two: MirroredStrategy) -> None:
    losses = two.run(
        lambda x: xpd.compute_average_loss(x, global_batch_size=4),
        (values(two, [np.array([1.0, 3]), np.array([5.0, 7])]),),
    )
    assert two.reduce("SUM", losses, axis=None) == 4.0


@pytest.mark.parametrize("weighted", [False, True], ids=["plain", "weighted"])
def test_the_loss_of_a_batch_does_not_depend_on_the_number_of_replicas(
    any_size: MirroredStrategy, weighted: bool
) -> None:
    # Nine rows: uneven shares, of which none is told its global batch size.
    loss, weight = np.arange(9.0) ** 2, np.linspace(0.5, 2.0, 9)
    dataset = any_size.distribute_dataset(from_arrays((loss, weight)).batch(9))
    with OneDeviceStrategy() as one:
        alone = one.run(lambda: xpd.compute_average_loss(loss, weight if weighted else None))
    for x, w in dataset:
        parts = any_size.run(lambda x, w: xpd.compute_average_loss(x, w if weighted else None), (x, w))
        assert np.isclose(any_size.reduce("SUM", parts, axis=None), alone, rtol=1e-15)
    assert np.isclose(alone, np.mean(loss * weight if weighted else loss), rtol=1e-15)


# https://github.com/tensorflow/tensorflow/issues/48875, https://github.com/tensorflow/tensorflow/issues/31317,
# https://github.com/meta-pytorch/torchtune/pull/1875
def test_a_mean_over_an_axis_weights_rows_not_replicas(two: MirroredStrategy) -> None:
    shares = values(two, [np.array([1.0, 2, 3]), np.array([4.0])])
    assert two.reduce("MEAN", shares, axis=0) == 2.5
    means = values(two, [2.0, 4.0])
    assert two.reduce("MEAN", means, axis=None) == 3.0


@pytest.mark.parametrize("lengths", [[3, 0, 1, 2], [0, 0, 5, 0], [1, 1, 1, 1], [7, 1, 0, 4]], ids=str)
@pytest.mark.parametrize("axis", [0, 1, (0, 1), -1])
def test_the_mean_of_any_split_is_the_mean_of_the_whole(
    lengths: list[int], axis: int | tuple[int, int]
) -> None:
    whole = np.random.default_rng(3).normal(size=(sum(lengths), 5))
    shares = np.split(whole, np.cumsum(lengths)[:-1])
    with mirrored(4) as four:
        if axis in (0, (0, 1)):
            mean = four.reduce("MEAN", values(four, list(shares)), axis=axis)
        else:  # along the other axis the shares are columns
            mean = four.reduce("MEAN", values(four, [share.T for share in shares]), axis=axis)
            axis = 0
    np.testing.assert_allclose(mean, whole.mean(axis=axis), rtol=1e-14)


# https://github.com/tensorflow/tensorflow/issues/102046, https://github.com/tensorflow/tensorflow/pull/102098,
# https://github.com/horovod/horovod/issues/1699
def test_half_precision_sums_do_not_overflow_on_the_way(two: MirroredStrategy) -> None:
    x = values(two, [np.array([-3148, -16752.0], np.float16), np.array([62624.0, 16464.0], np.float16)])
    total = two.reduce("SUM", x, axis=0)
    assert (total, total.dtype) == (np.float16(59200), np.float16)
    mean = two.reduce("MEAN", values(two, [np.float16(40000), np.float16(40000)]), axis=None)
    assert (mean, mean.dtype) == (np.float16(40000), np.float16)


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16], ids=["float16", "bfloat16"])
@pytest.mark.parametrize("way", ["all_reduce", "reduce", "reduce_axis", "reduce_to", "assign", "sparse"])
def test_half_precision_means_neither_overflow_nor_underflow(dtype: Any, way: str) -> None:
    # bfloat16 has the range of the float32 that it is summed in, so there the sum must fit that.
    large, small = (65504.0, 6e-8) if dtype is np.float16 else (8e37, 1e-40)
    x = np.array([large, small], dtype)
    assert np.all(np.isfinite(x) & (x > 0))
    with mirrored(4) as four:
        with four.scope():
            variable = Variable(np.zeros(2, dtype), aggregation="MEAN")
        same = values(four, [x] * 4)
        results: dict[str, Callable[[], Any]] = {
            "all_reduce": lambda: four.run(lambda: replica().all_reduce("MEAN", x)).values[3],
            "reduce": lambda: four.reduce("MEAN", same, axis=None),
            "reduce_axis": lambda: four.reduce("MEAN", values(four, [x[None]] * 4), axis=0),
            "reduce_to": lambda: four.extended.reduce_to("MEAN", same, "cpu:0"),
            "assign": lambda: four.run(lambda: variable.assign(x)).values[3],
            # Four times as many rows, each a quarter: exact but for the smallest number.
            "sparse": lambda: xpd.to_dense(
                four.run(lambda: replica().all_reduce("MEAN", IndexedSlices(x[:1], [0], (1,)))).values[0]
            ),
        }
        result = results[way]()
    assert result.dtype == dtype
    np.testing.assert_array_equal(result, x[: len(result)])


# https://github.com/InfiniTensor/InfiniCCL/pull/28, https://github.com/NVIDIA/nccl/issues/422,
# https://github.com/keras-team/keras/pull/20541
@pytest.mark.parametrize("dtype", ["bool", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8"])
@pytest.mark.parametrize("way", ["all_reduce", "reduce", "reduce_axis", "reduce_to", "batch_reduce_to"])
def test_integers_are_summed_and_averaged_as_numpy_does(two: MirroredStrategy, dtype: str, way: str) -> None:
    most = np.ones((), dtype) if dtype == "bool" else np.iinfo(dtype).max
    narrow = np.dtype(dtype).itemsize <= 2
    x = np.array([most if narrow else 7, 1], dtype)
    parts = values(two, [x, x])
    ways: dict[str, Callable[[str], Any]] = {
        "all_reduce": lambda op: two.run(lambda: replica().all_reduce(op, x)).values[1],
        "reduce": lambda op: two.reduce(op, parts, axis=None),
        "reduce_axis": lambda op: two.reduce(op, values(two, [x[None], x[None]]), axis=0),
        "reduce_to": lambda op: two.extended.reduce_to(op, parts, "cpu:0"),
        "batch_reduce_to": lambda op: two.extended.batch_reduce_to(op, [(parts, "cpu:0")])[0],
    }
    for op, expected in (("SUM", np.sum([x, x], axis=0)), ("MEAN", np.mean([x, x], axis=0))):
        result = ways[way](op)
        np.testing.assert_array_equal(result, expected)
        assert result.dtype == (expected.dtype if narrow or op == "MEAN" else x.dtype)


def test_the_reported_integers(two: MirroredStrategy) -> None:
    assert two.reduce("MEAN", values(two, [np.int32(1), np.int32(2)]), axis=None) == 1.5
    total = two.reduce("SUM", values(two, [np.int8(120), np.int8(100)]), axis=None)
    assert (total, total.dtype) == (220, np.int64)
    for sync in ("ON_WRITE", "ON_READ"):
        with two.scope(), pytest.raises(ValueError, match=r"int32.*MEAN"):
            Variable(np.int32(0), aggregation="MEAN", synchronization=sync)


# ------------------------------------------------------------ B: distributed variables


# https://github.com/tensorflow/tensorflow/issues/56875, https://github.com/tensorflow/tensorflow/issues/40366,
# https://github.com/keras-team/keras-io/issues/558, https://github.com/tensorflow/decision-forests/issues/13
@pytest.mark.parametrize("dtype", [np.float32, np.int64, np.float16])
@pytest.mark.parametrize(("write", "sign"), [("assign_add", 1), ("assign_sub", -1)])
@pytest.mark.parametrize("in_scope", [True, False], ids=["in the scope", "outside"])
def test_adding_across_replicas_to_a_summed_variable_counts_once(
    any_size: MirroredStrategy, dtype: Any, write: str, sign: int, in_scope: bool
) -> None:
    with any_size.scope():
        variable = Variable(np.zeros(2, dtype), synchronization="ON_READ", aggregation="SUM")
    any_size.run(lambda: variable.assign_add(np.ones(2, dtype)))
    before = variable.read_value()
    if in_scope:
        with any_size.scope():
            getattr(variable, write)(np.array([5, 3], dtype))
    else:
        getattr(variable, write)(np.array([5, 3], dtype))
    np.testing.assert_array_equal(variable.read_value(), before + sign * np.array([5, 3]))
    assert variable.read_value().dtype == dtype


# https://github.com/tensorflow/tensorflow/issues/23792, https://github.com/huggingface/transformers/issues/2794,
# https://github.com/tensorflow/tensorflow/issues/23986
@pytest.mark.parametrize(
    "write", ["assign", "assign_add", "assign_sub", "scatter_add", "scatter_update", "scatter_mul"]
)
@pytest.mark.parametrize(
    "make",
    [mirrored, lambda n: CentralStorageStrategy(["cpu:0", "cpu:1"], "cpu:0")],
    ids=["mirrored", "central"],
)
def test_a_write_without_an_aggregation_says_which_variable_and_what_to_choose(
    make: Callable[[int], Strategy], write: str
) -> None:
    with make(2) as strategy:
        with strategy.scope():
            variable = Variable(np.zeros(2), name="acc")
        value: Any = IndexedSlices(np.ones(1), [0]) if write.startswith("scatter") else np.ones(2)
        with pytest.raises(ValueError) as raised:  # noqa: PT011  # the words are the test
            strategy.run(lambda: getattr(variable, write)(value))
        for word in ("acc", write, "aggregation=", "synchronization=ON_READ", "test_users_reports.py:"):
            assert word in str(raised.value)
        np.testing.assert_array_equal(variable.read_value(), [0, 0])


# https://github.com/tensorflow/tensorflow/issues/35347, https://github.com/tensorflow/tensorflow/issues/18222
@pytest.mark.parametrize(
    ("aggregation", "expected"), [("SUM", sum), ("MEAN", np.mean), ("ONLY_FIRST_REPLICA", min)]
)
def test_writes_of_replicas_become_one_as_the_aggregation_says(
    any_size: MirroredStrategy, aggregation: str, expected: Callable[[Any], float]
) -> None:
    with any_size.scope():
        variable = Variable(0.0, aggregation=aggregation)
    any_size.run(lambda v: v.assign(rid() + 1.0), (variable,))
    assert variable.read_value() == expected(range(1, any_size.num_replicas_in_sync + 1))
    xpd.assert_replicas_equal(variable)


@pytest.mark.parametrize("aggregation", ["NONE", "SUM", "MEAN", "ONLY_FIRST_REPLICA"])
def test_what_is_already_identical_costs_no_collective(two: MirroredStrategy, aggregation: str) -> None:
    with two.scope():
        variable = Variable(np.zeros(2), aggregation=aggregation)

    def step() -> None:
        # Were there a meeting, these writes of different kinds and numbers would not fit together.
        if rid() == 0:
            variable.assign([3.0, 4.0], already_identical=True)
        else:
            variable.assign([1.0, 1.0], already_identical=True)
            variable.assign_add([2.0, 3.0], already_identical=True)

    two.run(step)
    np.testing.assert_array_equal(variable.read_value(), [3, 4])
    xpd.assert_replicas_equal([variable])


# https://github.com/dmonterom/face_recognition_TF2/issues/4, https://github.com/keras-team/keras/issues/20045,
# https://github.com/tensorflow/tensorflow/issues/32561
@pytest.mark.parametrize("made", ["under none", "under another"])
def test_training_a_variable_of_no_or_another_strategy_names_it_and_the_scope(
    two: MirroredStrategy, made: str
) -> None:
    with mirrored(2) as other:
        if made == "under none":
            variable = Variable(np.zeros(2), name="kernel")
        else:
            with other.scope():
                variable = Variable(np.zeros(2), name="kernel")
        with two.scope():
            own = Variable(np.zeros(2), name="bias")
            optimizer = SGD(0.1)

        def step() -> None:
            optimizer.apply_gradients([(np.ones(2), own), (np.ones(2), variable)])

        with pytest.raises((ValueError, RuntimeError), match=r"kernel.*scope\(\)"):
            two.run(step)
        np.testing.assert_array_equal(own.read_value(), [0, 0])  # refused before anything is exchanged


def test_variables_made_lazily_in_the_first_step_are_mirrored_once(any_size: MirroredStrategy) -> None:
    made: list[Any] = []

    def step() -> Any:
        if not made or made[0] is None:
            kernel = Variable(lambda: np.random.default_rng().normal(size=3), name="kernel")
            if rid() == 0:
                made[:] = [kernel]
            replica().merge_call(lambda strategy: None)
        return made[0]

    first = any_size.run(step)
    assert any_size.run(step) is first
    assert len(any_size.local_results(first)) == any_size.num_replicas_in_sync
    xpd.assert_replicas_equal(first)


# https://github.com/horovod/horovod/issues/1774, https://github.com/horovod/horovod/issues/1964
@pytest.mark.parametrize("synchronization", ["ON_WRITE", "ON_READ"])
def test_random_initial_values_are_the_same_on_every_replica(
    any_size: MirroredStrategy, synchronization: str
) -> None:
    with any_size.scope():
        variable = Variable(lambda: np.random.default_rng().normal(size=3), synchronization=synchronization)
    copies = any_size.local_results(variable)
    assert len(copies) == any_size.num_replicas_in_sync
    assert all(np.array_equal(copy, copies[0]) for copy in copies)
    assert np.any(copies[0] != 0)
    xpd.assert_replicas_equal([variable])


def test_copies_that_drifted_apart_are_found_and_named(two: MirroredStrategy) -> None:
    with two.scope():
        equal, drifted = Variable(np.zeros(3)), Variable(np.zeros((2, 2)), name="kernel")
    two.extended.update(
        drifted, lambda copy, x: copy.assign(x), (values(two, [np.zeros((2, 2)), np.eye(2)[::-1]]),)
    )
    xpd.assert_replicas_equal(equal)
    with pytest.raises(
        AssertionError, match=r"kernel: copies 0 and 1 differ in 2 of 4 elements, first at \(0, 1\)"
    ):
        xpd.assert_replicas_equal([equal, drifted])


# --------------------------------------------------------------- C: batch normalisation


# https://github.com/tensorflow/tensorflow/issues/42111
def test_collectives_in_another_order_are_told_with_their_names(two: MirroredStrategy) -> None:
    seen: list[CollectiveMismatchError] = []

    def step() -> None:
        try:
            for name in ("a", "b") if rid() == 0 else ("b", "a"):
                replica().all_reduce("SUM", np.zeros(2), name=name)
        except CollectiveMismatchError as error:
            seen.append(error)
            raise

    start = time.perf_counter()
    with pytest.raises(CollectiveMismatchError) as raised:
        two.run(step)
    assert time.perf_counter() - start < 2
    assert len(seen) == 2  # on all replicas
    for word in (
        "seq 0",
        "replica 0 calls all_reduce 'a' SUM",
        "replica 1 calls all_reduce 'b' SUM",
        "float64",
    ):
        assert word in str(raised.value)
    assert [call and call.split()[1] for call in raised.value.calls] == ["'a'", "'b'"]


def test_a_mismatch_after_many_calls_tells_which_one_it_was(two: MirroredStrategy) -> None:
    def step() -> None:
        for number in range(7):
            replica().all_reduce("SUM", np.zeros(2), name="odd" if number == 6 and rid() else "even")

    with pytest.raises(CollectiveMismatchError, match="seq 6"):
        two.run(step)


# ----------------------------------------------------------- D: datasets and uneven input


# https://github.com/tensorflow/tensorflow/issues/36224, https://github.com/tensorflow/tensorflow/issues/41657,
# https://github.com/tensorflow/tensorflow/issues/34358
def test_an_empty_share_at_the_end_is_an_array_without_rows(two: MirroredStrategy) -> None:
    batches = list(two.distribute_dataset(from_arrays(np.arange(5.0)).batch(4)))
    assert [float(two.reduce("MEAN", batch, axis=0)) for batch in batches] == [1.5, 4.0]
    rows, dtype = two.run(lambda x: (len(x), str(x.dtype)), (batches[1],))
    assert (rows.values, dtype.values) == ((1, 0), ("float64", "float64"))
    assert [share.shape for share in batches[1].values] == [(1,), (0,)]


@pytest.mark.parametrize("rows", range(1, 10))
@pytest.mark.parametrize("dtype", [np.float32, np.int16])
def test_any_number_of_rows_gives_the_mean_and_loss_of_the_whole(
    any_size: MirroredStrategy, rows: int, dtype: Any
) -> None:
    x = (np.arange(rows * 2).reshape(rows, 2) % 5).astype(dtype)
    losses, counts = [], []
    for batch in any_size.distribute_dataset(from_arrays({"x": x}).batch(4)):
        for share in any_size.local_results(batch["x"]):
            assert share.shape[1:] == (2,)
            assert share.dtype == dtype
        whole = any_size.gather(batch["x"], 0)
        np.testing.assert_allclose(any_size.reduce("MEAN", batch["x"], axis=0), whole.mean(axis=0), rtol=1e-6)
        parts = any_size.run(lambda x: xpd.compute_average_loss(x.sum(axis=1)), (batch["x"],))
        losses.append(any_size.reduce("SUM", parts, axis=None))
        counts.append(len(whole))
    assert np.isclose(np.dot(losses, counts), x.sum())
    assert not np.isnan(losses).any()


# https://github.com/keras-team/keras-io/issues/316, https://github.com/OpenNMT/OpenNMT-tf/pull/540,
# https://github.com/OpenNMT/OpenNMT-tf/issues/542
def test_the_batch_size_is_that_of_all_replicas_together() -> None:
    with mirrored(3) as three:
        dataset = three.distribute_dataset(from_arrays(np.arange(5)).batch(5))
        batch = next(iter(dataset))
        assert [len(share) for share in three.local_results(batch)] == [2, 2, 1]
        np.testing.assert_array_equal(three.gather(batch, 0), np.arange(5))
        assert (dataset.global_batch_size, dataset.per_replica_batch_sizes) == (5, (2, 2, 1))
        assert "global_batch_size=5, per_replica_batch_sizes=(2, 2, 1)" in repr(dataset)


@pytest.mark.parametrize("rows", [0, 1, 3, 4, 5, 11])
def test_every_leaf_is_split_along_its_first_axis_and_sizes_differ_by_one(
    any_size: MirroredStrategy, rows: int
) -> None:
    element = {
        "x": np.arange(rows * 6.0).reshape(rows, 2, 3),
        "pair": (np.arange(rows), [np.arange(rows) > 1]),
    }
    (batch,) = any_size.distribute_dataset([element])
    for part, whole in (
        (batch["x"], element["x"]),
        (batch["pair"][0], np.arange(rows)),
        (batch["pair"][1][0], np.arange(rows) > 1),
    ):
        sizes = [len(share) for share in any_size.local_results(part)]
        assert max(sizes) - min(sizes) <= 1
        assert sizes == sorted(sizes, reverse=True)
        np.testing.assert_array_equal(any_size.gather(part, 0), whole)


# https://github.com/pytorch/pytorch/issues/38174, https://github.com/pytorch/pytorch/pull/42577,
# https://github.com/pytorch/pytorch/issues/47250
def test_a_replica_without_data_does_not_count_in_a_weighted_mean() -> None:
    with mirrored(4) as four:
        g = values(four, [np.ones(1), np.ones(1), np.ones(1), None])
        means = four.run(lambda g: replica().all_reduce("MEAN", g, weight=0 if g is None else 1), (g,))
        assert [mean.tolist() for mean in means.values] == [[1.0]] * 4


def test_a_mean_weighted_by_examples_is_that_of_all_examples(any_size: MirroredStrategy) -> None:
    rows = np.random.default_rng(0).normal(size=(7, 3)).astype(np.float32)
    (batch,) = any_size.distribute_dataset([rows])
    means = any_size.run(
        lambda x: replica().all_reduce("MEAN", x.sum(axis=0) / max(1, len(x)), weight=len(x)), (batch,)
    )
    for mean in any_size.local_results(means):
        np.testing.assert_allclose(mean, rows.mean(axis=0), rtol=1e-6)
        assert mean.dtype == np.float32


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("SUM", 1.0, 1), "MEAN"),
        (("MEAN", 1.0, -1), "weight >= 0"),
        (("MEAN", None, 1), "0 with None"),
        (("MEAN", None, 0), "not None from every"),
    ],
)
def test_weights_without_a_meaning_are_refused(
    two: MirroredStrategy, arguments: tuple[Any, Any, Any], words: str
) -> None:
    op, value, weight = arguments
    with pytest.raises(ValueError, match=words):
        two.run(lambda: replica().all_reduce(op, value, weight=weight))


# https://github.com/tensorflow/tensorflow/issues/49828, https://github.com/tensorflow/tensorflow/issues/45157,
# https://github.com/tensorflow/tensorflow/issues/49048
@pytest.mark.parametrize("policy", ["AUTO", "DATA", "FILE", "OFF"])
def test_on_one_worker_the_auto_shard_policy_changes_nothing_and_is_silent(
    two: MirroredStrategy, policy: str, caplog: pytest.LogCaptureFixture
) -> None:
    dataset = from_arrays(np.arange(7)).batch(4)
    with warnings.catch_warnings(), caplog.at_level(logging.DEBUG):
        warnings.simplefilter("error")
        plain = [two.local_results(batch) for batch in two.distribute_dataset(dataset)]
        chosen = [
            two.local_results(b)
            for b in two.distribute_dataset(dataset.with_options(auto_shard_policy=policy))
        ]
    for (a, b), (c, d) in zip(plain, chosen, strict=True):
        np.testing.assert_array_equal(a, c)
        np.testing.assert_array_equal(b, d)
    assert not caplog.records


def test_on_several_workers_off_shows_all_data_to_each_and_data_a_part() -> None:
    def seen(policy: str) -> list[list[int]]:
        dataset = from_arrays(np.arange(4)).batch(2)
        workers = [
            xpd.DistributedDataset(
                dataset, 1, auto_shard_policy=policy, num_input_pipelines=2, input_pipeline_id=worker
            )
            for worker in range(2)
        ]
        return [
            sorted(int(row) for step in worker for share in step.values for row in share)
            for worker in workers
        ]

    assert seen("OFF") == [[0, 1, 2, 3], [0, 1, 2, 3]]
    first, second = seen("DATA")
    assert not set(first) & set(second)
    assert sorted(first + second) == [0, 1, 2, 3]
    with pytest.raises(ValueError, match="FILE"):
        seen("FILE")


# https://github.com/tensorflow/tensorflow/issues/36153, https://github.com/tensorflow/tensorflow/issues/43039,
# https://github.com/tensorflow/tensorflow/issues/32076
def test_every_epoch_has_all_batches_if_the_source_can_start_over(two: MirroredStrategy) -> None:
    sources: list[Any] = [
        from_arrays(np.arange(4)).batch(2),
        from_generator(lambda: (np.int64(i) for i in range(4))).batch(2),
        [np.arange(2), np.arange(2)],
    ]
    for source in sources:
        dataset = two.distribute_dataset(source)
        assert [sum(1 for _ in dataset) for _ in range(3)] == [2, 2, 2]


@pytest.mark.parametrize("source", ["generator", "iterator", "dataset"])
def test_a_source_that_can_not_start_over_says_so_at_the_second_epoch(
    two: MirroredStrategy, source: str
) -> None:
    sources: dict[str, Any] = {
        "generator": (np.full(2, i) for i in range(2)),
        "iterator": iter([np.zeros(2), np.ones(2)]),
        "dataset": from_generator(np.int64(i) for i in range(4)).batch(2),
    }
    dataset = two.distribute_dataset(sources[source])
    assert len(list(dataset)) == 2
    with pytest.raises(RuntimeError, match="one-shot"):
        iter(dataset)


# ----------------------------------------------- E: hangs, failures and desynchronisation


# https://github.com/Lightning-AI/pytorch-lightning/issues/6430,
# https://github.com/EvolvingLMMs-Lab/lmms-eval/pull/1304, https://github.com/mlc-ai/pith-train/pull/31
@pytest.mark.parametrize(
    "wait", ["all_reduce", "all_gather", "merge_call", "assign", "sparse", "barrier", "Variable"]
)
@pytest.mark.parametrize("failing", [0, 1, 2])
def test_an_error_in_one_replica_releases_the_others_and_is_raised_as_itself(wait: str, failing: int) -> None:
    with mirrored(3) as three:
        with three.scope():
            variable = Variable(0.0, aggregation="SUM")
        waits: dict[str, Callable[[], Any]] = {
            "all_reduce": lambda: replica().all_reduce("SUM", np.ones(1)),
            "all_gather": lambda: replica().all_gather(np.ones(1), 0),
            "merge_call": lambda: replica().merge_call(lambda strategy: None),
            "assign": lambda: variable.assign(1.0),
            "sparse": lambda: replica().all_reduce("SUM", IndexedSlices(np.ones(1), [0])),
            "barrier": lambda: replica().communicator.barrier(),
            "Variable": lambda: Variable(0.0),
        }

        def step() -> Any:
            if rid() == failing:
                raise KeyError("boom")
            return waits[wait]()

        start = time.perf_counter()
        with pytest.raises(KeyError, match="boom") as raised:
            three.run(step)
        assert time.perf_counter() - start < 2
        assert f"replica {failing} of 3" in "".join(raised.value.__notes__)
        assert three.run(lambda: replica().all_reduce("SUM", np.ones(1))).values[0].tolist() == [3.0]


# https://github.com/horovod/horovod/issues/1559, https://github.com/horovod/horovod/issues/398,
# https://github.com/horovod/horovod/issues/336
@pytest.mark.parametrize(
    ("first", "second", "words"),
    [
        (np.ones(2), np.ones(3), ["(2,)", "(3,)"]),
        (np.ones(2, "f4"), np.ones(2, "f8"), ["float32", "float64"]),
        (np.ones((1, 2)), np.ones((2, 1)), ["(1, 2)", "(2, 1)"]),
        (np.float64(1), np.ones(1), ["()", "(1,)"]),
        (np.ones(2, "i4"), np.ones(2, "u4"), ["int32", "uint32"]),
    ],
    ids=["lengths", "precisions", "transposed", "scalar", "signs"],
)
@pytest.mark.parametrize("collective", ["all_reduce", "coalesced", "broadcast", "reduce", "all_gather"])
def test_arrays_that_differ_between_replicas_are_listed(
    two: MirroredStrategy, collective: str, first: Any, second: Any, words: list[str]
) -> None:
    calls: dict[str, Callable[[Any], Any]] = {
        "all_reduce": lambda x: replica().all_reduce("SUM", x),
        "coalesced": lambda x: replica().all_reduce("SUM", [np.zeros(1), {"x": x}]),
        "broadcast": lambda x: replica().communicator.broadcast(x),
        "reduce": lambda x: replica().communicator.reduce(x),
        # Lengths along the axis may differ, so they stand one axis further.
        "all_gather": lambda x: replica().all_gather(np.asarray(x)[None], 0),
    }
    with pytest.raises(CollectiveMismatchError) as raised:
        two.run(calls[collective], (values(two, [first, second]),))
    if collective != "all_gather":
        assert not [word for word in words if word not in str(raised.value)]
    assert None not in raised.value.calls
    assert two.run(lambda: replica().all_reduce("SUM", 1.0)).values == (2.0, 2.0)


# https://github.com/tensorflow/tensorflow/issues/53748, https://github.com/tensorflow/tensorflow/issues/48753,
# https://github.com/NVIDIA/nccl/issues/13, https://github.com/NVIDIA/nccl/issues/208
def test_a_thousand_steps_with_a_collective_each_do_not_hang(two: MirroredStrategy) -> None:
    for _ in range(1000):
        results = two.run(lambda: replica().all_reduce("SUM", np.ones(4)))
        assert [result.tolist() for result in results.values] == [[2.0] * 4] * 2


def test_threads_that_come_one_after_the_other_each_find_the_strategy_usable(two: MirroredStrategy) -> None:
    # The system gives a new thread the number of one that has ended, which must not be taken for the same one.
    totals: list[float] = []

    def train() -> None:
        for _ in range(20):
            totals.append(two.run(lambda: replica().all_reduce("SUM", 1.0)).values[0])

    for number in range(1, 11):
        thread = threading.Thread(target=train, daemon=True)
        thread.start()
        thread.join(10)
        assert not thread.is_alive()
        assert totals == [2.0] * (20 * number)


def test_two_threads_take_turns_with_one_strategy_and_do_not_with_two(two: MirroredStrategy) -> None:
    results: dict[int, list[float]] = {}

    def train(strategy: Strategy, number: int) -> None:
        totals = (strategy.run(lambda: replica().all_reduce("SUM", float(number))) for _ in range(100))
        results[number] = [total.values[0] for total in totals]

    with mirrored(2) as other:
        jobs = [(two, 1), (two, 2), (other, 3)]
        threads = [threading.Thread(target=train, args=job, daemon=True) for job in jobs]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(20)
        assert not any(thread.is_alive() for thread in threads)
    assert results == {number: [2.0 * number] * 100 for number in (1, 2, 3)}


# https://github.com/tensorflow/tensorflow/issues/27716, https://github.com/keras-team/tf-keras/issues/301,
# https://github.com/keras-team/keras/issues/18666
def test_collectives_may_stand_in_a_branch_that_all_replicas_take(two: MirroredStrategy) -> None:
    totals: list[float] = []
    with two.scope():
        variable = Variable(0.0)
        optimizer = SGD(1.0)

    def step(number: int) -> None:
        if number % 2:
            replica().merge_call(
                lambda strategy, x: totals.append(strategy.reduce("SUM", x, axis=None)), (float(rid()),)
            )
            optimizer.apply_gradients([(1.0, variable)])

    for number in range(4):
        two.run(step, (number,))
    assert totals == [1.0, 1.0]
    assert float(variable) == -4.0


def test_a_merge_call_sums_what_is_the_same_on_all_replicas_only_where_it_is_wrapped(
    two: MirroredStrategy,
) -> None:
    totals: list[Any] = []

    def step() -> None:
        # A fresh array each, though equal: two values to sum.
        replica().merge_call(
            lambda strategy, x: totals.append(strategy.reduce("SUM", x, axis=None)), (np.ones(1),)
        )

    two.run(step)
    assert [total.tolist() for total in totals] == [[2.0]]


def test_a_branch_that_some_replicas_take_is_a_mismatch(two: MirroredStrategy) -> None:
    for branch in (
        lambda: replica().merge_call(lambda strategy: None),
        lambda: replica().all_reduce("SUM", 1.0),
    ):
        with pytest.raises(CollectiveMismatchError, match="replica 0 has finished without another call"):
            two.run(lambda call=branch: call() if rid() else None)
        with pytest.raises(CollectiveMismatchError, match=r"(merge_call|all_reduce).*barrier"):
            two.run(lambda call=branch: call() if rid() == 0 else replica().communicator.barrier())
    assert two.run(rid).values == (0, 1)


# https://github.com/tensorflow/tensorflow/issues/21180, https://github.com/tensorflow/tensorflow/issues/30947
@pytest.mark.parametrize(
    "call",
    [
        partial(xpd.all_reduce, "SUM", 1.0),
        partial(xpd.all_gather, np.ones(1), 0),
        partial(xpd.merge_call, print),
    ],
)
def test_a_call_for_replicas_says_where_it_is_and_what_it_needs(
    two: MirroredStrategy, call: Callable[[], Any]
) -> None:
    with two.scope():
        assert get_replica_context() is None
        variable = Variable(0.0)
        with pytest.raises(RuntimeError, match=r"across the replicas.*needs replica context.*strategy\.run"):
            call()
    with pytest.raises(RuntimeError, match="needs replica context"):
        two.run(lambda: replica().merge_call(lambda strategy: call()))
    with pytest.raises(RuntimeError, match="needs replica context"):
        two.extended.update(variable, lambda component: call())


def test_a_call_across_replicas_says_where_it_is_and_what_it_needs(two: MirroredStrategy) -> None:
    calls: list[Callable[[], Any]] = [
        lambda: two.run(lambda: 1),
        lambda: two.reduce("SUM", 1.0, axis=None),
        lambda: two.gather(np.ones(1), 0),
        lambda: two.distribute_dataset([np.ones(2)]),
        lambda: two.scope().__enter__(),
        lambda: two.extended.broadcast_to(1.0, "cpu:0"),
    ]
    for call in calls:
        with pytest.raises(
            RuntimeError, match=r"inside replica \d.*needs the view across replicas.*outside strategy\.run"
        ):
            two.run(call)


# ---------------------------------------------------- of later themes, what exists already


# https://github.com/tensorflow/tensorflow/issues/33656, https://github.com/tensorflow/tensorflow/issues/21470,
# https://github.com/tensorflow/tensorflow/issues/28430, https://github.com/tensorflow/tensorflow/issues/44281
def test_without_nccl_the_default_works_and_asking_for_it_is_refused_when_made() -> None:
    with MirroredStrategy(["cpu:0", "cpu:1"]) as default:
        assert default.run(lambda: replica().all_reduce("SUM", 1.0)).values == (2.0, 2.0)
    asked: list[Callable[[], Any]] = [
        lambda: MirroredStrategy(["cpu:0", "cpu:1"], cross_device_ops=xpd.NcclAllReduce()),
        lambda: MirroredStrategy(
            ["cpu:0"], communication_options=xpd.CommunicationOptions(implementation="nccl")
        ),
    ]
    for make in asked:
        with pytest.raises(RuntimeError, match=r"NVIDIA GPUs.*cpu:0|cpu:0.*NVIDIA GPUs") as raised:
            make()
        for available in ("ReductionToOneDevice", "HierarchicalCopyAllReduce", "None"):
            assert available in str(raised.value)


# https://github.com/pytorch/pytorch/issues/62283, https://github.com/pytorch/pytorch/pull/163712,
# https://github.com/pytorch/pytorch/issues/79043
LAYOUTS: dict[str, Callable[[Any], Any]] = {
    "C": np.ascontiguousarray,
    "Fortran": np.asfortranarray,
    "transposed": lambda a: np.ascontiguousarray(a.T).T,
    "strided": lambda a: np.repeat(a, 2, axis=1)[:, ::2],
    "reversed": lambda a: np.ascontiguousarray(a[::-1])[::-1],
}


@pytest.mark.parametrize("layout", list(LAYOUTS))
@pytest.mark.parametrize(
    "way", ["all_reduce", "all_gather", "reduce", "gather", "assign", "broadcast", "apply"]
)
@pytest.mark.parametrize("shape", [(2, 3), (700, 900)], ids=str)
def test_arrays_are_combined_by_index_whatever_their_layout(
    two: MirroredStrategy, layout: str, way: str, shape: tuple[int, int]
) -> None:
    a = np.random.default_rng(1).normal(size=shape)
    parts = [a, LAYOUTS[layout](a)]
    np.testing.assert_array_equal(parts[1], a)
    x = values(two, parts)
    with two.scope():
        variable = Variable(np.zeros(shape), aggregation="SUM")
        optimizer = SGD(1.0)

    def apply(x: Any) -> Any:
        optimizer.apply_gradients([(x, variable)])
        return -variable.read_value()

    ways: dict[str, tuple[Callable[[], Any], Any]] = {
        "all_reduce": (lambda: two.run(lambda x: replica().all_reduce("SUM", x), (x,)).values[1], 2 * a),
        "all_gather": (
            lambda: two.run(lambda x: replica().all_gather(x, 1), (x,)).values[0],
            np.hstack([a, a]),
        ),
        "reduce": (lambda: two.reduce("SUM", x, axis=None), 2 * a),
        "gather": (lambda: two.gather(x, 0), np.vstack([a, a])),
        "assign": (lambda: two.run(lambda x: variable.assign(x), (x,)).values[0], 2 * a),
        "broadcast": (lambda: two.run(lambda x: replica().communicator.broadcast(x, 1), (x,)).values[0], a),
        "apply": (lambda: two.run(apply, (x,)).values[1], 2 * a),
    }
    result, expected = ways[way]
    np.testing.assert_array_equal(result(), expected)


# https://github.com/tensorflow/tensorflow/issues/39512, https://github.com/tensorflow/tensorflow/issues/53748
def test_replicas_overlap_where_the_interpreter_is_released() -> None:
    with mirrored(4) as four:
        four.run(rid)  # the threads are made with the first step
        start = time.perf_counter()
        four.run(lambda: time.sleep(0.2))
        assert time.perf_counter() - start < 0.35


# https://github.com/tensorflow/tensorflow/issues/39922
def test_a_task_out_of_range_is_refused_when_tf_config_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    from collectives.clusters import ClusterTask

    config = {"cluster": {"worker": ["a:1", "b:1"]}, "task": {"type": "worker", "index": 2}}
    monkeypatch.setenv("TF_CONFIG", json.dumps(config))
    with pytest.raises(ValueError, match=r"index 2.*2 tasks.*\(0\.\.1\)"):
        ClusterTask.from_tf_config()
