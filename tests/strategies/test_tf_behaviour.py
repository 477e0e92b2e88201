"""What tf.distribute does and its users rely on, statement by statement.

The recorded cases under tests/conformance hold most of it; here is what they leave open: contexts, what is wrapped and
what is not, and the calls across replicas.
"""

from __future__ import annotations

from collections import OrderedDict, namedtuple
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import strategies as xpd
from strategies import (
    CentralStorageStrategy,
    IndexedSlices,
    Mirrored,
    MirroredStrategy,
    OneDeviceStrategy,
    PerReplica,
    Strategy,
    Variable,
    get_replica_context,
    get_strategy,
    has_strategy,
    in_cross_replica_context,
)

Point = namedtuple("Point", ["x", "y"])
OPTIONS = xpd.CommunicationOptions(timeout_seconds=10)


@pytest.fixture
def two() -> Iterator[MirroredStrategy]:
    with MirroredStrategy(["cpu:0", "cpu:1"], communication_options=OPTIONS) as strategy:
        yield strategy


@pytest.fixture
def three() -> Iterator[MirroredStrategy]:
    with MirroredStrategy(["cpu:0", "cpu:1", "cpu:2"], communication_options=OPTIONS) as strategy:
        yield strategy


@pytest.fixture
def one() -> Iterator[OneDeviceStrategy]:
    with OneDeviceStrategy("cpu:0") as strategy:
        yield strategy


def values(strategy: Strategy, *components: Any) -> Any:
    return strategy.distribute_values_from_function(
        lambda context: components[context.replica_id_in_sync_group]
    )


def rid() -> int:
    replica = get_replica_context()
    assert replica is not None
    return replica.replica_id_in_sync_group


def replica() -> xpd.ReplicaContext:
    context = get_replica_context()
    assert context is not None
    return context


def where() -> tuple[bool, bool, bool]:
    return in_cross_replica_context(), has_strategy(), get_replica_context() is not None


# ---------------------------------------------------------------------------- contexts


def test_outside_of_every_strategy_code_is_the_one_replica_of_a_default_strategy() -> None:
    assert where() == (False, False, True)
    assert (rid(), replica().num_replicas_in_sync) == (0, 1)
    assert get_strategy() is get_strategy()
    assert get_strategy().num_replicas_in_sync == 1
    np.testing.assert_array_equal(replica().all_reduce("SUM", np.arange(3)), [0, 1, 2])
    np.testing.assert_array_equal(replica().all_gather(np.arange(3), 0), [0, 1, 2])
    assert replica().merge_call(lambda strategy, x: (where(), x), (4,)) == ((True, False, False), 4)


def test_the_default_replica_goes_on_after_an_error() -> None:
    def fail(strategy: Strategy) -> None:
        raise KeyError("merge")

    for _ in range(2):
        with pytest.raises(KeyError, match="merge"):
            replica().merge_call(fail)
        assert replica().all_reduce("SUM", 2.0) == 2.0


def test_the_default_strategy_owns_the_variables_made_under_none(two: MirroredStrategy) -> None:
    variable = Variable(np.float32(5))
    assert get_strategy().extended.variable_created_in_scope(variable)
    assert not two.extended.variable_created_in_scope(variable)
    result = get_strategy().extended.update(variable, lambda component, x: component.assign_add(x), (1,))
    assert result == variable.read_value() == 6
    with two.scope():
        mirrored = Variable(1.0)
    assert not get_strategy().extended.variable_created_in_scope(mirrored)


def test_predicates_tell_scope_step_merge_function_and_update_apart(two: MirroredStrategy) -> None:
    with two.scope():
        assert where() == (True, True, False)
        assert get_strategy() is two
        variable = Variable(1.0)
    assert two.run(where) == (False, True, True)
    assert two.run(lambda: replica().merge_call(lambda strategy: where())) == (True, True, False)
    assert two.extended.update(variable, lambda component: where()) == (True, True, False)
    assert where() == (False, False, True)


def test_a_scope_may_be_entered_again_but_no_other_in_it(
    two: MirroredStrategy, three: MirroredStrategy
) -> None:
    with two.scope():
        with two.scope():
            assert get_strategy() is two
        assert get_strategy() is two
        with pytest.raises(RuntimeError, match="another strategy"), three.scope():
            pass
        with pytest.raises(RuntimeError, match="another strategy"):
            three.run(rid)
        assert get_strategy() is two


