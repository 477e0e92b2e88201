"""Update rules against their formulas written out in NumPy, and against PyTorch's where the formulas coincide."""

from __future__ import annotations

import gc
import importlib
import importlib.util
import math
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from strategies import (
    LAMB,
    SGD,
    Adagrad,
    Adam,
    AdamW,
    LossScaleOptimizer,
    MirroredStrategy,
    Optimizer,
    RMSprop,
    Strategy,
    UpdateRule,
    Variable,
    assert_replicas_equal,
    get_replica_context,
)

Array = np.ndarray[Any, Any]
RNG = np.random.default_rng(5)
STARTS = [RNG.normal(size=shape) for shape in ((3, 4), (5,), ())]
GRADIENTS = [[RNG.normal(size=start.shape) for start in STARTS] for _ in range(6)]
needs_torch = pytest.mark.skipif(
    importlib.util.find_spec("torch") is None, reason="needs PyTorch: pip install torch"
)


def follow(formula: Callable[..., Any]) -> list[Array]:
    """Where a formula takes the variables; it gets the weights, the gradient, its memory and the step from 1."""
    weights = [start.copy() for start in STARTS]
    memories: list[dict[str, Any]] = [{} for _ in STARTS]
    for number, gradients in enumerate(GRADIENTS, 1):
        weights = [formula(w, g, m, number) for w, g, m in zip(weights, gradients, memories, strict=True)]
    return weights


def train(strategy: Strategy, make: Callable[[], Optimizer]) -> list[Array]:
    """Where an optimizer takes them, each replica having an equal share of the gradients."""
    with strategy.scope():
        variables = [Variable(start) for start in STARTS]
        optimizer = make()
    for gradients in GRADIENTS:
        shares = [gradient / strategy.num_replicas_in_sync for gradient in gradients]
        strategy.run(lambda shares: optimizer.apply_gradients(zip(shares, variables, strict=True)), (shares,))
    assert_replicas_equal(variables)
    return [variable.read_value() for variable in variables]


def adagrad(w: Array, g: Array, m: dict[str, Any], t: int) -> Any:
    m["a"] = m.get("a", 0.3) + g**2
    return w - 0.2 * g / np.sqrt(m["a"] + 1e-4)


def adam(decay: float = 0.0, amsgrad: bool = False) -> Callable[..., Any]:
    def formula(w: Array, g: Array, m: dict[str, Any], t: int) -> Any:
        m["m"] = 0.8 * m.get("m", 0.0) + 0.2 * g
        m["v"] = 0.9 * m.get("v", 0.0) + 0.1 * g**2
        m["max"] = np.maximum(m.get("max", 0.0), m["v"])
        v = m["max"] if amsgrad else m["v"]
        w = w - 0.05 * decay * w
        return w - 0.05 * math.sqrt(1 - 0.9**t) / (1 - 0.8**t) * m["m"] / (np.sqrt(v) + 1e-3)

    return formula


def rmsprop(momentum: float, centered: bool) -> Callable[..., Any]:
    def formula(w: Array, g: Array, m: dict[str, Any], t: int) -> Any:
        m["v"] = 0.7 * m.get("v", 0.0) + 0.3 * g**2
        m["a"] = 0.7 * m.get("a", 0.0) + 0.3 * g
        variance = m["v"] - m["a"] ** 2 if centered else m["v"]
        change = 0.02 * g / np.sqrt(variance + 1e-3)
        m["m"] = momentum * m.get("m", 0.0) + change
        return w - m["m"]

    return formula


def lamb(w: Array, g: Array, m: dict[str, Any], t: int) -> Any:
    m["m"] = 0.8 * m.get("m", 0.0) + 0.2 * g
    m["v"] = 0.9 * m.get("v", 0.0) + 0.1 * g**2
    r = m["m"] / (1 - 0.8**t) / (np.sqrt(m["v"] / (1 - 0.9**t)) + 1e-3) + 0.1 * w
    return w - 0.05 * np.linalg.norm(w) / np.linalg.norm(r) * r


