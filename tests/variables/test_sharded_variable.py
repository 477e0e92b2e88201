"""Several variables as one. What comes out is compared with the same done to one NumPy array."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from collectives import IndexedSlices
from strategies import CentralStorageStrategy, Checkpoint, MirroredStrategy, OneDeviceStrategy, PerReplica
from variables import (
    FixedShardsPartitioner,
    LocalVariable,
    MirroredVariable,
    ReplicaContextError,
    ShardedVariable,
    Variable,
    assert_replicas_equal,
    embedding_lookup,
)
from variables.array_behaviour import ArrayBehaviour

LAYOUTS = [(10,), (4, 3, 3), (3, 3, 4), (0, 7, 0, 3), (1,) * 10, (9, 1, 0)]
WHOLE = np.arange(20.0).reshape(10, 2)


def cut(whole: Any, sizes: Sequence[int]) -> ShardedVariable:
    bounds = np.cumsum(sizes)[:-1]
    return ShardedVariable([Variable(part) for part in np.split(np.asarray(whole), bounds)], name="table")


@pytest.fixture(params=LAYOUTS, ids=str)
def sizes(request: pytest.FixtureRequest) -> tuple[int, ...]:
    return request.param  # type: ignore[no-any-return]


# --------------------------------------------------------------------------------- one array


def test_it_is_described_as_the_whole() -> None:
    table = cut(WHOLE.astype(np.float32), (4, 3, 3))
    assert (table.shape, table.ndim, table.size, table.nbytes, len(table)) == ((10, 2), 2, 20, 80, 10)
    assert table.dtype == np.float32
    assert table.trainable
    assert repr(table) == "<ShardedVariable 'table' float32 of shape (10, 2)>"
    assert [len(shard) for shard in table.shards] == [4, 3, 3]
    assert table.offsets == (0, 4, 7)
    assert table.variables == table.shards == table.components == tuple(table)


def test_arithmetic_and_functions_see_the_whole(sizes: tuple[int, ...]) -> None:
    table = cut(WHOLE, sizes)
    x = np.arange(3.0 * 10).reshape(3, 10)
    np.testing.assert_array_equal(x @ table, x @ WHOLE)
    np.testing.assert_array_equal(table + 1, WHOLE + 1)
    np.testing.assert_array_equal(2 / (table + table + 1), 2 / (WHOLE + WHOLE + 1))
    np.testing.assert_array_equal(np.exp(-table), np.exp(-WHOLE))
    np.testing.assert_array_equal(np.concatenate([table, WHOLE]), np.concatenate([WHOLE, WHOLE]))
    np.testing.assert_array_equal(table.T, WHOLE.T)
    np.testing.assert_array_equal(table == WHOLE, np.full((10, 2), True))
    assert table.sum() == WHOLE.sum()
    assert 7.0 in table
    for whole in (np.asarray(table), table.numpy(), table.read_value(), table.value()):
        np.testing.assert_array_equal(whole, WHOLE)


def test_what_was_read_does_not_change_with_it() -> None:
    table = cut(WHOLE, (4, 6))
    read = [table.value(), table[2:6], table[1], table[:3], table[[5, 1]], table.sparse_read([0])]
    before = [array.copy() for array in read]
    table.assign(-WHOLE)
    for array, old in zip(read, before, strict=True):
        np.testing.assert_array_equal(array, old)


def test_the_whole_is_read_only_as_writes_into_it_would_be_lost() -> None:
    table = cut(WHOLE, (4, 6))
    with pytest.raises(ValueError, match="read-only"):
        table.value()[0] = 1
    with pytest.raises(
        TypeError, match="table: assignment to an item would change one copy only; use assign"
    ):
        table[0] = 1


# ---------------------------------------------------------------------------------- indexing

STARTS = (None, 0, 2, 4, 9, 10, 14, 50, -1, -3, -10, -11, -50)
STEPS = (None, 1, 2, 3, 11, -1, -2, -3, -11)


def test_slices_follow_numpys_rules_out_of_range_too(sizes: tuple[int, ...]) -> None:
    table = cut(WHOLE, sizes)
    for start in STARTS:
        for stop in STARTS:
            for step in STEPS:
                rows = slice(start, stop, step)
                got = table[rows]
                assert got.dtype == WHOLE.dtype
                np.testing.assert_array_equal(got, WHOLE[rows], err_msg=str(rows))


MASK = np.arange(10) % 3 == 0


@pytest.mark.parametrize(
    "index",
    [
        3,
        -10,
        np.int8(9),
        (),
        ...,
        None,
        (None, slice(1, 3)),
        (None, None, 4),
        (slice(1, 4), 1),
        (..., slice(0, 1)),
        (..., 1),
        (4, ..., 1),
        (slice(None, None, -2), None, slice(None)),
        (slice(2, 8), [1, 0]),
        (3, [1, 0, 1]),
        [],
        [9, 0, 4, 0],
        [-1, -10, 3],
        np.array([[9, 0], [4, -2]], np.int16),
        np.array(7),
        np.array([250, 3], np.uint64) % 10,
        ([9, 0, 4], [0, 1, 1]),
        (np.array([[9], [4]]), [0, 1]),
        ([2, 7], slice(None, None, -1)),
        (None, [2, 7], None, 1),
        MASK,
        MASK.tolist(),
        (MASK, 1),
        (~MASK, None),
        np.zeros(10, bool),
        WHOLE > 7,
        True,
        (slice(0, 2), True),
        Variable([3, 1]),
    ],
    ids=str,
)
def test_any_index_means_what_it_means_to_numpy(index: Any, sizes: tuple[int, ...]) -> None:
    got = cut(WHOLE, sizes)[index]
    expected = WHOLE[index.value() if isinstance(index, ArrayBehaviour) else index]
    assert np.shape(got) == np.shape(expected)
    assert type(got) is type(expected)
    np.testing.assert_array_equal(got, expected)


def test_a_row_of_a_vector_is_a_number() -> None:
    table = cut(np.arange(5, dtype=np.float32), (3, 2))
    assert type(table[4]) is np.float32
    assert table[4] == 4


@pytest.mark.parametrize(
    ("index", "error", "said"),
    [
        (10, IndexError, "table: got index 10; need one from -10 to 9"),
        (-11, IndexError, "table: got index -11; need one from -10 to 9"),
        ([0, 10], IndexError, "table: got index 10; need one from 0 to 9"),
        ([-11], IndexError, "table: got index"),
        (slice(None, None, 0), ValueError, "slice step cannot be zero"),
        (slice(0.5), TypeError, "slice indices must be integers"),
        ([0.5], IndexError, "valid indices"),
        (np.full(9, True), IndexError, "boolean index did not match"),
        ("a", IndexError, "only integers, slices"),
        ((0, 0, 0), IndexError, "too many indices"),
        ((0, 2), IndexError, "out of bounds"),
    ],
    ids=str,
)
def test_an_index_that_does_not_fit_is_an_error_as_in_numpy(
    index: Any, error: type[Exception], said: str
) -> None:
    with pytest.raises(error):
        WHOLE[index]
    with pytest.raises(error, match=said):
        cut(WHOLE, (4, 3, 3))[index]


# ----------------------------------------------------------------------------------- lookups


@pytest.mark.parametrize("dtype", [np.int8, np.int32, np.int64, np.uint8, np.uint64])
@pytest.mark.parametrize("ids", [[9, 0, 4, 0], [0, 0, 3, 9], [[7], [2]], [], 5], ids=str)
def test_rows_come_in_the_order_asked(ids: Any, dtype: Any, sizes: tuple[int, ...]) -> None:
    ids = np.array(ids, dtype)
    table = cut(WHOLE, sizes)
    for rows in (table.sparse_read(ids), embedding_lookup(table, ids), embedding_lookup(WHOLE, ids)):
        assert rows.shape == (*ids.shape, 2)
        np.testing.assert_array_equal(rows, WHOLE[ids])


def test_a_list_will_do_for_ids() -> None:
    table = cut(WHOLE, (4, 6))
    np.testing.assert_array_equal(table.sparse_read([9, 0]), WHOLE[[9, 0]])
    assert table.sparse_read([]).shape == (0, 2)
    assert embedding_lookup(Variable(WHOLE), []).shape == (0, 2)


def test_a_row_number_may_be_larger_than_its_own_type_can_offset() -> None:
    whole = np.arange(1000.0)
    ids = np.array([127, 3, 90], np.int8)
    np.testing.assert_array_equal(cut(whole, (50, 50, 900)).sparse_read(ids), whole[ids])


def test_large_lookups_take_the_same_rows_whatever_fits_the_cache() -> None:
    rng = np.random.default_rng(5)
    whole = rng.normal(size=(3000, 48))
    table = cut(whole, (1700, 1, 1299))
    ids = rng.zipf(1.3, 20_000) % 3000
    np.testing.assert_array_equal(embedding_lookup(table, ids), whole[ids])
    np.testing.assert_array_equal(embedding_lookup(table, np.sort(ids)), whole[np.sort(ids)])


def test_there_may_be_many_shards() -> None:
    ids = [299, 3, 255, 256, 0]
    table = ShardedVariable([Variable([number]) for number in range(300)])
    assert table.sparse_read(ids).tolist() == ids


@pytest.mark.parametrize("lookup", [embedding_lookup, ShardedVariable.sparse_read])
def test_ids_that_are_no_rows_are_refused(lookup: Any) -> None:
    table = cut(WHOLE, (4, 6))
    for wrong in (-1, 10):
        with pytest.raises(IndexError, match=f"sparse_read: got index {wrong}; need one from 0 to 9"):
            lookup(table, [0, wrong])
    with pytest.raises(TypeError, match=r"table.sparse_read: got float64 of shape \(1,\); need integers"):
        lookup(table, [0.0])
    with pytest.raises(TypeError, match="need integers"):
        lookup(table, np.zeros(0))


def test_a_plain_table_refuses_the_same_ids() -> None:
    with pytest.raises(IndexError, match="embedding_lookup: got index -1; need one from 0 to 9"):
        embedding_lookup(WHOLE, [-1])
    with pytest.raises(ValueError, match=r"embedding_lookup: got float64 of shape \(\); need a table"):
        embedding_lookup(np.array(3.0), [0])


# ------------------------------------------------------------------------------------ writes


def test_dense_writes_reach_every_shard(sizes: tuple[int, ...]) -> None:
    table = cut(WHOLE, sizes)
    assert table.assign_add(WHOLE * 2) is table
    np.testing.assert_array_equal(table, WHOLE * 3)
    assert table.assign_sub(WHOLE, read_value=False) is None
    np.testing.assert_array_equal(table, WHOLE * 2)
    table += WHOLE
    np.testing.assert_array_equal(np.concatenate([shard.value() for shard in table.shards]), WHOLE * 3)
    table.assign(table[::-1])
    np.testing.assert_array_equal(table, WHOLE[::-1] * 3)


def test_a_write_of_its_own_rows_is_as_of_a_copy() -> None:
    table = cut(np.arange(4.0), (2, 2))
    first = table.shards[0].value()
    table.scatter_update(IndexedSlices(first, [1, 0]))
    assert table.numpy().tolist() == [1, 0, 2, 3]


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (np.zeros((9, 2)), "table.assign: got float64 of shape \\(9, 2\\); need shape \\(10, 2\\)"),
        (np.zeros((11, 2)), "table.assign: got float64 of shape \\(11, 2\\); need shape \\(10, 2\\)"),
        (np.zeros(2), "updates are not broadcast"),
        (0.0, "updates are not broadcast"),
        (PerReplica([WHOLE, WHOLE]), "table.assign: got PerReplica; need one array"),
    ],
)
def test_a_value_that_does_not_fit_is_refused_before_anything_is_written(value: Any, said: str) -> None:
    table = cut(WHOLE, (4, 3, 3))
    with pytest.raises(ValueError, match=said):
        table.assign(value)
    np.testing.assert_array_equal(table, WHOLE)


SCATTERS: dict[str, Any] = {
    "scatter_add": np.add.at,
    "scatter_sub": np.subtract.at,
    "scatter_mul": np.multiply.at,
    "scatter_div": np.divide.at,
    "scatter_min": np.minimum.at,
    "scatter_max": np.maximum.at,
    "scatter_update": lambda array, indices, values: array.__setitem__(indices, values),
}


@pytest.mark.parametrize("method", SCATTERS)
@pytest.mark.parametrize("indices", [[9, 0, 4, 0, 9], [0, 0, 4, 9, 9], [], [5]], ids=str)
def test_scatters_reach_their_rows_in_any_layout(
    method: str, indices: list[int], sizes: tuple[int, ...]
) -> None:
    values = np.arange(2.0 * len(indices)).reshape(-1, 2) + 3
    expected = WHOLE.copy()
    SCATTERS[method](expected, np.array(indices, np.intp), values)
    table = cut(WHOLE, sizes)
    assert getattr(table, method)(IndexedSlices(values, np.array(indices, np.int32))) is table
    np.testing.assert_array_equal(table, expected)


def test_a_scatter_outside_is_refused_before_anything_is_written() -> None:
    table = cut(WHOLE, (4, 6))
    with pytest.raises(IndexError, match=r"table.scatter_add: got index 10; need one from 0 to 9"):
        table.scatter_add(IndexedSlices(np.ones((2, 2)), [0, 10]))
    with pytest.raises(ValueError, match=r"table.scatter_add: got rows of float64 of shape \(1, 3\)"):
        table.scatter_add(IndexedSlices(np.ones((1, 3)), [0]))
    np.testing.assert_array_equal(table, WHOLE)


def test_split_gives_each_shard_its_part(sizes: tuple[int, ...]) -> None:
    table = cut(WHOLE, sizes)
    gradient = np.random.default_rng(1).normal(size=(10, 2))
    parts = table.split(gradient)
    assert all(np.shares_memory(part, gradient) for part in parts if part.size)
    np.testing.assert_array_equal(np.concatenate(parts), gradient)

    slices = IndexedSlices(np.arange(10.0).reshape(5, 2), [9, 0, 4, 0, 7], (10, 2))
    for part, shard, offset in zip(table.split(slices), table.shards, table.offsets, strict=True):
        rows = slices.indices
        own = (rows >= offset) & (rows < offset + len(shard))
        assert part.indices.tolist() == (rows[own] - offset).tolist()
        np.testing.assert_array_equal(part.values, slices.values[own])
        assert tuple(part.dense_shape) == shard.shape


def test_ascending_slices_are_split_without_a_copy() -> None:
    slices = IndexedSlices(np.arange(8.0).reshape(4, 2), [0, 3, 3, 9])
    for part in cut(WHOLE, (4, 6)).split(slices):
        assert np.shares_memory(part.values, slices.values)


def test_split_refuses_what_is_not_of_the_whole() -> None:
    table = cut(WHOLE, (4, 6))
    with pytest.raises(ValueError, match=r"table.split: got float64 of shape \(4, 2\); need shape \(10, 2\)"):
        table.split(WHOLE[:4])
    with pytest.raises(
        ValueError, match=r"table.split: got rows of float64 of shape \(1, 3\); need \(2,\) each"
    ):
        table.split(IndexedSlices(np.ones((1, 3)), [0]))
    with pytest.raises(IndexError, match=r"table.split: got index 10"):
        table.split(IndexedSlices(np.ones((1, 2)), [10]))


# ------------------------------------------------------------------------------------ making


def test_what_does_not_fit_together_is_refused() -> None:
    one = Variable(np.zeros((2, 3)))
    with pytest.raises(
        TypeError, match="ShardedVariable 'sharded_variable': got no shards; need at least one"
    ):
        ShardedVariable([])
    with pytest.raises(TypeError, match="'t': got ndarray as a shard; need variables"):
        ShardedVariable([one, np.zeros((2, 3))], name="t")  # type: ignore[list-item]
    with pytest.raises(TypeError, match="as shard 0; need variables that are whole"):
        ShardedVariable([ShardedVariable([one])])
    for other in (np.zeros((2, 4)), np.zeros((2, 3), np.float32), np.zeros(3), 0.0):
        with pytest.raises(ValueError, match="as shard 1; need one dtype, and shapes of at least one axis"):
            ShardedVariable([one, Variable(other)])
    with pytest.raises(
        ValueError, match="got trainable True of shard 0 and False of shard 1; need one and the same"
    ):
        ShardedVariable([one, Variable(np.zeros((2, 3)), trainable=False)])
    with pytest.raises(ValueError, match="got one variable as several shards"):
        ShardedVariable([one, one])
    with OneDeviceStrategy("cpu:0").scope():
        elsewhere = Variable(np.zeros((2, 3)))
    with pytest.raises(ValueError, match="got owner None of shard 0 and OneDeviceStrategy"):
        ShardedVariable([one, elsewhere])


def test_integers_booleans_and_complex_numbers_can_be_sharded() -> None:
    for dtype in (np.int8, np.bool_, np.complex64, np.float16):
        whole = np.arange(6).astype(dtype)
        table = cut(whole, (2, 4))
        assert table.dtype == dtype
        assert table[::-1].dtype == table.sparse_read([5, 0]).dtype == table[:0].dtype == dtype
        np.testing.assert_array_equal(table, whole)


# -------------------------------------------------------------------------------- strategies


@pytest.fixture
def central() -> Any:
    devices = ["cpu:0", "cpu:1"]
    partitioner = FixedShardsPartitioner(4)
    with CentralStorageStrategy(devices, devices, variable_partitioner=partitioner) as strategy:
        yield strategy


@pytest.mark.parametrize(("num_rows", "sizes"), [(6, [2, 2, 1, 1]), (2, [1, 1, 0, 0])])
def test_shards_differ_by_one_row_and_may_be_empty(central: Any, num_rows: int, sizes: list[int]) -> None:
    whole = np.arange(float(num_rows))[:, None]
    with central.scope():
        table = Variable(whole, name="emb")
    assert isinstance(table, ShardedVariable)
    assert [len(shard) for shard in table.shards] == sizes
    assert [shard.name for shard in table.shards] == [f"emb/part_{number}" for number in range(4)]
    assert np.asarray(table).ravel().tolist() == whole.ravel().tolist()
    assert table.owner is central


@pytest.mark.parametrize("num_rows", [0, 1, 2, 6])
def test_it_is_saved_and_loaded_for_any_number_of_rows(central: Any, num_rows: int, tmp_path: Path) -> None:
    whole = np.arange(3.0 * num_rows).reshape(num_rows, 3)
    with central.scope():
        saved, loaded = Variable(whole), Variable(np.zeros_like(whole))
    Checkpoint(table=loaded).restore(Checkpoint(table=saved).save(tmp_path / "saved"))
    np.testing.assert_array_equal(loaded, whole)


def test_shards_and_variables_are_dealt_to_the_parameter_devices_in_turn(central: Any) -> None:
    with central.scope():
        number = Variable(1.0)
        table = Variable(np.zeros((8, 3)))
    (component,) = number.components
    assert isinstance(component, LocalVariable)
    assert str(component.device) == "cpu:0"
    assert [str(shard.components[0].device) for shard in table.shards] == ["cpu:1", "cpu:0"] * 2
    assert list(map(str, central.parameter_devices)) == ["cpu:0", "cpu:1"]


def test_replicas_writes_are_aggregated_then_made_once(central: Any) -> None:
    with central.scope():
        table = Variable(np.zeros((5, 2)), aggregation="SUM", name="emb")
        mean = Variable(np.zeros((5, 2)), aggregation="MEAN")
        plain = Variable(np.zeros((5, 2)), name="plain")

    def step(x: np.ndarray[Any, Any], row: np.ndarray[Any, Any]) -> Any:
        table.assign_add(x)
        mean.assign(x)
        table.scatter_add(IndexedSlices(np.full((1, 2), 100.0), row))
        with pytest.raises(
            ValueError, match=r"plain/part_0.assign: called in a replica.*aggregation is NONE"
        ):
            plain.assign(x)
        return table.sparse_read([4, 0]), table[-1]

    x = PerReplica([np.full((5, 2), 1.0), np.full((5, 2), 3.0)])
    rows, last = central.run(step, (x, PerReplica([np.array([4]), np.array([0])])))
    expected = np.full((5, 2), 4.0)
    expected[[0, 4]] += 100
    np.testing.assert_array_equal(table, expected)
    np.testing.assert_array_equal(mean, np.full((5, 2), 2.0))
    np.testing.assert_array_equal(plain, np.zeros((5, 2)))
    for replica in range(2):
        np.testing.assert_array_equal(rows.values[replica], expected[[4, 0]])
        np.testing.assert_array_equal(last.values[replica], expected[4])


def test_one_made_in_a_step_is_the_same_for_all_replicas(central: Any) -> None:
    made = central.run(lambda: Variable(np.arange(4.0), name="late"))
    assert isinstance(made, ShardedVariable)
    assert made.numpy().tolist() == [0, 1, 2, 3]


def test_without_a_partitioner_nothing_is_cut() -> None:
    with CentralStorageStrategy(["cpu:0", "cpu:1"], "cpu:0") as strategy, strategy.scope():
        assert not isinstance(Variable(np.zeros((100, 2))), ShardedVariable)


def test_reductions_of_it_across_replicas_are_as_of_one_value(central: Any) -> None:
    with central.scope():
        table = Variable(WHOLE)
    np.testing.assert_array_equal(central.reduce("MEAN", table), WHOLE)
    assert central.experimental_local_results(table) == (table,)
    with pytest.raises(ValueError, match="one and the same on all 2 replicas"):
        central.reduce("SUM", table)


def test_update_wants_the_shards(central: Any) -> None:
    with central.scope():
        table = Variable(WHOLE, name="emb")
    with pytest.raises(ValueError, match="update: got emb, whose 4 shards need each its own part"):
        central.update(table, lambda v, x: v.assign(x), (WHOLE,))
    for shard, part in zip(table.shards, table.split(WHOLE * 2), strict=True):
        central.update(shard, lambda v, x: v.assign(x), (part,))
    np.testing.assert_array_equal(table, WHOLE * 2)


def test_another_strategy_may_not_use_it(central: Any) -> None:
    with central.scope():
        table = Variable(WHOLE)
    with (
        CentralStorageStrategy(["cpu:0", "cpu:1"]) as other,
        pytest.raises(ReplicaContextError, match="made under"),
    ):
        other.run(lambda: table.value())


def test_mirrored_variables_can_be_shards_and_keep_their_ways() -> None:
    with MirroredStrategy(["cpu:0", "cpu:1"]) as strategy:
        with strategy.scope():
            shards = [Variable(part, aggregation="SUM") for part in np.split(WHOLE, [6])]
            table = ShardedVariable(shards)
        assert all(isinstance(shard, MirroredVariable) for shard in table.shards)
        strategy.run(lambda x: table.assign_add(x, read_value=False), (PerReplica([WHOLE, WHOLE * 2]),))
        np.testing.assert_array_equal(table, WHOLE * 4)
        assert table.nbytes == WHOLE.nbytes
        assert_replicas_equal(table)
        shards[1].components[1].assign(np.zeros((4, 2)))
        with pytest.raises(AssertionError, match="copies 0 and 1 differ in 8 of 8 elements"):
            assert_replicas_equal([table])


def test_shards_outside_of_strategies_are_shared_by_all_replicas() -> None:
    table = cut(WHOLE, (4, 6))
    with MirroredStrategy(["cpu:0", "cpu:1"]) as strategy:
        read = strategy.run(lambda: table[3:5])
    np.testing.assert_array_equal(read.values[1], WHOLE[3:5])
    np.testing.assert_array_equal(assert_equal_shards(table), WHOLE)


def assert_equal_shards(table: ShardedVariable) -> Any:
    assert_replicas_equal(table)  # shards are no copies of one another
    return table.value()
