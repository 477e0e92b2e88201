"""What holds for every kind of variable, and all of the plain one."""

from __future__ import annotations

import copy
import gc
import pickle
import sys
import threading
import weakref
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import strategies
from collectives import IndexedSlices
from strategies import CentralStorageStrategy, MirroredStrategy, OneDeviceStrategy, get_replica_context
from variables import PerReplica, ReplicaContextError, Variable, VariableAggregation, VariableSynchronization

Array = np.ndarray[Any, Any]
Make = Callable[..., Variable]

_STRATEGIES = {
    "plain": None,
    "one_device": OneDeviceStrategy("cpu:0"),
    "mirrored": MirroredStrategy(["cpu:0", "cpu:1"]),
    "central": CentralStorageStrategy(["cpu:0", "cpu:1"], "cpu:0"),
}


@pytest.fixture(params=_STRATEGIES)
def make(request: pytest.FixtureRequest) -> Make:
    """Makes variables outside any scope, or in one strategy's."""
    strategy = _STRATEGIES[request.param]

    def made(*args: Any, **kwargs: Any) -> Variable:
        if strategy is None:
            return Variable(*args, **kwargs)
        with strategy.scope():
            return Variable(*args, **kwargs)

    return made


# --------------------------------------------------------------------------------------------- making


@pytest.mark.parametrize(
    ("initial", "dtype", "expected"),
    [
        (1, np.int64, 1),
        (1.5, np.float64, 1.5),
        (True, np.bool_, True),
        (2j, np.complex128, 2j),
        ([1, 2], np.int64, [1, 2]),
        (np.float32(3), np.float32, 3),
        (np.ones((2, 0), np.int8), np.int8, np.ones((2, 0))),
        (np.arange(6).reshape(2, 3).T, np.int64, [[0, 3], [1, 4], [2, 5]]),
        (lambda: np.ones(2, np.float16), np.float16, [1, 1]),
        (np.ones(2, ml_dtypes.bfloat16), ml_dtypes.bfloat16, [1, 1]),
    ],
    ids=[
        "int",
        "float",
        "bool",
        "complex",
        "list",
        "numpy_number",
        "empty",
        "transposed",
        "function",
        "bfloat16",
    ],
)
def test_it_holds_its_initial_value_in_its_dtype_and_shape(
    make: Make, initial: Any, dtype: Any, expected: Any
) -> None:
    variable = make(initial)
    assert variable.dtype == dtype
    assert variable.shape == np.shape(expected)
    assert variable.ndim == np.ndim(expected)
    np.testing.assert_array_equal(variable.numpy(), expected)


def test_a_dtype_converts_the_initial_value(make: Make) -> None:
    variable = make([1, 2], dtype=np.float32)
    assert variable.dtype == np.float32
    assert variable.numpy().tolist() == [1, 2]


def test_the_initial_value_is_copied(make: Make) -> None:
    initial = np.ones(3)
    variable = make(initial)
    initial[...] = 7
    variable.assign_add(np.ones(3))
    assert variable.numpy().tolist() == [2, 2, 2]
    assert initial.tolist() == [7, 7, 7]


def test_a_variable_can_be_another_ones_initial_value(make: Make) -> None:
    first = make([1.0, 2.0])
    second = make(first)
    second.assign_add([1.0, 1.0])
    assert first.numpy().tolist() == [1, 2]
    assert second.numpy().tolist() == [2, 3]


def test_a_function_is_called_once_for_all_copies(make: Make) -> None:
    calls: list[int] = []

    def initializer() -> Array:
        calls.append(1)
        return np.random.default_rng().normal(size=4)

    variable = make(initializer)
    assert calls == [1]
    assert len({component.numpy().tobytes() for component in variable.components}) == 1