def test_the_view_is_restored_after_an_error_anywhere(two: MirroredStrategy) -> None:
    def fail(*_: Any) -> None:
        raise LookupError

    with two.scope():
        variable = Variable(1.0)
    calls: list[Callable[[], Any]] = [
        lambda: two.run(fail),
        lambda: two.run(lambda: replica().merge_call(fail)),
        lambda: two.extended.update(variable, fail),
        lambda: two.distribute_values_from_function(fail),
    ]
    for call in calls:
        with pytest.raises(LookupError):
            call()
        assert where() == (False, False, True)
    assert two.run(lambda: replica().all_reduce("SUM", 1.0)).values == (2.0, 2.0)


def test_a_failed_collective_leaves_all_strategies_usable(
    two: MirroredStrategy, three: MirroredStrategy
) -> None:
    for _ in range(3):
        with pytest.raises(xpd.CollectiveMismatchError):
            two.run(lambda: replica().all_reduce("SUM", np.ones(1 + rid())))
        with pytest.raises(xpd.CollectiveMismatchError):
            two.run(lambda: replica().all_gather(np.ones((1, 1 + rid())), 0))
        assert two.run(lambda: replica().all_reduce("SUM", 1.0)).values == (2.0, 2.0)
        assert three.run(lambda: replica().all_reduce("SUM", 1.0)).values == (3.0, 3.0, 3.0)


def test_two_strategies_over_the_same_devices_do_not_meet(two: MirroredStrategy) -> None:
    with MirroredStrategy(["cpu:0", "cpu:1"], communication_options=OPTIONS) as other:
        for size in (1, 5, 3):
            first = two.run(lambda n=size: replica().all_reduce("SUM", np.ones(n)))
            second = other.run(lambda n=size: replica().all_reduce("SUM", np.ones(2 * n)))
            assert (first.values[1].shape, second.values[0].shape) == ((size,), (2 * size,))


# ---------------------------------------------------------------------- run and merge_call


def test_results_keep_their_containers_and_wrap_what_differs(two: MirroredStrategy) -> None:
    shared = np.ones(2)

    def step() -> Any:
        return {
            "point": Point(np.float32(rid()), shared),
            "list": [rid(), None, "text"],
            "pair": (rid() + 1, two),
        }

    result = two.run(step)
    assert type(result["point"]) is Point
    assert result["point"].x.values == (0, 1)
    assert result["point"].y is shared
    assert [type(item) for item in result["list"]] == [PerReplica, type(None), str]
    assert result["pair"][0].values == (1, 2)
    assert result["pair"][1] is two


def test_equal_results_that_are_not_the_same_object_are_wrapped(two: MirroredStrategy) -> None:
    assert isinstance(two.run(lambda: np.zeros(2)), PerReplica)


def test_results_may_differ_in_shape_and_dtype(two: MirroredStrategy) -> None:
    result = two.run(lambda: np.ones(2, np.float32) if rid() else np.ones((1, 3), np.int8))
    assert [(part.shape, part.dtype.name) for part in result.values] == [((1, 3), "int8"), ((2,), "float32")]


@pytest.mark.parametrize(
    "pair", [({"a": 1}, {"b": 1}), ([1], (1,)), ([1], [1, 2]), ((1,), 1), (Point(1, 2), (1, 2))], ids=repr
)
def test_replica_0s_containers_are_everybodys(two: MirroredStrategy, pair: tuple[Any, Any]) -> None:
    with pytest.raises(ValueError, match="differ in structure: replica 0 has"):
        two.run(lambda: pair[rid()])


def test_where_replica_0_has_a_leaf_the_others_may_have_anything(two: MirroredStrategy) -> None:
    assert two.run(lambda: [7] if rid() else 5).values == (5, [7])


def test_components_are_taken_out_of_arguments_at_any_depth(two: MirroredStrategy) -> None:
    with two.scope():
        variable = Variable(10.0)

    def step(nested: Any, *, scale: Any, plain: Any) -> Any:
        assert isinstance(nested["v"], xpd.MirroredVariable)
        return nested["x"][0] * scale.y + nested["v"] + plain

    nested = OrderedDict(x=[values(two, 1.0, 2.0)], v=variable)
    result = two.run(step, [nested], {"scale": Point(0, values(two, 3.0, 5.0)), "plain": 100.0})
    assert result.values == (113.0, 120.0)


