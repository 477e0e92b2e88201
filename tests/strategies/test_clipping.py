"""Bounds on gradients: of what the replicas bring together, so that their number doesn't matter."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import strategies as xpd
from strategies import (
    LAMB,
    SGD,
    Adam,
    CentralStorageStrategy,
    FixedShardsPartitioner,
    IndexedSlices,
    Mirrored,
    MirroredStrategy,
    Optimizer,
    PerReplica,
    ShardedVariable,
    Variable,
    assert_replicas_equal,
    clip_by_global_norm,
    get_replica_context,
    global_norm,
)

Array = np.ndarray[Any, Any]
RNG = np.random.default_rng(11)


def mirrored(size: int) -> MirroredStrategy:
    options = xpd.CommunicationOptions(timeout_seconds=20)
    return MirroredStrategy([f"cpu:{i}" for i in range(size)], communication_options=options)


@pytest.fixture(params=[1, 2, 3, 4, 5], ids="{}_replicas".format)
def strategy(request: pytest.FixtureRequest) -> Iterator[MirroredStrategy]:
    with mirrored(request.param) as strategy:
        yield strategy


def replica_id() -> int:
    replica = get_replica_context()
    assert replica is not None
    return replica.replica_id_in_sync_group


# ------------------------------------------------------------------- functions


def test_a_global_norm_is_that_of_all_arrays_together() -> None:
    arrays = [RNG.normal(size=(3, 4)), np.float32(2), RNG.normal(size=7).astype(np.float32), np.zeros((0, 2))]
    expected = math.sqrt(sum(float((np.asarray(a, np.float64) ** 2).sum()) for a in arrays))
    assert global_norm(arrays) == pytest.approx(expected, rel=1e-6)
    assert global_norm([*arrays, None]) == pytest.approx(expected, rel=1e-6)
    assert global_norm([]) == 0


def test_every_kind_of_gradient_counts_each_element_once() -> None:
    slices = IndexedSlices(np.array([[1.0], [2.0], [2.0]]), [4, 4, 0], (9, 1))  # rows of 3 and 2
    with mirrored(2) as strategy, strategy.scope():
        copied = Variable([6.0])
        table = ShardedVariable([Variable([1.0]), Variable([1.0, 1.0])])
    gradients = [slices, Mirrored([np.array([4.0])] * 3), copied, np.array([3 + 4j]), table, 1]
    assert global_norm(gradients) == pytest.approx(math.sqrt(13 + 16 + 36 + 25 + 3 + 1))


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float32], ids=["f16", "bf16", "f32"])
def test_squares_out_of_the_dtypes_range_do_not_matter(dtype: Any) -> None:
    largest = float(np.finfo(dtype).max) if dtype is not ml_dtypes.bfloat16 else 1e38
    array = np.full(4, largest / 4, dtype)
    assert global_norm([array]) == pytest.approx(2 * float(array[0]), rel=1e-6)
    tiny = np.full(4, 1e-30 if dtype is not np.float16 else 6e-8, dtype)
    assert global_norm([tiny]) == pytest.approx(2 * float(tiny[0]), rel=1e-6)


def test_gradients_are_scaled_to_the_norm_and_shorter_ones_are_left() -> None:
    gradients = [np.array([3.0, 0]), None, IndexedSlices(np.array([[4.0]]), [1], (2, 1))]
    clipped, norm = clip_by_global_norm(gradients, 1.0)
    assert norm == 5
    np.testing.assert_allclose(clipped[0], [0.6, 0])
    assert clipped[1] is None
    np.testing.assert_allclose(clipped[2].values, [[0.8]])
    np.testing.assert_array_equal(gradients[0], [3, 0])
    same, norm = clip_by_global_norm(gradients, 10.0)
    assert norm == 5
    np.testing.assert_array_equal(same[0], [3, 0])


@pytest.mark.parametrize("wrong", [np.inf, np.nan])
def test_a_norm_that_is_not_finite_makes_all_gradients_nan(wrong: float) -> None:
    clipped, norm = clip_by_global_norm([np.array([1.0, wrong]), np.ones(2)], 1.0)
    assert not math.isfinite(norm)
    assert all(np.isnan(part).all() for part in clipped)


def test_what_replicas_have_apart_is_refused() -> None:
    with pytest.raises(ValueError, match=r"got a PerReplica.*bring them together first"):
        global_norm([PerReplica([np.ones(2), np.ones(2)])])
    for bound in (0.0, -1.0, math.nan):
        with pytest.raises(ValueError, match="need a number above 0"):
            clip_by_global_norm([np.ones(2)], bound)


def test_the_direction_of_clipped_gradients_is_that_of_their_mean() -> None:
    """B05."""
    with mirrored(2) as strategy:

        def step(gradient: Array) -> tuple[Array, float]:
            replica = get_replica_context()
            assert replica is not None
            mean = replica.all_reduce("MEAN", gradient)
            (clipped,), norm = clip_by_global_norm([mean], 1.0)
            return clipped, norm

        clipped, norm = strategy.run(step, (PerReplica([np.array([[3.0, 0]]), np.array([[0, 4.0]])]),))
    for part in strategy.experimental_local_results(clipped):
        np.testing.assert_allclose(part, [[0.6, 0.8]])  # of (1.5, 2)
    assert strategy.experimental_local_results(norm) == (2.5, 2.5)


# ------------------------------------------------------------------ optimizers


BOUNDS: dict[str, tuple[dict[str, float], Callable[[list[Array], float], list[Array]]]] = {
    "clipvalue": ({"clipvalue": 0.5}, lambda gradients, _: [np.clip(g, -0.5, 0.5) for g in gradients]),
    "clipnorm": (
        {"clipnorm": 1.5},
        lambda gradients, _: [g * min(1, 1.5 / np.linalg.norm(g)) for g in gradients],
    ),
    "global_clipnorm": (
        {"global_clipnorm": 2.0},
        lambda gradients, norm: [g * min(1, 2.0 / norm) for g in gradients],
    ),
}


@pytest.mark.parametrize("aggregation", ["SUM", "MEAN"])
@pytest.mark.parametrize("kind", BOUNDS)
def test_bounds_apply_to_what_the_replicas_bring_together(
    strategy: MirroredStrategy, kind: str, aggregation: str
) -> None:
    options, bounded = BOUNDS[kind]
    n = strategy.num_replicas_in_sync
    shapes = [(4, 3), (), (9,), (100, 100)]  # the last one is read where it is
    gradients = [[RNG.normal(size=shape) * 10.0**-i for i, shape in enumerate(shapes)] for _ in range(n)]
    together = [np.sum([own[i] for own in gradients], axis=0) for i in range(len(shapes))]
    if aggregation == "MEAN":
        together = [total / n for total in together]
    norm = math.sqrt(sum(float((total**2).sum()) for total in together))
    with strategy.scope():
        variables = [Variable(np.zeros(shape)) for shape in shapes]
        optimizer = SGD(1.0, gradient_aggregation=aggregation, **options)  # type: ignore[arg-type]  # floats all
    strategy.run(lambda: optimizer.apply_gradients(zip(gradients[replica_id()], variables, strict=True)))
    for variable, expected in zip(variables, bounded(together, norm), strict=True):
        np.testing.assert_allclose(variable.read_value(), -expected, rtol=1e-12, atol=1e-15)
    assert_replicas_equal(variables)


@pytest.mark.parametrize("kind", BOUNDS)
def test_an_update_that_the_replicas_share_is_clipped_to_the_same_bits_as_alone(kind: str) -> None:
    options, bounded = BOUNDS[kind]
    shapes = [(600, 600), (5,), (300_000,)]
    gradients = [RNG.normal(size=shape).astype(np.float32) for shape in shapes]
    results = []
    for n in (1, 2, 3):
        with mirrored(n) as strategy:
            with strategy.scope():
                variables = [Variable(np.zeros(shape, np.float32)) for shape in shapes]
                optimizer = SGD(1.0, **options)  # type: ignore[arg-type]  # floats all
            # Powers of two, whose sum is exact.
            share = [1.0, 0.5, 0.25][n - 1]
            factors = [[1.0], [share, share], [share, share, 2 * share]][n - 1]

            def step(own: list[float], variables: Any = variables, optimizer: Optimizer = optimizer) -> None:
                share = np.float32(own[replica_id()])
                optimizer.apply_gradients(zip([share * g for g in gradients], variables, strict=True))

            strategy.run(step, (factors,))
            assert_replicas_equal(variables)
            results.append([variable.read_value() for variable in variables])
    norm = math.sqrt(sum(float((g.astype(np.float64) ** 2).sum()) for g in gradients))
    for got, expected in zip(results[0], bounded(gradients, norm), strict=True):
        np.testing.assert_allclose(got, -expected, rtol=1e-5, atol=1e-9)
    for other in results[1:]:
        for one, several in zip(results[0], other, strict=True):
            assert one.tobytes() == several.tobytes()


@pytest.mark.parametrize("kind", BOUNDS)
def test_sparse_gradients_are_bounded_with_their_rows_summed(strategy: MirroredStrategy, kind: str) -> None:
    options, bounded = BOUNDS[kind]
    n = strategy.num_replicas_in_sync
    own = [IndexedSlices(RNG.normal(size=(3, 2)), [5, r % 3, 5], (6, 2)) for r in range(n)]
    table_gradient = np.zeros((6, 2))
    for slices in own:
        np.add.at(table_gradient, slices.indices, slices.values)
    other = RNG.normal(size=4)
    together = [table_gradient, n * other]
    norm = math.sqrt(sum(float((total**2).sum()) for total in together))
    with strategy.scope():
        table, w = Variable(np.zeros((6, 2))), Variable(np.zeros(4))
        optimizer = SGD(1.0, **options)  # type: ignore[arg-type]  # floats all
    strategy.run(lambda: optimizer.apply_gradients([(own[replica_id()], table), (other, w)]))
    for variable, expected in zip((table, w), bounded(together, norm), strict=True):
        np.testing.assert_allclose(variable.read_value(), -expected, rtol=1e-12, atol=1e-15)


def test_gradients_that_are_not_finite_make_what_their_norm_counts_nan_and_no_more() -> None:
    with mirrored(2) as strategy:
        with strategy.scope():
            a, b = Variable(np.zeros(2)), Variable(np.zeros(2))
            each, all_ = SGD(1.0, clipnorm=1.0), SGD(1.0, global_clipnorm=1.0)
        strategy.run(lambda: each.apply_gradients([(np.array([np.inf, 1]), a), (np.array([3.0, 4]), b)]))
        assert np.isnan(a.read_value()).all()
        np.testing.assert_allclose(b.read_value(), [-0.6, -0.8])
        strategy.run(lambda: all_.apply_gradients([(np.array([np.inf, 1]), a), (np.array([3.0, 4]), b)]))
        assert np.isnan(b.read_value()).all()


def test_bounds_hold_in_half_precision() -> None:
    with mirrored(3) as strategy:
        with strategy.scope():
            w = Variable(np.zeros(2, np.float16))
            optimizer = SGD(1.0, global_clipnorm=5.0)
        gradient = np.array([300, 400], np.float16)  # squares are out of range
        strategy.run(lambda: optimizer.apply_gradients([(gradient, w)]))
        np.testing.assert_allclose(w.read_value(), [-3, -4], rtol=1e-3)


# ---------------------------------------------------------------------- shards


WHOLE = RNG.normal(size=(11, 3))
SHARDED: dict[str, Callable[[], Optimizer]] = {
    "clipvalue": lambda: SGD(1.0, clipvalue=0.3),
    "clipnorm": lambda: SGD(1.0, clipnorm=0.5),
    "global_clipnorm": lambda: SGD(1.0, global_clipnorm=0.5),
    "lamb": lambda: LAMB(0.1, weight_decay=0.01),
    "lamb_clipped": lambda: LAMB(0.1, clipnorm=0.5),
    "adam_clipped": lambda: Adam(0.1, clipnorm=0.5),
}


def train(num_shards: int | None, make: Callable[[], Optimizer], gradients: list[Any]) -> list[Array]:
    strategy = CentralStorageStrategy(
        ["cpu:0", "cpu:1"],
        ["cpu:0", "cpu:1"],
        variable_partitioner=FixedShardsPartitioner(num_shards) if num_shards else None,
    )
    with strategy:
        with strategy.scope():
            table, w = Variable(WHOLE), Variable(np.ones(5))
            optimizer = make()
        for pair in gradients:
            strategy.run(
                lambda gradient: optimizer.apply_gradients([(gradient, table), (np.ones(5), w)]),
                (PerReplica(pair),),
            )
        parts = table.shards if isinstance(table, ShardedVariable) else (table,)
        slots = [np.concatenate([optimizer.slot(p, name) for p in parts]) for name in optimizer.rule.slots]
        return [table.numpy(), w.numpy(), *slots]


@pytest.mark.parametrize("is_sparse", [False, True], ids=["dense", "sparse"])
@pytest.mark.parametrize("num_shards", [2, 4, 14])
@pytest.mark.parametrize("name", SHARDED)
def test_a_table_in_shards_is_bounded_and_scaled_as_in_one_piece(
    name: str, num_shards: int, is_sparse: bool
) -> None:
    rng = np.random.default_rng(3)
    if is_sparse:
        rows = [[[10, 0, 5, 0], [3, 5, 5, 9]], [[0, 1, 2, 3], [10, 10]], [[], [7]]]
        gradients: list[Any] = [
            [IndexedSlices(rng.normal(size=(len(own), 3)), own, (11, 3)) for own in pair] for pair in rows
        ]
    else:
        gradients = [[rng.normal(size=(11, 3)) for _ in range(2)] for _ in range(3)]
    whole = train(None, SHARDED[name], gradients)
    for ours, expected in zip(train(num_shards, SHARDED[name], gradients), whole, strict=True):
        np.testing.assert_allclose(ours, expected, rtol=1e-12, atol=1e-15)


def test_a_norm_of_shards_counts_all_of_them() -> None:
    table = ShardedVariable([Variable(np.zeros(1)), Variable(np.zeros((0,))), Variable(np.zeros(1))])
    SGD(1.0, clipnorm=1.0).apply_gradients([(np.array([3.0, 4.0]), table)])
    np.testing.assert_allclose(table.numpy(), [-0.6, -0.8])


def test_many_small_arrays_in_any_layout_count_as_one_large_one() -> None:
    rng = np.random.default_rng(8)
    arrays: list[Array] = [rng.normal(size=(5, 7)).astype(np.float32) for _ in range(100)]
    arrays += [rng.normal(size=(4, 6)).T for _ in range(40)]
    arrays += [rng.normal(size=(3, 9))[:, ::2] for _ in range(3)]
    expected = math.sqrt(sum(float((a.astype(np.float64) ** 2).sum()) for a in arrays))
    assert global_norm(arrays) == pytest.approx(expected, rel=1e-6)
    assert math.isnan(global_norm([*arrays, np.array([np.nan])]))
    assert global_norm([*arrays, np.array([-np.inf])]) == math.inf