@pytest.mark.parametrize(
    ("initial", "error", "words"),
    [
        (
            None,
            ValueError,
            "Variable 'v': got initial_value=None; need one array, number, or function giving one",
        ),
        (PerReplica([1, 2]), ValueError, "Variable 'v': got initial_value=PerReplica"),
        (lambda: None, ValueError, "Variable 'v': got initial_value=None"),
        ("text", TypeError, "Variable 'v': got str of dtype <U4; need booleans"),
        ({"a": 1}, TypeError, "Variable 'v': got dict of dtype object"),
        (np.array([object()]), TypeError, "Variable 'v': got array of dtype object"),
        (np.zeros(1, "datetime64[s]"), TypeError, r"Variable 'v': got array of dtype datetime64\[s\]"),
        (np.zeros(1, [("a", "f4")]), TypeError, "pass the fields one by one"),
        ([[1], [2, 3]], TypeError, "Variable 'v': got list, which is no array"),
    ],
    ids=["none", "per_replica", "function_of_none", "text", "dict", "object", "date", "record", "ragged"],
)
def test_what_is_no_array_of_numbers_is_refused(
    make: Make, initial: Any, error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        make(initial, name="v")


def test_synchronization_none_is_refused_and_auto_is_on_write(make: Make) -> None:
    with pytest.raises(ValueError, match="Variable 'v': got synchronization NONE; need ON_WRITE or ON_READ"):
        make(1.0, name="v", synchronization="NONE")
    assert make(1.0, synchronization="AUTO").synchronization is VariableSynchronization.ON_WRITE


@pytest.mark.parametrize("synchronization", ["ON_WRITE", "ON_READ"])
@pytest.mark.parametrize("dtype", [np.int32, np.bool_, np.uint8])
def test_the_mean_of_what_is_not_floating_is_refused_when_made(
    make: Make, synchronization: str, dtype: type
) -> None:
    with pytest.raises(ValueError, match="with aggregation MEAN, which an integer can't hold"):
        make(1, dtype, synchronization=synchronization, aggregation="MEAN")


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.complex64, ml_dtypes.bfloat16])
def test_floating_dtypes_may_be_averaged(make: Make, dtype: Any) -> None:
    assert make(np.ones(2), dtype, aggregation="MEAN").dtype == dtype


def test_enums_go_by_member_or_by_name_in_any_case(make: Make) -> None:
    variable = make(1.0, synchronization=VariableSynchronization.ON_READ, aggregation="sum")
    assert variable.synchronization is VariableSynchronization.ON_READ
    assert variable.aggregation is VariableAggregation.SUM
    with pytest.raises(
        ValueError, match="aggregation: got 'MEDIAN'; need one of NONE, SUM, MEAN, ONLY_FIRST_REPLICA"
    ):
        make(1.0, aggregation="MEDIAN")


def test_optimizers_update_it_unless_it_is_read_or_told_otherwise(make: Make) -> None:
    assert make(1.0).trainable is True
    assert make(1.0, synchronization="ON_READ").trainable is False
    assert make(1.0, synchronization="ON_READ", trainable=True).trainable is True
    assert make(1.0, trainable=False).trainable is False


# --------------------------------------------------------------------------------------------- names


def test_it_has_the_name_it_was_given_and_its_copies_are_numbered(make: Make) -> None:
    variable = make(1.0, name="layer/kernel")
    names = [component.name for component in variable.components]
    assert variable.name == "layer/kernel"
    assert names == ["layer/kernel", "layer/kernel/replica_1"][: len(names)]


def test_without_a_name_a_strategy_numbers_them() -> None:
    strategy = MirroredStrategy(["cpu:0"])
    with strategy.scope():
        assert [Variable(1.0).name for _ in range(3)] == ["variable", "variable_1", "variable_2"]


def test_its_words_tell_kind_name_dtype_and_shape(make: Make) -> None:
    assert f"{make(np.ones((2, 3)), name='w')!r}".split(" ", 1)[1] == "'w' float64 of shape (2, 3)>"
    assert repr(make(1, name="n", aggregation="SUM")).endswith("'n' int64 of shape (), ON_WRITE/SUM>")