def test_one_replica_returns_bare_values_and_takes_per_replica_ones(one: OneDeviceStrategy) -> None:
    with MirroredStrategy(["cpu:0"]) as single:
        x = values(single, np.arange(3))
        assert isinstance(x, PerReplica)
        np.testing.assert_array_equal(single.run(lambda x: x + rid(), (x,)), [0, 1, 2])
        np.testing.assert_array_equal(single.reduce("SUM", x, axis=None), [0, 1, 2])
        assert single.reduce("SUM", x, axis=0) == 3
        np.testing.assert_array_equal(single.gather(x, 0), [0, 1, 2])
        assert len(single.local_results(x)) == 1
    assert one.run(lambda x: x + rid(), (5,)) == 5
    assert one.distribute_values_from_function(
        lambda c: (c.replica_id_in_sync_group, c.num_replicas_in_sync)
    ) == (0, 1)


def test_merge_call_wraps_arguments_and_deals_out_results(three: MirroredStrategy) -> None:
    shared = np.ones(1)
    seen: list[Any] = []

    def merge(strategy: Strategy, x: Any, *, named: Any, same: Any) -> Any:
        seen.append((strategy, type(x), type(named), same))
        return {"mine": values(strategy, "a", "b", "c"), "ours": strategy.reduce("SUM", x, axis=None)}

    def step() -> Any:
        return replica().merge_call(merge, (rid(),), {"named": [rid()], "same": shared})

    result = three.run(step)
    assert seen == [(three, PerReplica, list, shared)]
    assert result["mine"].values == ("a", "b", "c")
    assert result["ours"] == 3


def test_a_merge_function_may_run_a_step_and_assign_across_replicas(two: MirroredStrategy) -> None:
    with two.scope():
        variable = Variable(0.0, aggregation="SUM")

    def merge(strategy: Strategy) -> Any:
        variable.assign(4.0)
        return strategy.reduce(
            "SUM", strategy.run(lambda: replica().all_reduce("SUM", rid() + 1.0)), axis=None
        )

    assert two.run(lambda: replica().merge_call(merge)) == 6.0
    assert [float(copy) for copy in two.local_results(variable)] == [4.0, 4.0]


def test_in_a_merge_function_there_is_no_replica(two: MirroredStrategy) -> None:
    with pytest.raises(RuntimeError, match="needs replica context"):
        two.run(lambda: replica().merge_call(lambda strategy: xpd.merge_call(lambda inner: 1)))


# -------------------------------------------------------------------- collectives in a step


def test_all_reduce_takes_structures_and_gives_every_replica_its_own_arrays(three: MirroredStrategy) -> None:
    def step() -> Any:
        mine = {
            "a": np.full(2, rid(), np.int32),
            "b": [np.float16(rid()), (np.zeros((0, 3)), 2.0)],
            "none": [],
        }
        return replica().all_reduce("mean", mine)

    result = three.run(step)
    assert [part.tolist() for part in result["a"].values] == [[1.0, 1.0]] * 3
    assert result["a"].values[0].dtype == np.float64
    assert result["a"].values[0] is not result["a"].values[1]
    assert [(part, part.dtype) for part in result["b"][0].values] == [(1, np.float16)] * 3
    assert result["b"][1][0].values[2].shape == (0, 3)
    assert result["b"][1][1].values == (2.0, 2.0, 2.0)
    assert result["none"] == []


def test_dense_and_sparse_leaves_keep_their_places(two: MirroredStrategy) -> None:
    def step() -> Any:
        rows = IndexedSlices(np.full((1 + rid(), 2), 4.0), np.arange(1 + rid()), (3, 2))
        return replica().all_reduce("MEAN", [rows, np.float64(rid()), rows])

    first, number, second = two.run(step)
    assert number.values == (0.5, 0.5)
    for slices in (*first.values, *second.values):
        assert slices.indices.tolist() == [0, 0, 1]
        assert slices.values.tolist() == [[2.0, 2.0]] * 3


def test_a_leaf_that_is_sparse_on_some_replicas_only_is_a_mismatch(two: MirroredStrategy) -> None:
    rows = IndexedSlices(np.ones((1, 2)), [0], (3, 2))
    with pytest.raises(xpd.CollectiveMismatchError, match=r"all_reduce SUM.*all_gather"):
        two.run(lambda: replica().all_reduce("SUM", rows if rid() else np.ones((3, 2))))