def decayed_sgd(w: Array, g: Array, m: dict[str, Any], t: int) -> Any:
    return w - 0.1 * 0.5 * w - 0.1 * g


RULES: dict[str, tuple[Callable[[], Optimizer], Callable[..., Any]]] = {
    "adagrad": (lambda: Adagrad(0.2, initial_accumulator_value=0.3, epsilon=1e-4), adagrad),
    "adam": (lambda: Adam(0.05, 0.8, 0.9, 1e-3), adam()),
    "amsgrad": (lambda: Adam(0.05, 0.8, 0.9, 1e-3, amsgrad=True), adam(amsgrad=True)),
    "adamw": (lambda: AdamW(0.05, 0.3, 0.8, 0.9, 1e-3), adam(decay=0.3)),
    "adamw_amsgrad": (lambda: AdamW(0.05, 0.3, 0.8, 0.9, 1e-3, True), adam(decay=0.3, amsgrad=True)),
    "rmsprop": (lambda: RMSprop(0.02, 0.7, 0.0, 1e-3), rmsprop(0.0, False)),
    "rmsprop_momentum": (lambda: RMSprop(0.02, 0.7, 0.6, 1e-3), rmsprop(0.6, False)),
    "rmsprop_centered": (lambda: RMSprop(0.02, 0.7, 0.0, 1e-3, True), rmsprop(0.0, True)),
    "rmsprop_both": (lambda: RMSprop(0.02, 0.7, 0.6, 1e-3, True), rmsprop(0.6, True)),
    "lamb": (lambda: LAMB(0.05, 0.8, 0.9, 1e-3, weight_decay=0.1), lamb),
    "sgd_decayed": (lambda: SGD(0.1, weight_decay=0.5), decayed_sgd),
}


@pytest.fixture(params=[1, 2, 3, 5], ids="{}_replicas".format)
def strategy(request: pytest.FixtureRequest) -> Iterator[MirroredStrategy]:
    with MirroredStrategy([f"cpu:{i}" for i in range(request.param)]) as strategy:
        yield strategy


@pytest.mark.parametrize("name", RULES)
def test_weights_follow_the_formula_on_any_number_of_replicas(strategy: Strategy, name: str) -> None:
    make, formula = RULES[name]
    for got, expected in zip(train(strategy, make), follow(formula), strict=True):
        np.testing.assert_allclose(got, expected, rtol=1e-10, atol=1e-13)


TORCH: dict[str, tuple[Callable[[], Optimizer], Callable[[Any, list[Any]], Any]]] = {
    # PyTorch's epsilon stands outside of the root, and beside a root that is corrected for its start from 0: none is left.
    "adagrad": (
        lambda: Adagrad(0.2, initial_accumulator_value=0.3, epsilon=1e-30),
        lambda optim, w: optim.Adagrad(w, lr=0.2, initial_accumulator_value=0.3, eps=1e-30),
    ),
    "adam": (
        lambda: Adam(0.05, 0.8, 0.9, 1e-30),
        lambda optim, w: optim.Adam(w, lr=0.05, betas=(0.8, 0.9), eps=1e-30),
    ),
    "adamw": (
        lambda: AdamW(0.05, 0.3, 0.8, 0.9, 1e-30),
        lambda optim, w: optim.AdamW(w, lr=0.05, betas=(0.8, 0.9), eps=1e-30, weight_decay=0.3),
    ),
    "amsgrad": (
        lambda: Adam(0.05, 0.8, 0.9, 1e-30, amsgrad=True),
        lambda optim, w: optim.Adam(w, lr=0.05, betas=(0.8, 0.9), eps=1e-30, amsgrad=True),
    ),
    "rmsprop": (
        lambda: RMSprop(0.02, 0.7, 0.0, 1e-30),
        lambda optim, w: optim.RMSprop(w, lr=0.02, alpha=0.7, eps=1e-30),
    ),
    "rmsprop_momentum": (
        lambda: RMSprop(0.02, 0.7, 0.6, 1e-30),
        lambda optim, w: optim.RMSprop(w, lr=0.02, alpha=0.7, eps=1e-30, momentum=0.6),
    ),
    "rmsprop_centered": (
        lambda: RMSprop(0.02, 0.7, 0.6, 1e-30, centered=True),
        lambda optim, w: optim.RMSprop(w, lr=0.02, alpha=0.7, eps=1e-30, momentum=0.6, centered=True),
    ),
    "sgd": (lambda: SGD(0.1), lambda optim, w: optim.SGD(w, lr=0.1)),
    "momentum": (lambda: SGD(0.1, 0.9), lambda optim, w: optim.SGD(w, lr=0.1, momentum=0.9)),
    "nesterov": (
        lambda: SGD(0.1, 0.9, nesterov=True),
        lambda optim, w: optim.SGD(w, lr=0.1, momentum=0.9, nesterov=True),
    ),
}