def test_it_can_be_formatted_as_the_number_it_holds(make: Make) -> None:
    variable = make(1.23456, name="loss")
    assert f"{variable:.3f}" == "1.235"
    assert f"{variable}" == str(variable)


# ------------------------------------------------------------------------------------------ arithmetic


W = np.array([[1.0, 2.0], [3.0, 4.0]])


COMPUTATIONS = """
w + 1
1 - w
w * w
2 / w
w // 2
w % 3
2**w
w**2
-w
+w
abs(w)
w @ w
np.ones(2) @ w
w @ np.ones(2)
np.array([1.0, 2.0]) * w
np.float64(2) * w
w > 2
w <= 2
w == w.T
w != 1
divmod(w, 2)
w[1]
w[:, ::-1]
w[w > 1]
w[None, ..., 0]
w[[1, 0]]
w.T
w.sum(axis=0)
w.mean()
w.reshape(-1)
w.astype(int)
w.argsort(axis=0)
w.size + w.nbytes + w.itemsize
w.tolist()
np.exp(w)
np.add(w, w, where=w > 2, out=np.zeros((2, 2)))
np.add.reduce(w)
np.multiply.outer(w, w)
np.sum(w, axis=1, keepdims=True)
np.concatenate([w, w[:1]])
np.stack((w, w))
np.where(w > 2, w, 0)
np.einsum("ij,ij->i", w, w)
np.linalg.inv(w)
np.linalg.norm(w, axis=0)
np.tensordot(w, w, axes=1)
np.dot(w, [1, 2])
np.clip(w, 1.5, 2.5)
np.split(w, 2)
np.allclose(w, w)
np.shape(w)
np.zeros_like(w)
np.pad(w, 1)
np.block([[w, w]])
np.broadcast_to(w, (3, 2, 2))
np.asarray(w)
np.array(w, np.float32)
np.random.default_rng(0).permutation(w)
list(w)
[len(w), 3.0 in w, 9.0 in w]
sum(w)
max(w[0])
np.ones((2, 2)).__iadd__(w)
"""


@pytest.mark.parametrize("expression", COMPUTATIONS.strip().splitlines())
def test_it_computes_as_the_array_it_holds(make: Make, expression: str) -> None:
    variable = make(W)
    result, expected = (eval(expression, {"np": np, "w": w}) for w in (variable, W.copy()))
    assert type(result) is type(expected)
    parts = (result, expected) if isinstance(expected, (list, tuple)) else ([result], [expected])
    for one, other in zip(*parts, strict=True):
        np.testing.assert_array_equal(one, other)
    np.testing.assert_array_equal(variable.numpy(), W)


def test_it_computes_in_a_step_too() -> None:
    strategy = _STRATEGIES["mirrored"]
    assert strategy is not None
    with strategy.scope():
        variable = Variable(W)
    result = strategy.run(lambda x: x @ variable + np.exp(variable)[0], (PerReplica([W, 2 * W]),))
    for replica, part in enumerate(result.values):
        np.testing.assert_array_equal(part, (replica + 1) * W @ W + np.exp(W)[0])


@pytest.mark.parametrize("convert", [bool, int, float, complex])
def test_a_scalar_is_a_number_too(convert: Callable[[Any], Any], make: Make) -> None:
    assert convert(make(2.0)) == convert(2.0)
    assert type(convert(make(2.0))) is convert


def test_a_whole_number_is_an_index(make: Make) -> None:
    assert [10, 20, 30][make(1)] == 20
    with pytest.raises(TypeError):
        _ = [10, 20, 30][make(1.0)]


def test_several_elements_have_no_truth(make: Make) -> None:
    with pytest.raises(ValueError, match="ambiguous"):
        bool(make(W))


