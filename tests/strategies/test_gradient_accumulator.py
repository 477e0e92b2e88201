"""Several micro-batches for one update, brought together once."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from strategies import (
    SGD,
    Checkpoint,
    CommunicationOptions,
    GradientAccumulator,
    IndexedSlices,
    LossScaleOptimizer,
    MirroredStrategy,
    ReplicaContextError,
    Variable,
    assert_replicas_equal,
    get_replica_context,
    to_dense,
)


@pytest.fixture(params=[1, 2, 3, 5], ids="{}_replicas".format)
def strategy(request: pytest.FixtureRequest) -> Iterator[MirroredStrategy]:
    options = CommunicationOptions(timeout_seconds=20)
    devices = [f"cpu:{i}" for i in range(request.param)]
    with MirroredStrategy(devices, communication_options=options) as strategy:
        yield strategy


@pytest.fixture
def two() -> Iterator[MirroredStrategy]:
    with MirroredStrategy(["cpu:0", "cpu:1"]) as strategy:
        yield strategy


def replica_id() -> int:
    replica = get_replica_context()
    assert replica is not None
    return replica.replica_id_in_sync_group


def num_collectives(strategy: MirroredStrategy) -> int:
    """How many the first replica has taken part in."""
    return len(strategy.flight_recorder.calls(0))


def test_the_last_micro_batch_is_the_one_that_is_synchronised(two: MirroredStrategy) -> None:
    """B74."""
    accumulator = GradientAccumulator(every=2, reduce="MEAN")
    micro = {0: [1.0, 3.0], 1: [2.0, 5.0]}

    def step() -> Any:
        results = [accumulator.step([np.array(g)]) for g in micro[replica_id()]]
        assert results[0] is None
        assert results[1] is not None
        return results[1][0]

    for _ in range(3):
        assert [float(r) for r in two.experimental_local_results(two.run(step))] == [5.5, 5.5]


@pytest.mark.parametrize("reduce", ["SUM", "MEAN", None])
@pytest.mark.parametrize("every", [1, 2, 3])
def test_sums_over_micro_batches_and_replicas_are_numpys(
    strategy: MirroredStrategy, every: int, reduce: str | None
) -> None:
    n = strategy.num_replicas_in_sync
    micro = np.random.default_rng(1).normal(size=(2 * every, n, 3))
    accumulator = GradientAccumulator(every, reduce)
    found: list[Any] = []
    for batch in micro:
        results = strategy.run(lambda: accumulator.step([batch[replica_id()], np.float32(1)]))  # noqa: B023  # called at once
        found.append(strategy.experimental_local_results(results))
    assert all(result is None for number, own in enumerate(found, 1) if number % every for result in own)
    for half in range(2):
        own = micro[half * every : (half + 1) * every].sum(axis=0)
        together = {"SUM": own.sum(axis=0), "MEAN": own.mean(axis=0), None: None}[reduce]
        for replica, result in enumerate(found[(half + 1) * every - 1]):
            expected = own[replica] if together is None else together
            np.testing.assert_allclose(result[0], expected, rtol=1e-12)
            assert float(result[1]) == (every * n if reduce == "SUM" else every)


def test_only_one_all_reduce_is_made_for_all_micro_batches_and_gradients(two: MirroredStrategy) -> None:
    accumulator = GradientAccumulator(every=4)

    def step() -> None:
        for _ in range(4):
            accumulator.step([np.ones(3), np.ones((2, 2))], weight=2.0)

    before = num_collectives(two)
    two.run(step)
    assert num_collectives(two) == before + 1
    assert two.flight_recorder.calls(0)[-1].call.kind == "all_reduce"


def test_weights_make_the_mean_of_all_examples(strategy: MirroredStrategy) -> None:
    n = strategy.num_replicas_in_sync
    rng = np.random.default_rng(2)
    counts = rng.integers(0, 5, (3, n))  # a share may be empty
    counts[0, 0] = 1
    examples = [[rng.normal(size=(count, 2)) for count in row] for row in counts]
    accumulator = GradientAccumulator(every=3)

    def step() -> Any:
        result = None
        for row in examples:
            own = row[replica_id()]
            mean = own.mean(axis=0) if len(own) else np.zeros(2)
            result = accumulator.step([mean], weight=len(own))
        assert result is not None
        return result[0]

    expected = np.concatenate([own for row in examples for own in row]).mean(axis=0)
    for result in strategy.experimental_local_results(strategy.run(step)):
        np.testing.assert_allclose(result, expected)


@pytest.mark.parametrize("weight", [None, 2.0])
def test_sparse_gradients_stay_sparse_with_every_row_once(
    strategy: MirroredStrategy, weight: float | None
) -> None:
    n = strategy.num_replicas_in_sync
    rng = np.random.default_rng(3)
    own = [
        [IndexedSlices(rng.normal(size=(4, 2)), rng.integers(0, 6, 4), (6, 2)) for _ in range(n)]
        for _ in "ab"
    ]
    accumulator = GradientAccumulator(every=2)

    def step() -> Any:
        accumulator.step([np.ones(1), own[0][replica_id()]], weight)
        result = accumulator.step([np.ones(1), own[1][replica_id()]], weight)
        assert result is not None
        return result

    expected = np.sum([to_dense(slices) for row in own for slices in row], axis=0)
    if weight is not None:
        expected = expected / (2 * n)
    for dense, slices in strategy.experimental_local_results(strategy.run(step)):
        np.testing.assert_allclose(dense, [1.0 if weight else 2.0 * n])
        assert isinstance(slices, IndexedSlices)
        assert (np.diff(slices.indices) > 0).all()
        np.testing.assert_allclose(to_dense(slices), expected, atol=1e-12)


@pytest.mark.parametrize("way", ["accumulator", "optimizer"])
def test_training_by_micro_batches_is_training_by_their_sum(strategy: MirroredStrategy, way: str) -> None:
    n = strategy.num_replicas_in_sync
    micro = np.random.default_rng(4).normal(size=(3, n, 5))
    with strategy.scope():
        w = Variable(np.zeros(5))
        optimizer = SGD(1.0, gradient_aggregation="MEAN" if way == "accumulator" else "SUM")
    accumulator = GradientAccumulator(3, "SUM" if way == "accumulator" else None)

    def step() -> None:
        for batch in micro:
            gradients = accumulator.step([batch[replica_id()]])
            if gradients is not None:
                optimizer.apply_gradients(zip(gradients, [w], strict=True))

    strategy.run(step)
    np.testing.assert_allclose(w.read_value(), -micro.sum(axis=(0, 1)), rtol=1e-12)
    assert optimizer.iterations == 1
    assert_replicas_equal(w)


def test_what_was_given_may_be_written_over_afterwards() -> None:
    accumulator = GradientAccumulator(2)
    gradient = np.ones(2)
    accumulator.step([gradient])
    gradient[:] = 100
    result = accumulator.step([np.ones(2)])
    assert result is not None
    np.testing.assert_array_equal(result[0], [2, 2])


def test_a_micro_batch_left_over_can_be_seen_and_forgotten(two: MirroredStrategy) -> None:
    accumulator = GradientAccumulator(2)

    def step() -> bool:
        accumulator.step([np.ones(1)])
        return accumulator.is_accumulating

    assert two.run(step) is True
    accumulator.reset()
    assert two.run(step) is True
    assert two.run(step) is False


# --------------------------------------------------------------------- no_sync

NO_SYNC = r"GradientAccumulator.step, micro-batch 2 of 2: called in no_sync\(\).*call it after that block"


def test_micro_batches_but_the_last_may_promise_not_to_synchronise(two: MirroredStrategy) -> None:
    accumulator = GradientAccumulator(3)

    def step() -> Any:
        with accumulator.no_sync():
            accumulator.step([np.array(1.0)])
            accumulator.step([np.array(2.0)])
        result = accumulator.step([np.array(4.0)])
        assert result is not None
        return result[0]

    assert [float(r) for r in two.experimental_local_results(two.run(step))] == [14, 14]


def test_the_last_micro_batch_in_no_sync_is_an_error_and_is_not_taken_in(two: MirroredStrategy) -> None:
    accumulator = GradientAccumulator(2)

    def step() -> Any:
        accumulator.step([np.array(1.0)])
        with accumulator.no_sync(), pytest.raises(RuntimeError, match=NO_SYNC):
            accumulator.step([np.array(100.0)])
        result = accumulator.step([np.array(2.0)])
        assert result is not None
        return result[0]

    assert [float(r) for r in two.experimental_local_results(two.run(step))] == [6, 6]


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("around", ["in the step", "around the step"])
def test_apply_gradients_in_no_sync_raises_and_changes_nothing(
    two: MirroredStrategy, around: str, scaled: bool
) -> None:
    with two.scope():
        w = Variable(np.zeros(1))
        optimizer: Any = LossScaleOptimizer(SGD(1.0), 1.0) if scaled else SGD(1.0)

    def step() -> None:
        optimizer.apply_gradients([(np.ones(1), w)])

    def promising() -> None:
        with GradientAccumulator.no_sync():
            step()

    promise = GradientAccumulator.no_sync() if around == "around the step" else nullcontext()
    with promise, pytest.raises(RuntimeError, match=r"SGD\.apply_gradients: called in no_sync\(\)"):
        two.run(promising if around == "in the step" else step)
    np.testing.assert_array_equal(w.read_value(), [0])
    two.run(step)
    np.testing.assert_array_equal(w.read_value(), [-2])


# ------------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: GradientAccumulator(0), "every=0; need at least 1"),
        (lambda: GradientAccumulator(2, "MAX"), "got reduce='MAX'; need SUM, MEAN or None"),
        (lambda: GradientAccumulator(2).step([np.ones(1)], -1.0), "weight=-1.0; need a number >= 0"),
        (lambda: GradientAccumulator(1).step([np.ones(1)], 0.0), "weights of all micro-batches are 0"),
        (lambda: GradientAccumulator(2, None).step([np.ones(1)], 1.0), "weight=1.0 and reduce=None"),
    ],
)
def test_numbers_out_of_range_are_refused(make: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        make()


@pytest.mark.parametrize(
    ("second", "words"),
    [
        (([np.ones(3)],), r"got shape \(3,\); need those of the micro-batches before, shape \(2,\)"),
        (([np.ones(2), np.ones(2)],), r"got shape \(2,\), shape \(2,\); need"),
        (([IndexedSlices(np.ones((1, 2)), [0])],), r"got rows of shape \(2,\); need"),
        (([np.ones(2)], 1.0), "a weight for some micro-batches only"),
    ],
)
def test_a_micro_batch_unlike_the_first_is_refused_and_not_taken_in(second: Any, words: str) -> None:
    accumulator = GradientAccumulator(2)
    accumulator.step([np.ones(2)])
    with pytest.raises(ValueError, match=words):
        accumulator.step(*second)
    result = accumulator.step([np.ones(2)])
    assert result is not None
    np.testing.assert_array_equal(result[0], [2, 2])


def test_a_step_across_replicas_says_where_to_call_it(two: MirroredStrategy) -> None:
    with (
        two.scope(),
        pytest.raises(ReplicaContextError, match=r"call it in the function passed to strategy\.run"),
    ):
        GradientAccumulator(2).step([np.ones(1)])


@pytest.mark.parametrize("weight", [None, 2.0])
def test_a_run_resumed_between_two_updates_goes_on_to_the_same_bits(
    two: MirroredStrategy, tmp_path: Path, weight: float | None
) -> None:
    rng = np.random.default_rng(7)
    dense = rng.normal(size=(2, 3, 4)).astype(np.float32)  # of each replica and micro-batch
    rows = rng.normal(size=(2, 3, 2, 4)).astype(np.float32)

    def micro_step(accumulator: GradientAccumulator, number: int) -> Any:
        r = replica_id()
        return accumulator.step(
            [dense[r, number], IndexedSlices(rows[r, number], [number, 5], (6, 4))], weight
        )

    def go_on(accumulator: GradientAccumulator) -> list[Any]:
        assert two.run(micro_step, args=(accumulator, 1)) is None
        return list(two.local_results(two.run(micro_step, args=(accumulator, 2))))

    first, resumed = GradientAccumulator(every=3), GradientAccumulator(every=3)
    two.run(micro_step, args=(first, 0))
    path = Checkpoint(accumulator=first).save(tmp_path / "between")
    expected = go_on(first)
    Checkpoint(accumulator=resumed).restore(path)
    for (dense_sum, slices), (expected_sum, expected_slices) in zip(go_on(resumed), expected, strict=True):
        np.testing.assert_array_equal(dense_sum, expected_sum)
        np.testing.assert_array_equal(to_dense(slices), to_dense(expected_slices))
    every = 3.0 * 2 if weight is not None else 1.0
    np.testing.assert_allclose(expected[0][0], dense.sum((0, 1)) / every, rtol=1e-5)


def test_sums_of_other_replicas_between_two_updates_are_refused_and_after_an_update_are_not(
    two: MirroredStrategy, tmp_path: Path
) -> None:
    accumulator, alone = GradientAccumulator(every=2), GradientAccumulator(every=2)

    def micro_step() -> Any:
        return accumulator.step([np.ones(2)])

    two.run(micro_step)
    between = Checkpoint(accumulator=accumulator).save(tmp_path / "between")
    two.run(micro_step)
    after = Checkpoint(accumulator=accumulator).save(tmp_path / "after")

    Checkpoint(accumulator=alone).restore(between)
    with pytest.raises(ValueError, match=r"restored sums of 2 replicas .* there are 1"):
        alone.step([np.ones(2)])
    Checkpoint(accumulator=alone).restore(after)
    assert alone.step([np.ones(2)]) is None
    with pytest.raises(ValueError, match="every=2; need every=3"):
        Checkpoint(accumulator=GradientAccumulator(every=3)).restore(after)
