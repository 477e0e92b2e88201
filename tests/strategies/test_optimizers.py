"""Optimizers, against the formulas written out in NumPy."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from collectives import CollectiveMismatchError, IndexedSlices
from strategies import (
    SGD,
    Adam,
    CentralStorageStrategy,
    MirroredStrategy,
    OneDeviceStrategy,
    Optimizer,
    Strategy,
    get_replica_context,
)
from variables import ReplicaContextError, Variable, assert_replicas_equal

STRATEGIES: dict[str, Callable[[], Strategy]] = {
    "one_device": OneDeviceStrategy,
    "mirrored_1": lambda: MirroredStrategy(["cpu:0"]),
    "mirrored_2": lambda: MirroredStrategy(["cpu:0", "cpu:1"]),
    "mirrored_5": lambda: MirroredStrategy([f"cpu:{i}" for i in range(5)]),
    "central_3": lambda: CentralStorageStrategy([f"cpu:{i}" for i in range(3)]),
}


@pytest.fixture(params=STRATEGIES)
def strategy(request: pytest.FixtureRequest) -> Any:
    with STRATEGIES[request.param]() as strategy:
        yield strategy


class Expected:
    """One parameter array, updated by the formula of one optimizer."""

    def __init__(self, value: np.ndarray[Any, Any], formula: str, **settings: float) -> None:
        self.value, self.formula, self.settings = value.copy(), formula, settings
        self.m, self.v, self.largest = np.zeros_like(value), np.zeros_like(value), np.zeros_like(value)
        self.t = 0

    def step(self, g: np.ndarray[Any, Any], lr: float) -> None:
        self.t += 1
        s = self.settings
        if self.formula == "sgd":
            self.value = self.value - lr * g
        elif self.formula in ("momentum", "nesterov"):
            self.m = s["mu"] * self.m - lr * g
            self.value = self.value + (self.m if self.formula == "momentum" else s["mu"] * self.m - lr * g)
        else:
            self.m = self.m + (g - self.m) * (1 - s["b1"])
            self.v = self.v + (g * g - self.v) * (1 - s["b2"])
            self.largest = np.maximum(self.largest, self.v)
            v = self.largest if self.formula == "amsgrad" else self.v
            alpha = lr * math.sqrt(1 - s["b2"] ** self.t) / (1 - s["b1"] ** self.t)
            self.value = self.value - alpha * self.m / (np.sqrt(v) + s["eps"])


OPTIMIZERS: dict[str, tuple[Callable[[], Optimizer], str, dict[str, float]]] = {
    "sgd": (lambda: SGD(0.1), "sgd", {}),
    "momentum": (lambda: SGD(0.1, momentum=0.9), "momentum", {"mu": 0.9}),
    "nesterov": (lambda: SGD(0.1, momentum=0.8, nesterov=True), "nesterov", {"mu": 0.8}),
    "adam": (lambda: Adam(0.1, 0.8, 0.95, 1e-5), "adam", {"b1": 0.8, "b2": 0.95, "eps": 1e-5}),
    "amsgrad": (lambda: Adam(0.1, 0.7, 0.6, amsgrad=True), "amsgrad", {"b1": 0.7, "b2": 0.6, "eps": 1e-7}),
}


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_variables_follow_the_formula_with_the_sum_of_all_replicas_gradients(
    strategy: Strategy, kind: str
) -> None:
    make, formula, settings = OPTIMIZERS[kind]
    rng = np.random.default_rng(1)
    shapes = [(3, 5), (), (7,), (0, 4), (2, 1, 6)]
    starts = [rng.normal(size=shape) for shape in shapes]
    n = strategy.num_replicas_in_sync
    with strategy.scope():
        variables = [Variable(start, name=f"w{i}") for i, start in enumerate(starts)]
        optimizer = make()
    expected = [Expected(start, formula, **settings) for start in starts]
    for _ in range(4):
        gradients = [[rng.normal(size=shape) for shape in shapes] for _ in range(n)]

        def step(gradients: Any = gradients) -> None:
            replica = get_replica_context()
            assert replica is not None
            optimizer.apply_gradients(zip(gradients[replica.replica_id], variables, strict=True))

        strategy.run(step)
        for i, want in enumerate(expected):
            want.step(np.sum([own[i] for own in gradients], axis=0), 0.1)
    for variable, want in zip(variables, expected, strict=True):
        np.testing.assert_allclose(variable.read_value(), want.value, rtol=1e-12, atol=1e-14)
    assert_replicas_equal(variables)
    assert optimizer.iterations == 4


def test_mean_divides_by_the_number_of_replicas() -> None:
    with MirroredStrategy(["cpu:0", "cpu:1", "cpu:2"]) as strategy:
        with strategy.scope():
            w = Variable(np.zeros(2))
            optimizer = SGD(1.0, gradient_aggregation="mean")
        strategy.run(lambda: optimizer.apply_gradients([(np.full(2, 6.0 * replica_id()), w)]))
        np.testing.assert_array_equal(w.read_value(), [-6, -6])


def replica_id() -> int:
    replica = get_replica_context()
    assert replica is not None
    return replica.replica_id


def test_large_variables_whose_update_the_replicas_share_get_the_same_bits_as_on_one_device() -> None:
    rng = np.random.default_rng(2)
    shapes = [(700, 700), (3,), (1 << 20,)]
    starts = [rng.normal(size=shape).astype(np.float32) for shape in shapes]
    gradients = [[rng.normal(size=shape).astype(np.float32) for shape in shapes] for _ in range(3)]
    results = []
    for replicas in (1, 3):
        with MirroredStrategy([f"cpu:{i}" for i in range(replicas)]) as strategy:
            with strategy.scope():
                variables = [Variable(start) for start in starts]
                optimizer = Adam(0.01)

            def step(
                replicas: int = replicas, optimizer: Optimizer = optimizer, variables: Any = variables
            ) -> None:
                if replicas == 1:  # the sum in the order of the replicas
                    own = [a + b + c for a, b, c in zip(*gradients, strict=True)]
                else:
                    own = gradients[replica_id()]
                optimizer.apply_gradients(zip(own, variables, strict=True))

            for _ in range(3):
                strategy.run(step)
            assert_replicas_equal(variables)
            results.append([variable.read_value() for variable in variables])
    for one, three in zip(*results, strict=True):
        assert one.tobytes() == three.tobytes()


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64, np.complex64])
def test_variables_of_several_dtypes_are_updated_each_in_its_own(strategy: Strategy, dtype: Any) -> None:
    with strategy.scope():
        w, other = Variable(np.ones(3, dtype)), Variable(np.ones(2, np.float64))
        optimizer = SGD(0.5)
    share = 1 / strategy.num_replicas_in_sync
    strategy.run(
        lambda: optimizer.apply_gradients([(np.full(3, share, dtype), w), (np.full(2, share), other)])
    )
    assert w.dtype == dtype
    np.testing.assert_allclose(w.read_value(), np.full(3, 0.5), rtol=1e-3)
    np.testing.assert_allclose(other.read_value(), [0.5, 0.5])


def test_half_precision_gradients_that_overflow_one_another_are_summed_in_float32() -> None:
    with MirroredStrategy(["cpu:0", "cpu:1", "cpu:2"]) as strategy:
        with strategy.scope():
            w = Variable(np.zeros(1, np.float16))
            optimizer = SGD(1.0)
        values = [60000, 60000, -60000]
        strategy.run(lambda: optimizer.apply_gradients([(np.array([values[replica_id()]], np.float16), w)]))
        np.testing.assert_array_equal(w.read_value(), [-60000])


def test_a_subset_of_the_variables_in_any_order_is_updated_alone(strategy: Strategy) -> None:
    with strategy.scope():
        a, b, c = (Variable(np.zeros(5), name=name) for name in "abc")
        optimizer = SGD(1.0, momentum=0.5)
        optimizer.build([a, b, c])
    share = np.full(5, 1 / strategy.num_replicas_in_sync)
    strategy.run(lambda: optimizer.apply_gradients([(3 * share, c), (share, a)]))
    strategy.run(lambda: optimizer.apply_gradients([(share, a), (None, b), (3 * share, c)]))
    np.testing.assert_allclose(a.read_value(), np.full(5, -1 - 1.5))
    np.testing.assert_array_equal(b.read_value(), np.zeros(5))
    np.testing.assert_allclose(c.read_value(), np.full(5, -3 - 4.5))


def test_gradients_in_any_layout_and_kind_are_taken(strategy: Strategy) -> None:
    with strategy.scope():
        variables = [Variable(np.zeros((4, 3), np.float32)) for _ in range(5)]
        scalar = Variable(np.float32(0))
        optimizer = SGD(1.0)
    g = np.arange(12, dtype=np.float32).reshape(4, 3)
    read_only = g.copy()
    read_only.flags.writeable = False
    wide = np.zeros((8, 6), np.float32)
    wide[::2, ::2] = g

    def step() -> None:
        gradients = [np.asfortranarray(g), wide[::2, ::2], g.astype(np.float64), read_only, g.tolist()]
        optimizer.apply_gradients([*zip(gradients, variables, strict=True), (2.0, scalar)])

    strategy.run(step)
    for variable in variables:
        np.testing.assert_array_equal(variable.read_value(), -g * strategy.num_replicas_in_sync)
    assert float(scalar) == -2.0 * strategy.num_replicas_in_sync


def test_a_gradient_written_into_its_place_needs_no_copy_and_counts_the_same(strategy: Strategy) -> None:
    with strategy.scope():
        w, b = Variable(np.zeros((2, 3))), Variable(np.zeros(4))
        optimizer = SGD(1.0)
    n = strategy.num_replicas_in_sync

    def step() -> bool:
        place = optimizer.gradient(w)
        np.multiply(np.ones((2, 3)), 5, out=place)
        optimizer.apply_gradients([(place, w), (np.ones(4), b)])
        return np.shares_memory(place, optimizer.gradient(w)) and place.flags.writeable

    strategy.run(step)
    strategy.run(step)
    np.testing.assert_array_equal(w.read_value(), np.full((2, 3), -10 * n))
    np.testing.assert_array_equal(b.read_value(), np.full(4, -2 * n))


def test_a_transposed_view_of_its_own_place_is_taken_as_what_it_shows() -> None:
    strategy = OneDeviceStrategy()
    with strategy.scope():
        w = Variable(np.zeros((3, 3)))
        optimizer = SGD(1.0)

    def step() -> None:
        place = optimizer.gradient(w)
        place[...] = np.arange(9.0).reshape(3, 3)
        optimizer.apply_gradients([(place.T, w)])

    strategy.run(step)
    np.testing.assert_array_equal(w.read_value(), -np.arange(9.0).reshape(3, 3).T)


def test_rows_of_a_sparse_gradient_add_up_and_differ_between_replicas(strategy: Strategy) -> None:
    with strategy.scope():
        table, w = Variable(np.zeros((5, 2))), Variable(np.zeros(2))
        optimizer = SGD(1.0)
    n = strategy.num_replicas_in_sync

    def step() -> None:
        rows = [replica_id() % 5, 4, 4]
        optimizer.apply_gradients([(IndexedSlices(np.ones((3, 2)), rows, (5, 2)), table), (np.ones(2), w)])

    strategy.run(step)
    expected = np.zeros((5, 2))
    for replica in range(n):
        expected[replica % 5] -= 1
        expected[4] -= 2
    np.testing.assert_array_equal(table.read_value(), expected)
    np.testing.assert_array_equal(w.read_value(), [-n, -n])


def test_the_learning_rate_may_be_set_between_steps_and_be_a_function_of_the_steps_before() -> None:
    strategy = MirroredStrategy(["cpu:0", "cpu:1"])
    with strategy.scope():
        w, v = Variable(0.0), Variable(0.0)
        fixed, scheduled = SGD(1.0), SGD(lambda step: 10.0**-step)

    def step() -> None:
        fixed.apply_gradients([(0.5, w)])
        scheduled.apply_gradients([(0.5, v)])

    for rate in (1.0, 0.5):
        fixed.learning_rate = rate
        strategy.run(step)
    np.testing.assert_allclose([float(w), float(v)], [-1.5, -1.1])
    assert fixed.learning_rate == 0.5


def test_slots_can_be_looked_at(strategy: Strategy) -> None:
    with strategy.scope():
        w = Variable(np.zeros(2), name="w")
        optimizer = SGD(0.5, momentum=0.9)
    strategy.run(lambda: optimizer.apply_gradients([(np.full(2, 1 / strategy.num_replicas_in_sync), w)]))
    np.testing.assert_allclose(optimizer.slot(w, "momentum"), [-0.5, -0.5])
    with pytest.raises(KeyError, match="got 'velocity'; the slots are momentum"):
        optimizer.slot(w, "velocity")


def test_plain_variables_are_updated_outside_of_strategies() -> None:
    w = Variable(np.ones(3))
    SGD(0.5).apply_gradients([(np.ones(3), w)])
    np.testing.assert_array_equal(w.read_value(), np.full(3, 0.5))


def test_two_optimizers_of_one_variable_keep_their_state_apart(strategy: Strategy) -> None:
    with strategy.scope():
        w = Variable(np.zeros(1))
        first, second = SGD(1.0, momentum=0.5), SGD(1.0, momentum=0.5)
    g = np.full(1, 1 / strategy.num_replicas_in_sync)

    def step() -> None:
        first.apply_gradients([(g, w)])
        second.apply_gradients([(g, w)])

    strategy.run(step)
    np.testing.assert_allclose(w.read_value(), [-2])
    assert (first.iterations, second.iterations) == (1, 1)


def test_variables_made_between_steps_are_taken_up_by_build(strategy: Strategy) -> None:
    optimizer = Adam(1.0, epsilon=1e-12)
    variables: list[Variable] = []
    share = 1 / strategy.num_replicas_in_sync
    for _ in range(12):
        with strategy.scope():
            variables.append(Variable(np.zeros(3000)))
        optimizer.build(variables)
        strategy.run(lambda: optimizer.apply_gradients([(np.full(3000, share), v) for v in variables]))
    # With a constant gradient, Adam's first step for a variable depends on the common step count only through
    # its bias correction; the last variable has taken one step, with the moments starting from zero.
    t = 12
    alpha = math.sqrt(1 - 0.999**t) / (1 - 0.9**t)
    np.testing.assert_allclose(variables[-1].value(), -alpha * 0.1 / math.sqrt(0.001), rtol=1e-6)
    assert_replicas_equal(variables)


# ------------------------------------------------------------------ bad input


@pytest.fixture
def mirrored() -> Any:
    with MirroredStrategy(["cpu:0", "cpu:1"]) as strategy, strategy.scope():
        yield strategy, Variable(np.zeros((2, 3)), name="kernel"), SGD(1.0, name="sgd")


@pytest.mark.parametrize(
    ("gradient", "error", "words"),
    [
        (
            np.ones(3),
            ValueError,
            r"sgd\.apply_gradients: kernel: got float64 of shape \(3,\); need shape \(2, 3\)",
        ),
        (np.ones((2, 3), complex), TypeError, "kernel: got complex128 of shape .* casts to float64 safely"),
        (IndexedSlices(np.ones((1, 3)), [2]), IndexError, "kernel: got index 2; need one from 0 to 1"),
        (IndexedSlices(np.ones((1, 3)), [-1]), IndexError, "kernel: got index -1"),
        (IndexedSlices(np.ones((1, 4)), [0]), ValueError, r"kernel: got .*; need rows of shape \(2, 3\)"),
        ("text", TypeError, "kernel: got str"),
        (None, ValueError, "got None for every variable on every replica; need at least one gradient"),
    ],
    ids=["shape", "complex", "row", "negative_row", "row_shape", "text", "none"],
)
def test_a_gradient_that_does_not_fit_is_named_and_nothing_is_changed(
    mirrored: Any, gradient: Any, error: type[Exception], words: str
) -> None:
    strategy, kernel, optimizer = mirrored
    with pytest.raises(error, match=words):
        strategy.run(lambda: optimizer.apply_gradients([(gradient, kernel)]))
    np.testing.assert_array_equal(kernel.read_value(), np.zeros((2, 3)))
    assert optimizer.iterations == 0
    strategy.run(lambda: optimizer.apply_gradients([(np.ones((2, 3)), kernel)]))
    np.testing.assert_array_equal(kernel.read_value(), np.full((2, 3), -2))


def test_a_gradient_of_another_shape_on_one_replica_only_is_that_replicas_error(mirrored: Any) -> None:
    strategy, kernel, optimizer = mirrored
    with pytest.raises(ValueError, match=r"got float64 of shape \(3,\)") as failure:
        strategy.run(
            lambda: optimizer.apply_gradients([(np.ones(3) if replica_id() else np.ones((2, 3)), kernel)])
        )
    assert failure.value.__notes__ == ["in replica 1 of 2 (cpu:1)"]


def test_replicas_that_update_different_variables_are_a_mismatch(mirrored: Any) -> None:
    strategy, kernel, optimizer = mirrored
    with strategy.scope():
        bias = Variable(np.zeros(3), name="bias")
    optimizer.build([kernel, bias])
    with pytest.raises(
        CollectiveMismatchError, match=r"replica 0 calls .*of kernel.*replica 1 calls .*of bias"
    ):
        strategy.run(
            lambda: optimizer.apply_gradients(
                [(np.ones(3), bias) if replica_id() else (np.ones((2, 3)), kernel)]
            )
        )


def test_a_variable_given_twice_is_named(mirrored: Any) -> None:
    strategy, kernel, optimizer = mirrored
    with pytest.raises(ValueError, match="got kernel twice; need each variable once — add its gradients"):
        strategy.run(lambda: optimizer.apply_gradients([(np.ones((2, 3)), kernel)] * 2))


def test_a_variable_of_another_strategy_is_named_with_both(mirrored: Any) -> None:
    strategy, _, optimizer = mirrored
    made: list[Variable] = []

    def make() -> None:
        with OneDeviceStrategy().scope():
            made.append(Variable(np.zeros(2), name="theirs"))

    thread = threading.Thread(target=make)  # a new thread is in no scope
    thread.start()
    thread.join(10)
    (theirs,) = made
    with pytest.raises(ValueError, match=r"theirs was made under OneDeviceStrategy.*make it in its scope"):
        strategy.run(lambda: optimizer.apply_gradients([(np.ones(2), theirs)]))


def test_apply_gradients_across_replicas_says_where_to_call_it(mirrored: Any) -> None:
    _, kernel, optimizer = mirrored
    with pytest.raises(
        ReplicaContextError, match=r"needs replica context — call it in the function passed to strategy\.run"
    ):
        optimizer.apply_gradients([(np.ones((2, 3)), kernel)])


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: SGD(-1.0), "learning_rate=-1.0; need a finite number >= 0"),
        (lambda: SGD(0.1, momentum=1.5), "momentum=1.5; need a number from 0 to 1"),
        (lambda: SGD(0.1, nesterov=True), "need momentum above 0"),
        (lambda: Adam(0.1, beta_1=1.0), "beta_1=1.0"),
        (lambda: Adam(0.1, epsilon=0.0), "epsilon=0.0; need a number above 0"),
        (
            lambda: SGD(0.1, gradient_aggregation="max"),
            "gradient_aggregation: got 'max'; need one of SUM, MEAN",
        ),
    ],
    ids=["rate", "momentum", "nesterov", "beta", "epsilon", "aggregation"],
)
def test_a_hyperparameter_outside_of_its_range_is_refused_at_once(
    make: Callable[[], Optimizer], words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        make()