def test_it_is_a_key_by_identity_though_it_compares_by_element(make: Make) -> None:
    first, second = make(W), make(W)
    table = {first: 1, second: 2}
    assert table[first] == 1
    assert table[second] == 2
    assert (first == second).all()


def test_adding_in_place_is_assign_add(make: Make) -> None:
    variable = make(W)
    same = variable
    variable += W
    variable -= np.ones((2, 2))
    assert variable is same
    np.testing.assert_array_equal(variable.numpy(), 2 * W - 1)


def multiplied_in_place(variable: Any) -> None:
    variable *= 2


def assigned_an_item(variable: Any) -> None:
    variable[0] = 1


@pytest.mark.parametrize(
    "write",
    [
        multiplied_in_place,
        assigned_an_item,
        lambda v: np.add(W, 1, out=v),
        lambda v: np.concatenate([W[:1], W[1:]], out=v),
        lambda v: np.clip(W, 0, 1, out=v),
        lambda v: np.copyto(v, W),
        lambda v: np.sum(W[None], axis=0, out=v),
    ],
    ids=["times", "item", "add", "concatenate", "clip", "copyto", "sum"],
)
def test_what_would_change_one_copy_only_is_refused_with_what_to_use(
    make: Make, write: Callable[[Any], Any]
) -> None:
    variable = make(W, name="w")
    with pytest.raises(
        TypeError, match=r"w: .* would change one copy only; use assign, assign_add, assign_sub or scatter"
    ):
        write(variable)
    np.testing.assert_array_equal(variable.numpy(), W)


@pytest.mark.parametrize(
    "write",
    [
        lambda v: np.add.at(v, 0, 1),
        lambda v: np.fill_diagonal(v, 0),
        lambda v: np.put(v, [0], 1),
        lambda v: np.putmask(v, W > 0, 0),
        lambda v: np.place(v, W > 0, [0]),
        lambda v: np.asarray(v).fill(0),
        lambda v: v.value().sort(),
        lambda v: np.dot(W, W, np.asarray(v)),
    ],
    ids=["at", "fill_diagonal", "put", "putmask", "place", "fill", "sort", "dot"],
)
def test_what_numpy_gets_hold_of_is_read_only(make: Make, write: Callable[[Any], Any]) -> None:
    variable = make(W)
    with pytest.raises((ValueError, TypeError)):
        write(variable)
    np.testing.assert_array_equal(variable.numpy(), W)


def test_it_has_no_attributes_of_arrays_that_change_them(make: Make) -> None:
    for name in ("fill", "sort", "resize", "put", "setflags", "partition", "itemset", "nonsense"):
        with pytest.raises(AttributeError, match=f"has no attribute '{name}'"):
            getattr(make(W), name)


# --------------------------------------------------------------------------------- reading, other libraries


def test_value_is_live_and_read_value_and_numpy_are_snapshots(make: Make) -> None:
    variable = make(W)
    live, snapshot, array = variable.value(), variable.read_value(), variable.numpy()
    variable.assign_add(W)
    np.testing.assert_array_equal(live, 2 * W)
    np.testing.assert_array_equal(snapshot, W)
    np.testing.assert_array_equal(array, W)
    snapshot[...] = array[...] = 0  # they are the caller's own
    np.testing.assert_array_equal(variable.numpy(), 2 * W)


def test_asarray_copies_only_when_asked_to(make: Make) -> None:
    variable = make(W)
    assert np.shares_memory(np.asarray(variable), variable.value())
    assert not np.shares_memory(np.array(variable), variable.value())
    assert np.asarray(variable, np.float32).dtype == np.float32
    assert np.shares_memory(np.asarray(variable, copy=False), variable.value())
    with pytest.raises(ValueError, match="got copy=False with dtype float32; float64 needs a copy"):
        np.asarray(variable, np.float32, copy=False)