@pytest.mark.parametrize(
    ("value", "axis", "error"),
    [
        (np.float32(1), 0, ValueError),
        (np.ones(2), 1, ValueError),
        (np.ones(2), -1, ValueError),
        (np.ones(2), 0.0, ValueError),
        (np.array(["a"]), 0, TypeError),
        (np.array([None]), 0, TypeError),
        (IndexedSlices(np.ones((1, 2)), [0]), 0, NotImplementedError),
    ],
    ids=str,
)
def test_gathering_refuses_the_same_in_a_step_and_across(
    two: MirroredStrategy, value: Any, axis: Any, error: type[Exception]
) -> None:
    with pytest.raises(error, match="all_gather"):
        two.run(lambda: replica().all_gather(value, axis))
    with pytest.raises(error, match="gather"):
        two.gather(values(two, value, value), axis)


@pytest.mark.parametrize(
    "value", [np.array(["a"]), np.array([None]), "text", None, np.array(0, "datetime64[s]")], ids=repr
)
def test_what_is_no_number_is_no_value_to_reduce(two: MirroredStrategy, value: Any) -> None:
    with pytest.raises(TypeError, match="all_reduce"):
        two.run(lambda: replica().all_reduce("SUM", value))
    with pytest.raises(TypeError, match="reduce"):
        two.reduce("SUM", values(two, value, value), axis=None)


# ------------------------------------------------------------------- calls across replicas


def test_reduce_of_a_plain_value_counts_it_once_for_each_replica_or_refuses(three: MirroredStrategy) -> None:
    with pytest.raises(ValueError, match="one and the same on all 3 replicas"):
        three.reduce("SUM", np.ones(2), axis=None)
    np.testing.assert_array_equal(three.reduce("MEAN", np.arange(2), axis=None), [0, 1])
    assert three.reduce("SUM", np.array([3, 4]), axis=0) == 21
    assert three.reduce("MEAN", np.array([3, 4]), axis=0) == 3.5


def test_reduce_over_several_axes_counts_elements(two: MirroredStrategy) -> None:
    x = values(two, np.array([[1.0, 2.0], [3.0, 4.0]]), np.array([[8.0, 0.0]]))
    assert two.reduce("MEAN", x, axis=[0, -1]) == 3.0
    np.testing.assert_allclose(two.reduce("MEAN", x, axis=0), [4.0, 2.0])
    for axis in (2, -3, (0, 5)):
        with pytest.raises(ValueError, match="axis"):
            two.reduce("SUM", x, axis=axis)
    wrong: Any
    for wrong in ("0", 1.5, True):
        with pytest.raises(TypeError, match="axis"):
            two.reduce("MEAN", x, axis=wrong)


def test_a_mirrored_value_has_a_mean_but_no_sum(two: MirroredStrategy) -> None:
    with two.scope():
        variable = Variable([1.0, 2.0])
    mirrored = two.extended.reduce_to("SUM", values(two, 1.0, 2.0), variable)
    assert isinstance(mirrored, Mirrored)
    assert two.reduce("MEAN", mirrored, axis=None) == 3.0
    np.testing.assert_array_equal(two.reduce("MEAN", variable, axis=None), [1.0, 2.0])
    for value in (mirrored, variable):
        with pytest.raises(ValueError, match="SUM"):
            two.reduce("SUM", value, axis=None)


def test_an_on_read_variable_is_reduced_as_asked_whatever_its_aggregation(two: MirroredStrategy) -> None:
    with two.scope():
        variable = Variable(0, synchronization="ON_READ", aggregation="ONLY_FIRST_REPLICA")
    two.run(lambda: variable.assign(rid() + 1))
    assert two.reduce("SUM", variable, axis=None) == 3
    assert two.reduce("MEAN", variable, axis=None) == 1.5


def test_local_results_repeat_what_is_not_distributed(two: MirroredStrategy, one: OneDeviceStrategy) -> None:
    x = values(two, 1, 2)
    assert two.local_results({"x": x, "y": [3]}) == ({"x": 1, "y": [3]}, {"x": 2, "y": [3]})
    assert two.local_results([1, 2]) == ([1, 2],)
    assert one.local_results([1, 2]) == ([1, 2],)
    with two.scope():
        variable = Variable(1.0)
    assert len(two.local_results(variable)) == 2


def test_values_from_a_function_are_always_wrapped(two: MirroredStrategy) -> None:
    same = object()
    calls = []

    def make(context: xpd.ValueContext) -> Any:
        calls.append((context.replica_id_in_sync_group, context.num_replicas_in_sync))
        return {"same": same, "list": [context.replica_id_in_sync_group]}

    result = two.distribute_values_from_function(make)
    assert calls == [(0, 2), (1, 2)]
    assert result["same"].values == (same, same)
    assert result["list"][0].values == (0, 1)


