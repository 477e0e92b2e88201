"""Every kind of variable × aggregation × way to write × context, against plain NumPy."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import pytest

from collectives import IndexedSlices
from strategies import (
    CentralStorageStrategy,
    MirroredStrategy,
    OneDeviceStrategy,
    Strategy,
    get_replica_context,
)
from variables import PerReplica, Variable

Array = np.ndarray[Any, Any]

INITIAL = np.array([[1.0, -2.0], [3.0, 4.0], [-5.0, 6.0]])
DENSE = ["assign", "assign_add", "assign_sub"]
SCATTER = ["scatter_add", "scatter_sub", "scatter_mul", "scatter_div"]
ORDERED = ["scatter_min", "scatter_max", "scatter_update"]
AGGREGATIONS = ["NONE", "SUM", "MEAN", "ONLY_FIRST_REPLICA"]


class Kind(NamedTuple):
    strategy: Callable[[], Strategy]
    synchronization: str
    num_replicas: int
    num_copies: int


@cache
def mirrored(size: int) -> Strategy:
    return MirroredStrategy([f"cpu:{i}" for i in range(size)])


@cache
def central(size: int) -> Strategy:
    return CentralStorageStrategy([f"cpu:{i}" for i in range(size)], "cpu:0")


@cache
def one_device() -> Strategy:
    return OneDeviceStrategy("cpu:0")


KINDS = {
    "one_device": Kind(one_device, "ON_WRITE", 1, 1),
    "one_device_on_read": Kind(one_device, "ON_READ", 1, 1),
    "mirrored_1": Kind(lambda: mirrored(1), "ON_WRITE", 1, 1),
    "mirrored_2": Kind(lambda: mirrored(2), "ON_WRITE", 2, 2),
    "mirrored_3": Kind(lambda: mirrored(3), "ON_WRITE", 3, 3),
    "on_read_2": Kind(lambda: mirrored(2), "ON_READ", 2, 2),
    "on_read_3": Kind(lambda: mirrored(3), "ON_READ", 3, 3),
    "central_2": Kind(lambda: central(2), "ON_WRITE", 2, 1),
    "central_3": Kind(lambda: central(3), "ON_READ", 3, 1),  # where it makes no difference
}
SHARED = ["mirrored_2", "mirrored_3", "central_2", "central_3"]
OWN = ["on_read_2", "on_read_3"]
PLAIN = ["one_device", "one_device_on_read"]

every_write = pytest.mark.parametrize("write", [*DENSE, *SCATTER, *ORDERED])
every_aggregation = pytest.mark.parametrize("aggregation", AGGREGATIONS)


def made(kind: Kind, aggregation: str) -> Variable:
    with kind.strategy().scope():
        return Variable(INITIAL, name="v", synchronization=kind.synchronization, aggregation=aggregation)


def copies(variable: Variable) -> list[Array]:
    return [component.numpy() for component in variable.components]


def value_of(replica: int, write: str) -> Any:
    """What this replica writes: other numbers, and for a scatter other rows, on every replica."""
    if write in DENSE:
        return np.arange(6.0).reshape(3, 2) + 10 * (replica + 1)
    rows = [replica % 3, 2, 2] if write != "scatter_update" else [replica % 3, 2]
    return IndexedSlices(np.arange(2.0 * len(rows)).reshape(-1, 2) + replica + 1, rows)


def written(write: str, old: Array, *values: Any, divided_by: int = 1) -> Array:
    """The old array after the write; of several sparse values, one after the other."""
    new = old.copy()
    for value in values:
        if write == "assign":
            new = value.copy()
        elif write == "assign_add":
            new = new + value
        elif write == "assign_sub":
            new = new - value
        else:
            for row, index in zip(value.values / divided_by, value.indices, strict=True):
                new[index] = {
                    "scatter_add": new[index] + row,
                    "scatter_sub": new[index] - row,
                    "scatter_mul": new[index] * row,
                    "scatter_div": new[index] / row,
                    "scatter_min": np.minimum(new[index], row),
                    "scatter_max": np.maximum(new[index], row),
                    "scatter_update": row,
                }[write]
    return new


def written_by_all(write: str, old: Array, aggregation: str, size: int) -> Array:
    """What replicas that write together make of equal copies."""
    values = [value_of(replica, write) for replica in range(size)]
    if aggregation == "ONLY_FIRST_REPLICA" or size == 1:
        return written(write, old, values[0])
    if write in DENSE:
        return written(write, old, sum(values) / (size if aggregation == "MEAN" else 1))
    return written(write, old, *values, divided_by=size if aggregation == "MEAN" else 1)


def assert_copies(variable: Variable, *expected: Array) -> None:
    for copy, wanted in zip(copies(variable), expected, strict=True):
        np.testing.assert_allclose(copy, wanted, rtol=1e-14)


def in_step(variable: Variable, write: str) -> Any:
    return getattr(variable, write)(value_of(get_replica_context().replica_id_in_sync_group, write))  # type: ignore[union-attr]  # in a step


# ---------------------------------------------------------------------------------------- in a replica


@every_write
@every_aggregation
@pytest.mark.parametrize("name", SHARED)
def test_replicas_writes_are_aggregated_then_made_on_all_copies(
    name: str, aggregation: str, write: str
) -> None:
    kind = KINDS[name]
    variable = made(kind, aggregation)
    strategy = kind.strategy()
    if aggregation in ("SUM", "MEAN") and write in ORDERED:
        with pytest.raises(
            NotImplementedError, match=rf"v\.{write}: has no meaning with aggregation {aggregation}"
        ):
            strategy.run(in_step, (variable, write))
        assert_copies(variable, *[INITIAL] * kind.num_copies)
        return
    if aggregation == "NONE":
        with pytest.raises(
            ValueError, match=rf"v\.{write}: called in a replica, on a variable \(made at .*test_writes"
        ):
            strategy.run(in_step, (variable, write))
        assert_copies(variable, *[INITIAL] * kind.num_copies)
        return
    expected = written_by_all(write, INITIAL, aggregation, kind.num_replicas)
    result = strategy.run(in_step, (variable, write))
    assert_copies(variable, *[expected] * kind.num_copies)
    for seen in strategy.experimental_local_results(result):
        np.testing.assert_allclose(seen, expected)


@every_write
@every_aggregation
@pytest.mark.parametrize("name", OWN)
def test_replicas_write_to_their_own_copies_of_an_on_read_variable(
    name: str, aggregation: str, write: str
) -> None:
    kind = KINDS[name]
    variable = made(kind, aggregation)
    if write not in DENSE:
        with pytest.raises(
            NotImplementedError, match=rf"v\.{write}: ON_READ variables have no scatter; use assign_add"
        ):
            kind.strategy().run(in_step, (variable, write))
        return
    kind.strategy().run(in_step, (variable, write))
    replicas = range(kind.num_replicas)
    assert_copies(variable, *[written(write, INITIAL, value_of(replica, write)) for replica in replicas])


@every_write
@every_aggregation
@pytest.mark.parametrize("name", [*PLAIN, "mirrored_1"])
def test_a_lone_replica_writes_as_if_there_were_no_strategy(name: str, aggregation: str, write: str) -> None:
    kind = KINDS[name]
    variable = made(kind, aggregation)
    if name == "mirrored_1" and aggregation in ("SUM", "MEAN") and write in ORDERED:
        with pytest.raises(NotImplementedError):
            kind.strategy().run(in_step, (variable, write))
        return
    kind.strategy().run(in_step, (variable, write))
    assert_copies(variable, written(write, INITIAL, value_of(0, write)))


# --------------------------------------------------------------------------------------- across replicas


def outside(variable: Variable, strategy: Strategy, act: Callable[[], Any]) -> None:
    act()


def in_scope(variable: Variable, strategy: Strategy, act: Callable[[], Any]) -> None:
    with strategy.scope():
        act()


def in_merge(variable: Variable, strategy: Strategy, act: Callable[[], Any]) -> None:
    def merge(_: Strategy) -> None:
        act()

    strategy.run(lambda: get_replica_context().merge_call(merge))  # type: ignore[union-attr]  # in a step


across = pytest.mark.parametrize("context", [outside, in_scope, in_merge])


@across
@every_write
@every_aggregation
@pytest.mark.parametrize("name", [*SHARED, "mirrored_1", *PLAIN])
def test_across_replicas_a_write_reaches_all_copies_and_aggregates_nothing(
    name: str, aggregation: str, write: str, context: Callable[..., None]
) -> None:
    kind = KINDS[name]
    variable = made(kind, aggregation)

    def act() -> None:
        getattr(variable, write)(value_of(0, write))

    if name not in PLAIN and aggregation in ("SUM", "MEAN") and write in ORDERED:
        with pytest.raises(NotImplementedError):
            context(variable, kind.strategy(), act)
        return
    context(variable, kind.strategy(), act)
    assert_copies(variable, *[written(write, INITIAL, value_of(0, write))] * kind.num_copies)


@across
@every_write
@every_aggregation
@pytest.mark.parametrize("name", OWN)
def test_across_replicas_a_write_to_an_on_read_variable_counts_once(
    name: str, aggregation: str, write: str, context: Callable[..., None]
) -> None:
    kind = KINDS[name]
    variable = made(kind, aggregation)
    size = kind.num_copies

    def act() -> None:
        getattr(variable, write)(value_of(0, write), **({"read_value": False} if write in DENSE else {}))

    if write not in DENSE:
        with pytest.raises(NotImplementedError, match="ON_READ variables have no scatter"):
            context(variable, kind.strategy(), act)
        return
    context(variable, kind.strategy(), act)
    if aggregation != "SUM":
        assert_copies(variable, *[written(write, INITIAL, value_of(0, write))] * size)
    elif write == "assign":
        assert_copies(variable, *[value_of(0, write) / size] * size)
    else:
        before = size * INITIAL
        np.testing.assert_allclose(variable.numpy(), written(write, before, value_of(0, write)))


@every_aggregation
@pytest.mark.parametrize("write", DENSE)
@pytest.mark.parametrize("name", ["mirrored_2", "mirrored_3"])
def test_a_mirrored_variables_write_across_replicas_returns_all_new_copies(
    name: str, write: str, aggregation: str
) -> None:
    kind = KINDS[name]
    variable = made(kind, aggregation)
    result = getattr(variable, write)(value_of(0, write))
    assert len(result.values) == kind.num_copies
    for new in result.values:
        np.testing.assert_array_equal(new, written(write, INITIAL, value_of(0, write)))


@pytest.mark.parametrize("name", ["one_device", "mirrored_2", "on_read_2", "central_2"])
def test_without_read_value_nothing_is_returned(name: str) -> None:
    variable = made(KINDS[name], "SUM")
    for write in DENSE:
        assert getattr(variable, write)(INITIAL, read_value=False) is None


# ---------------------------------------------------------------------------------- in an update function


@every_write
@every_aggregation
@pytest.mark.parametrize("through", ["component", "variable"])
@pytest.mark.parametrize("name", ["mirrored_2", "mirrored_3", "central_2", *OWN])
def test_an_update_function_writes_to_one_component_at_a_time(
    name: str, aggregation: str, write: str, through: str
) -> None:
    kind = KINDS[name]
    variable = made(kind, aggregation)

    def fn(component: Variable, value: Any) -> None:
        getattr(component if through == "component" else variable, write)(value)

    refused: type[Exception] | None = None
    if through == "variable" and name in OWN and write not in DENSE:
        refused = NotImplementedError
    if through == "variable" and aggregation in ("SUM", "MEAN") and write in ORDERED:
        refused = NotImplementedError
    if refused:
        with pytest.raises(refused):
            kind.strategy().update(variable, fn, (value_of(0, write),))
        return
    kind.strategy().update(variable, fn, (value_of(0, write),))
    assert_copies(variable, *[written(write, INITIAL, value_of(0, write))] * kind.num_copies)


@pytest.mark.parametrize("name", ["mirrored_2", "on_read_3"])
def test_an_update_function_gets_its_own_part_of_a_per_replica(name: str) -> None:
    kind = KINDS[name]
    variable = made(kind, "SUM")
    parts = PerReplica([np.full((3, 2), float(replica)) for replica in range(kind.num_copies)])
    kind.strategy().update(variable, lambda component, part: component.assign(part), (parts,))
    assert_copies(variable, *parts.values)


# ------------------------------------------------------------------------ values that lie in the variable
# A write that reads what it writes must not see what it has written to the first copy.


@pytest.mark.parametrize("name", ["one_device", "mirrored_2", "mirrored_3", "central_2", *OWN])
@pytest.mark.parametrize("aggregation", ["ONLY_FIRST_REPLICA", "MEAN"])
@pytest.mark.parametrize(
    ("write", "value", "expected"),
    [
        ("assign_add", lambda v: v, 2 * INITIAL),
        ("assign_add", lambda v: v.value(), 2 * INITIAL),
        ("assign_sub", lambda v: v, 0 * INITIAL),
        ("assign", lambda v: v[::-1], INITIAL[::-1]),
        ("assign_add", lambda v: v[::-1], INITIAL + INITIAL[::-1]),
        ("assign_sub", lambda v: v.T.T, 0 * INITIAL),
    ],
    ids=["add_itself", "add_its_value", "subtract_itself", "reverse", "add_reversed", "subtract_a_view"],
)
@pytest.mark.parametrize("in_replica", [False, True], ids=["across", "in_replica"])
def test_a_variable_can_be_written_to_itself(
    name: str,
    aggregation: str,
    write: str,
    value: Callable[[Variable], Any],
    expected: Array,
    in_replica: bool,
) -> None:
    kind = KINDS[name]
    variable = made(kind, aggregation)

    def act() -> None:
        getattr(variable, write)(value(variable), read_value=False)

    if in_replica:
        kind.strategy().run(act)
    else:
        act()
    assert_copies(variable, *[expected] * kind.num_copies)


@pytest.mark.parametrize("name", ["one_device", "mirrored_3", "central_2"])
@pytest.mark.parametrize("in_replica", [False, True], ids=["across", "in_replica"])
def test_rows_of_a_variable_can_be_scattered_into_it(name: str, in_replica: bool) -> None:
    kind = KINDS[name]
    variable = made(kind, "ONLY_FIRST_REPLICA")

    def act() -> None:
        variable.scatter_add(IndexedSlices(variable.value(), np.array([2, 0, 1])))

    if in_replica:
        kind.strategy().run(act)
    else:
        act()
    expected = INITIAL + INITIAL[[1, 2, 0]]
    assert_copies(variable, *[expected] * kind.num_copies)


# ---------------------------------------------------------------------------------------- wrong values


@pytest.mark.parametrize("name", ["one_device", "mirrored_2", "on_read_2", "central_2"])
@pytest.mark.parametrize("write", DENSE)
@pytest.mark.parametrize("in_replica", [False, True], ids=["across", "in_replica"])
@pytest.mark.parametrize(
    ("value", "error", "words"),
    [
        (
            np.ones((2, 3)),
            ValueError,
            r"v\.{}: got float64 of shape \(2, 3\); need shape \(3, 2\), updates are not broadcast",
        ),
        (1.0, ValueError, r"v\.{}: got float64 of shape \(\); need shape \(3, 2\)"),
        (np.ones((3, 2), complex), TypeError, r"v\.{}: got complex128; need what casts to float64 safely"),
        (IndexedSlices(np.ones((1, 2)), [0]), TypeError, r"v\.{}: got IndexedSlices.*need a dense array"),
        ({"a": 1}, TypeError, r"v\.{}: got dict"),
        ("text", TypeError, r"v\.{}: got "),
        ([[1], [2, 3]], TypeError, r"v\.{}: got list"),
        (None, TypeError, r"v\.{}: got NoneType"),
    ],
    ids=["shape", "scalar", "dtype", "sparse", "dict", "text", "ragged", "none"],
)
def test_a_value_that_does_not_fit_is_refused_and_nothing_changes(
    name: str, write: str, in_replica: bool, value: Any, error: type[Exception], words: str
) -> None:
    kind = KINDS[name]
    variable = made(kind, "MEAN")

    def act() -> None:
        getattr(variable, write)(value)

    with pytest.raises(error, match=words.format(write)):
        kind.strategy().run(act) if in_replica else act()
    assert_copies(variable, *[INITIAL] * kind.num_copies)


@pytest.mark.parametrize("name", ["one_device", "mirrored_2", "central_2"])
@pytest.mark.parametrize("write", [*SCATTER, *ORDERED])
@pytest.mark.parametrize(
    ("value", "error", "words"),
    [
        (np.ones((3, 2)), TypeError, r"v\.{}: got ndarray; need IndexedSlices\(values, indices\)"),
        (IndexedSlices(np.ones((1, 3)), [0]), ValueError, r"v\.{}: got rows of float64 of shape \(1, 3\)"),
        (IndexedSlices(np.ones(1), [0]), ValueError, r"v\.{}: got rows of float64 of shape \(1,\)"),
        (IndexedSlices(np.ones((1, 2)), [3]), IndexError, r"v\.{}: got index 3; need one from 0 to 2"),
        (IndexedSlices(np.ones((1, 2)), [-1]), IndexError, r"v\.{}: got index -1; need one from 0 to 2"),
        (IndexedSlices(np.ones((1, 2), complex), [0]), TypeError, r"v\.{}: got complex128"),
    ],
    ids=["dense", "longer_rows", "scalars", "too_large", "negative", "dtype"],
)
def test_slices_that_do_not_fit_are_refused_and_nothing_changes(
    name: str, write: str, value: Any, error: type[Exception], words: str
) -> None:
    kind = KINDS[name]
    variable = made(kind, "NONE")
    with pytest.raises(error, match=words.format(write)):
        getattr(variable, write)(value)
    assert_copies(variable, *[INITIAL] * kind.num_copies)


@pytest.mark.parametrize("name", ["one_device", "mirrored_2", "on_read_2", "central_2"])
@pytest.mark.parametrize("in_replica", [False, True], ids=["across", "in_replica"])
@pytest.mark.parametrize("aggregation", ["MEAN", "ONLY_FIRST_REPLICA"])
@pytest.mark.parametrize("write", DENSE)
def test_a_per_replica_is_no_value_to_write(
    name: str, in_replica: bool, aggregation: str, write: str
) -> None:
    kind = KINDS[name]
    variable = made(kind, aggregation)
    value = PerReplica([INITIAL, INITIAL])

    def act() -> None:
        getattr(variable, write)(value)

    with pytest.raises(ValueError, match=rf"v\.{write}: got a? ?PerReplica"):
        kind.strategy().run(act) if in_replica else act()
    assert_copies(variable, *[INITIAL] * kind.num_copies)