def test_dlpack_shares_the_memory(make: Make) -> None:
    variable = make(W)
    shared = np.from_dlpack(variable)
    assert np.shares_memory(shared, variable.value())
    variable.assign_add(W)
    np.testing.assert_array_equal(shared, 2 * W)
    assert variable.__dlpack_device__() == (1, 0)


def test_copying_and_pickling_are_refused_with_what_to_copy(make: Make) -> None:
    variable = make(W, name="w")
    for attempt in (copy.deepcopy, copy.copy, pickle.dumps, lambda v: copy.deepcopy({"model": [v]})):
        with pytest.raises(
            TypeError, match=r"w: a variable belongs to its strategy and can't be copied; copy read_value\(\)"
        ):
            attempt(variable)


# --------------------------------------------------------------------------------------------- writing


def test_python_numbers_take_the_variables_dtype(make: Make) -> None:
    for dtype, value in (
        (np.float32, 3),
        (np.uint8, 255),
        (np.int8, -128),
        (np.int32, 2.0),
        (np.complex64, 1),
        (np.bool_, 1),
    ):
        variable = make(0, dtype)
        variable.assign(value)
        assert variable.numpy() == value
        assert variable.numpy().dtype == dtype


@pytest.mark.parametrize(
    ("dtype", "value", "error", "words"),
    [
        (np.int8, 300, OverflowError, "v.assign: got 300; need what int8 holds"),
        (np.uint8, -1, OverflowError, "v.assign: got -1; need what uint8 holds"),
        (np.int32, 2**40, OverflowError, f"v.assign: got {2**40}; need what int32 holds"),
        (np.bool_, 2, OverflowError, "v.assign: got 2; need what bool holds"),
        (np.int64, 1.5, TypeError, "v.assign: got 1.5; need a whole number for int64"),
        (np.int64, float("nan"), TypeError, "v.assign: got nan; need a whole number for int64"),
        (np.float64, 1j, TypeError, "v.assign: got complex128; need what casts to float64 safely"),
    ],
)  # fmt: skip
def test_python_numbers_that_the_dtype_does_not_hold_are_refused(
    make: Make, dtype: Any, value: Any, error: type[Exception], words: str
) -> None:
    variable = make(0, dtype, name="v")
    with pytest.raises(error, match=words):
        variable.assign(value)
    assert variable.numpy() == 0


def test_arrays_cast_as_long_as_their_kind_is_kept(make: Make) -> None:
    variable = make(np.zeros(2, np.float32))
    variable.assign(np.array([1.5, 2.5]))
    variable.assign_add(np.array([1, 2]))
    assert variable.numpy().tolist() == [2.5, 4.5]
    whole = make(np.zeros(2, np.int64), name="n")
    with pytest.raises(
        TypeError,
        match=r"n.assign: got float64; need what casts to int64 safely — convert it with astype\(int64\)",
    ):
        whole.assign(np.array([1.0, 2.0]))


def test_indices_that_come_more_than_once_all_count(make: Make) -> None:
    variable = make(np.ones((3, 2)))
    variable.scatter_add(IndexedSlices(np.ones((4, 2)), [1, 1, 1, 0]))
    np.testing.assert_array_equal(variable.numpy(), [[2, 2], [4, 4], [1, 1]])
    variable.scatter_mul(IndexedSlices(np.full((2, 2), 3.0), [0, 0]))
    np.testing.assert_array_equal(variable.numpy()[0], [18, 18])


def test_of_rows_replaced_more_than_once_the_last_stays(make: Make) -> None:
    variable = make(np.zeros((3, 1)))
    variable.scatter_update(IndexedSlices([[1.0], [2.0], [3.0]], [2, 0, 2]))
    assert variable.numpy().tolist() == [[2], [0], [3]]


def test_scattering_no_rows_changes_nothing(make: Make) -> None:
    variable = make(W)
    for write in ("add", "sub", "mul", "div", "min", "max", "update"):
        getattr(variable, f"scatter_{write}")(IndexedSlices(np.empty((0, 2)), []))
    np.testing.assert_array_equal(variable.numpy(), W)