def test_an_update_slices_arguments_and_resolves_every_variable_to_the_component(
    two: MirroredStrategy,
) -> None:
    with two.scope():
        variable = Variable(5.0)
        other = Variable(0.0, synchronization="ON_READ", aggregation="SUM")
    two.run(lambda: other.assign(rid() + 1.0))
    update = two.extended.update
    grouped = update(variable, lambda component, x: component * x + other, (values(two, 1.0, 2.0),))
    assert isinstance(grouped, Mirrored)
    assert grouped.values == (6.0, 12.0)
    pairs = update(variable, lambda component, x: (component + x, 1), kwargs={"x": 1.0}, group=False)
    assert pairs == ((6.0, 6.0), (1, 1))
    with pytest.raises(ValueError, match="not made under"):
        update(Variable(1.0), lambda component: None)


def test_an_update_in_a_step_is_a_merge_point(two: MirroredStrategy) -> None:
    with two.scope():
        variable = Variable(5.0)
    two.run(
        lambda: two.extended.update(variable, lambda component, x: component.assign_add(x), (float(rid()),))
    )
    assert [float(copy) for copy in two.local_results(variable)] == [5.0, 6.0]


@pytest.mark.parametrize("destinations", [["cpu:0"], None, 3.5, "nowhere"], ids=repr)
def test_destinations_are_a_value_a_variable_or_a_device(two: MirroredStrategy, destinations: Any) -> None:
    with pytest.raises(ValueError, match=r"got .*; need"):
        two.extended.reduce_to("SUM", values(two, 1.0, 2.0), destinations)


def test_reduce_to_has_a_copy_where_the_destination_has_one(two: MirroredStrategy) -> None:
    x = values(two, np.array([1.0]), np.array([2.0]))
    with two.scope():
        variable = Variable([0.0])
    for destinations in (variable, x):
        assert [part.tolist() for part in two.extended.reduce_to("SUM", x, destinations).values] == [
            [3.0],
            [3.0],
        ]
    for destination in ("cpu:1", np.zeros(5)):
        assert two.extended.reduce_to("MEAN", x, destination).tolist() == [1.5]
    both = two.extended.batch_reduce_to("SUM", [(x, variable), (x, "cpu:0")])
    assert [type(part) for part in both] == [Mirrored, np.ndarray]
    copies = two.extended.broadcast_to(np.arange(2), variable).values
    assert [copy.tolist() for copy in copies] == [[0, 1], [0, 1]]
    assert copies[0] is not copies[1]


@pytest.mark.parametrize(
    "method", ["reduce", "gather", "reduce_to", "run", "distribute_values_from_function"]
)
def test_calls_across_replicas_are_refused_in_a_step(two: MirroredStrategy, method: str) -> None:
    arguments = {"reduce": ("SUM", 1.0, None), "gather": (1.0, 0), "reduce_to": ("SUM", 1.0, "cpu:0")}
    with pytest.raises(RuntimeError, match=rf"{method}: called inside replica \d.*across replicas"):
        two.run(lambda: getattr(two, method)(*arguments.get(method, (lambda *_: None,))))


def test_central_storage_keeps_one_copy_whatever_the_synchronization() -> None:
    with CentralStorageStrategy(["cpu:0", "cpu:1"], "cpu:0", communication_options=OPTIONS) as central:
        with central.scope():
            variable = Variable(1.0, synchronization="ON_READ", aggregation="SUM")
        assert len(central.local_results(variable)) == 1
        variable.assign_add(2.0)
        central.run(lambda: variable.assign_add(float(rid() + 1)))
        assert float(variable) == 6.0
        assert central.reduce("SUM", central.run(lambda: variable.read_value()), axis=None) == 12.0


def test_one_device_wraps_nothing_and_reduces_to_the_value_itself(one: OneDeviceStrategy) -> None:
    with one.scope():
        variable = Variable(1, synchronization="ON_READ", aggregation="SUM")
    assert not isinstance(variable, (xpd.MirroredVariable, xpd.SyncOnReadVariable))
    assert one.run(lambda: variable.assign_add(rid() + 1)) == 2
    x = np.arange(2)
    assert one.reduce("SUM", x, axis=None) is x
    assert one.gather(x, 0) is x
    np.testing.assert_array_equal(one.run(lambda: replica().all_gather(x, 0)), x)