@needs_torch
@pytest.mark.parametrize("name", TORCH)
def test_weights_are_those_of_pytorch_where_the_formulas_coincide(name: str) -> None:
    torch = importlib.import_module("torch")
    make, theirs = TORCH[name]
    weights = [torch.tensor(start, requires_grad=True) for start in STARTS]
    optimizer = theirs(torch.optim, weights)
    for gradients in GRADIENTS:
        for weight, gradient in zip(weights, gradients, strict=True):
            weight.grad = torch.tensor(gradient)
        optimizer.step()
    with MirroredStrategy(["cpu:0", "cpu:1"]) as strategy:
        got = train(strategy, make)
    for ours, weight in zip(got, weights, strict=True):
        np.testing.assert_allclose(ours, weight.detach().numpy(), rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("start", [np.zeros(3), np.ones(3)], ids=["no_weights", "no_direction"])
def test_lamb_takes_a_norm_of_zero_for_a_ratio_of_one(start: Array) -> None:
    w = Variable(start)
    gradient = np.full(3, 2.0) if not start.any() else np.zeros(3)
    LAMB(0.5, epsilon=1e-12).apply_gradients([(gradient, w)])
    # The first direction is the gradient's sign.
    np.testing.assert_allclose(w.read_value(), start - 0.5 * np.sign(gradient), rtol=1e-9)


def test_lamb_scales_each_variable_by_itself_however_they_lie_in_memory() -> None:
    small, large = Variable(np.full(4, 1.0)), Variable(np.full(4, 100.0))
    optimizer = LAMB(0.1, epsilon=1e-12)
    optimizer.apply_gradients([(np.ones(4), small), (np.ones(4), large)])
    np.testing.assert_allclose(small.read_value(), np.full(4, 0.9))
    np.testing.assert_allclose(large.read_value(), np.full(4, 90.0))


# ---------------------------------------------------------------- weight decay


def test_excluded_variables_are_not_decayed_and_the_others_are(strategy: Strategy) -> None:
    with strategy.scope():
        kernel, bias, more = (Variable(np.full(3, 2.0), name=name) for name in ("kernel", "bias", "more"))
        optimizer = SGD(0.1, weight_decay=0.5)
        optimizer.exclude_from_weight_decay([bias])
        optimizer.build([kernel, bias, more])
    zeros = np.zeros(3)
    for _ in range(2):
        strategy.run(lambda: optimizer.apply_gradients([(zeros, kernel), (zeros, bias), (zeros, more)]))
    np.testing.assert_allclose(kernel.read_value(), np.full(3, 2 * 0.95**2))
    np.testing.assert_array_equal(bias.read_value(), np.full(3, 2.0))
    np.testing.assert_allclose(more.read_value(), np.full(3, 2 * 0.95**2))


def test_the_decay_follows_the_learning_rate_of_the_step() -> None:
    w = Variable(np.ones(2))
    optimizer = AdamW(lambda step: 0.5 if step else 0.1, weight_decay=0.2)
    for _ in range(2):
        optimizer.apply_gradients([(np.zeros(2), w)])
    np.testing.assert_allclose(w.read_value(), np.full(2, 0.98 * 0.9))


def test_exclusion_comes_before_the_first_update() -> None:
    w = Variable(np.ones(2))
    optimizer = AdamW(name="decaying")
    optimizer.apply_gradients([(np.ones(2), w)])
    with pytest.raises(RuntimeError, match=r"decaying\.exclude_from_weight_decay: called after updates"):
        optimizer.exclude_from_weight_decay([w])


# ----------------------------------------------------------------- rules of one's own


def test_a_rule_of_ones_own_makes_an_optimizer(strategy: Strategy) -> None:
    class SignDescent(UpdateRule):
        @property
        def slots(self) -> dict[str, float]:
            return {"steps": 10.0}

        @property
        def num_scratch(self) -> int:
            return 1

        def update(
            self,
            parameters: Any,
            gradients: Any,
            slots: Any,
            scratch: Any,
            *,
            step: int,
            learning_rate: float,
        ) -> None:
            np.sign(gradients, out=scratch[0])
            np.multiply(scratch[0], learning_rate * step, out=scratch[0])
            np.subtract(parameters, scratch[0], out=parameters)
            np.add(slots["steps"], 1, out=slots["steps"])

    with strategy.scope():
        w = Variable(np.zeros(2))
        optimizer = Optimizer(SignDescent(), 0.25, name="sign")
    for _ in range(2):
        strategy.run(lambda: optimizer.apply_gradients([(np.array([3.0, -7.0]), w)]))
    np.testing.assert_array_equal(w.read_value(), [-0.75, 0.75])
    np.testing.assert_array_equal(optimizer.slot(w, "steps"), [12.0, 12.0])


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Adagrad(initial_accumulator_value=-1), "initial_accumulator_value=-1; need a number >= 0"),
        (lambda: Adagrad(epsilon=0), "Adagrad: got epsilon=0; need a number above 0"),
        (lambda: RMSprop(rho=1.0), "rho=1.0; need a number from 0 to below 1"),
        (lambda: RMSprop(momentum=-0.1), "momentum=-0.1"),
        (lambda: RMSprop(epsilon=-1), "RMSprop: got epsilon=-1"),
        (lambda: LAMB(beta_2=1.0), "LAMB: got beta_2=1.0"),
        (lambda: LAMB(weight_decay=-1.0), "weight_decay=-1.0; need epsilon > 0, weight_decay >= 0"),
        (lambda: AdamW(weight_decay=math.nan), "weight_decay=nan; need a number >= 0"),
        (lambda: AdamW(beta_1=-0.1), "AdamW: got beta_1=-0.1"),
        (lambda: SGD(clipnorm=0.0), "clipnorm: got 0.0; need a number above 0, or None"),
        (
            lambda: SGD(clipvalue=1.0, global_clipnorm=1.0),
            "got clipvalue and global_clipnorm; need one of them",
        ),
    ],
)
def test_a_number_out_of_range_is_refused_when_the_optimizer_is_made(
    make: Callable[[], Optimizer], words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        make()


def test_a_schedule_that_fails_is_the_steps_error_and_the_next_step_is_right() -> None:
    with MirroredStrategy(["cpu:0", "cpu:1"]) as strategy:
        with strategy.scope():
            w = Variable(np.zeros(2))
            optimizer = SGD(lambda step: [0.5][step - 1] if step else [][0])

        def step() -> None:
            assert get_replica_context() is not None
            optimizer.apply_gradients([(np.ones(2), w)])

        with pytest.raises(IndexError):
            strategy.run(step)
        np.testing.assert_array_equal(w.read_value(), [0, 0])
        assert optimizer.iterations == 0
        optimizer.learning_rate = 0.5
        strategy.run(step)
        np.testing.assert_array_equal(w.read_value(), [-1, -1])


# ------------------------------------------------------------ how gradients lie


@pytest.mark.parametrize("bound", [None, 0.5])
def test_many_small_variables_and_some_large_ones_follow_the_formula(
    strategy: Strategy, bound: float | None
) -> None:
    rng = np.random.default_rng(9)
    shapes = [(int(n), 3) for n in rng.integers(0, 900, 300)] + [(12_000,), (3, 90_000)]
    n = strategy.num_replicas_in_sync
    gradients = [[rng.normal(size=shape).astype(np.float32) for shape in shapes] for _ in range(n)]
    for own in gradients:  # some in other layouts
        own[5], own[-1] = np.asfortranarray(own[5]), np.asfortranarray(own[-1])
        own[7] = np.repeat(own[7], 2, axis=1)[:, ::2]
    with strategy.scope():
        variables = [Variable(np.zeros(shape, np.float32)) for shape in shapes]
        optimizer = SGD(0.5, momentum=0.9, global_clipnorm=bound)

    def step() -> None:
        replica = get_replica_context()
        assert replica is not None
        optimizer.apply_gradients(zip(gradients[replica.replica_id_in_sync_group], variables, strict=True))

    strategy.run(step)
    strategy.run(step)
    totals = [np.sum([own[i].astype(np.float64) for own in gradients], axis=0) for i in range(len(shapes))]
    norm = math.sqrt(sum(float((total**2).sum()) for total in totals))
    scale = 1.0 if bound is None else bound / norm
    for variable, total in zip(variables, totals, strict=True):
        # The momentum of two equal gradients: 1, then 1.9.
        np.testing.assert_allclose(variable.read_value(), -0.5 * 2.9 * scale * total, rtol=1e-4, atol=1e-5)
    assert_replicas_equal(variables)


def test_gradients_may_lie_in_one_anothers_places() -> None:
    with MirroredStrategy(["cpu:0", "cpu:1"]) as strategy:
        with strategy.scope():
            a, b = Variable(np.zeros((100, 100))), Variable(np.zeros((100, 100)))
            optimizer = SGD(1.0, global_clipnorm=1e6)

        def step() -> None:
            place_a, place_b = optimizer.gradient(a), optimizer.gradient(b)
            place_a[...], place_b[...] = 1.0, 2.0
            optimizer.apply_gradients([(place_b, a), (place_a, b)])

        strategy.run(step)
        np.testing.assert_array_equal(a.read_value(), np.full((100, 100), -4.0))
        np.testing.assert_array_equal(b.read_value(), np.full((100, 100), -2.0))


def test_gradients_are_let_go_of_after_the_update() -> None:
    with MirroredStrategy(["cpu:0", "cpu:1"]) as strategy:
        with strategy.scope():
            w, scaled = Variable(np.zeros((100, 100))), Variable(np.zeros((100, 100)))
            optimizer, scaling = SGD(1.0), LossScaleOptimizer(SGD(1.0))
        alive: list[weakref.ref[Array]] = []

        def step(value: float) -> None:
            for one, variable in ((optimizer, w), (scaling, scaled)):
                gradient = np.full((100, 100), value)
                alive.append(weakref.ref(gradient))
                one.apply_gradients([(gradient, variable)])

        for value in (1.0, np.inf):
            strategy.run(step, (value,))
        gc.collect()
        assert [reference() is None for reference in alive] == [True] * 8


@pytest.mark.parametrize("rate", [-0.1, np.inf, np.nan], ids=repr)
def test_a_learning_rate_that_is_no_finite_number_is_refused_where_it_is_set(rate: Any) -> None:
    with pytest.raises(ValueError, match=r"SGD: got learning_rate=.*; need a finite number >= 0"):
        SGD(learning_rate=rate)
    optimizer = SGD(learning_rate=0.5)
    with pytest.raises(ValueError, match="need a finite number >= 0"):
        optimizer.learning_rate = rate
    assert optimizer.learning_rate == 0.5