def test_a_scalar_has_no_rows_to_scatter(make: Make) -> None:
    with pytest.raises(ValueError, match=r"v\.scatter_add: got rows of .*; the variable has shape \(\)"):
        make(1.0, name="v").scatter_add(IndexedSlices([1.0], [0]))


# ---------------------------------------------------------------------------------- outside strategies


def test_a_plain_variable_is_one_array_for_all_replicas_and_every_write_counts() -> None:
    strategy = _STRATEGIES["mirrored"]
    assert strategy is not None
    variable = Variable(0.0)
    strategy.run(lambda: [variable.assign_add(1.0) for _ in range(100)] and None)
    assert variable.numpy() == 200


def test_writes_from_many_threads_to_a_plain_variable_are_not_lost() -> None:
    variable = Variable(np.zeros(3, np.int64))
    usual = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        threads = [
            threading.Thread(target=lambda: [variable.assign_add(np.ones(3, np.int64)) for _ in range(1000)])
            for _ in range(4)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
    finally:
        sys.setswitchinterval(usual)
    assert variable.numpy().tolist() == [4000] * 3


def test_a_strategys_variable_is_refused_under_another_strategy() -> None:
    first, second = MirroredStrategy(["cpu:0", "cpu:1"]), MirroredStrategy(["cpu:0", "cpu:1"])
    with first.scope():
        variable = Variable(1.0, name="w", aggregation="SUM")
    for act in (lambda: variable.value(), lambda: variable.assign(2.0), lambda: variable + 1):
        with pytest.raises(
            ReplicaContextError, match=r"w: used in a replica of Mirrored.*, but was made under Mirrored"
        ):
            second.run(act)
        with second.scope(), pytest.raises(ReplicaContextError, match="w: used in the scope of Mirrored"):
            act()
    assert variable.numpy() == 1


def test_unused_variables_are_freed_with_their_memory(make: Make) -> None:
    variable = make(np.zeros(1 << 20))
    memory = weakref.ref(variable.value().base)
    made = weakref.ref(variable)
    del variable
    blocks = [make(np.zeros(1 << 20)) for _ in range(10)]  # a block is kept open for the next ones
    gc.collect()
    assert made() is None
    assert memory() is None
    del blocks


# -------------------------------------------------------------------------------------- made in a step


def test_made_in_a_step_all_replicas_get_one_variable_from_replica_0s_value() -> None:
    strategy = _STRATEGIES["mirrored"]
    assert strategy is not None
    made: list[Variable] = []

    def step() -> None:
        replica = get_replica_context()
        assert replica is not None
        variable = Variable(float(replica.replica_id_in_sync_group + 5), name="state", aggregation="SUM")
        made.append(variable)
        variable.assign_add(1.0)

    strategy.run(step)
    assert made[0] is made[1]
    assert [component.numpy() for component in made[0].components] == [7, 7]
    assert made[0].owner is strategy


def test_a_variable_made_on_one_replica_only_is_a_mismatch_and_the_strategy_goes_on() -> None:
    strategy = _STRATEGIES["mirrored"]
    assert strategy is not None

    def step() -> None:
        replica = get_replica_context()
        if replica is not None and replica.replica_id_in_sync_group == 1:
            Variable(1.0, name="odd")

    with pytest.raises(strategies.CollectiveMismatchError, match="replica 1 calls Variable 'odd'"):
        strategy.run(step)
    assert strategy.run(lambda: 1) == 1


def test_an_initializer_that_raises_in_a_step_raises_there() -> None:
    strategy = _STRATEGIES["mirrored"]
    assert strategy is not None

    def broken() -> Array:
        raise ZeroDivisionError("initializer")

    with pytest.raises(ZeroDivisionError, match="initializer"):
        strategy.run(lambda: Variable(broken) and None)
    assert strategy.run(lambda: 1) == 1
