"""Moments and batch normalization over replicas, against one array in one piece."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from collectives import Array, CollectiveMismatchError
from strategies import (
    SGD,
    CentralStorageStrategy,
    MirroredStrategy,
    OneDeviceStrategy,
    Strategy,
    SyncBatchNorm,
    sync_moments,
)
from variables import PerReplica, ReplicaContextError, assert_replicas_equal

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


def mirrored(size: int = 2) -> MirroredStrategy:
    return MirroredStrategy([f"cpu:{i}" for i in range(size)])


def shares(whole: Array, size: int) -> PerReplica:
    """Uneven shares of the rows; the last but one of several is empty."""
    cuts = np.sort(np.random.default_rng(5).integers(1, len(whole), size - 1))
    if size > 2:
        cuts[-2:] = cuts[-1]
    return PerReplica(np.split(whole, cuts))


def all_parts(strategy: Strategy, value: Any) -> Array:
    return np.concatenate(strategy.local_results(value))


# ----------------------------------------------------------------------- moments


def test_b19_statistics_are_those_of_all_replicas_together() -> None:
    with mirrored() as strategy:
        x = PerReplica([np.array([[0.0], [0.0]]), np.array([[6.0]])])
        mean, variance = strategy.run(lambda x: sync_moments(x, axis=0), (x,))
        assert [m.item() for m in strategy.local_results(mean)] == [2.0, 2.0]
        assert [v.item() for v in strategy.local_results(variance)] == [8.0, 8.0]


@pytest.mark.parametrize("axis", [0, -4, (0, 2, 3), [0, 1], (3, 0), (0, 1, 2, 3)], ids=str)
@pytest.mark.parametrize("keepdims", [False, True])
def test_moments_of_uneven_and_empty_shares_are_numpys_of_the_whole(
    strategy: Strategy, axis: Any, keepdims: bool
) -> None:
    whole = np.random.default_rng(0).normal(3, 2, size=(17, 3, 4, 2))
    args = (shares(whole, strategy.num_replicas_in_sync),)
    moments = strategy.run(lambda x: sync_moments(x, axis, keepdims=keepdims), args)
    numpys = tuple(axis) if isinstance(axis, list) else axis
    for got, expected in zip(
        moments, (whole.mean(numpys, keepdims=keepdims), whole.var(numpys, keepdims=keepdims)), strict=True
    ):
        components = strategy.local_results(got)
        for component in components:
            np.testing.assert_allclose(component, expected, rtol=1e-13)
            assert component.shape == expected.shape
            assert component.tobytes() == components[0].tobytes()


def test_moments_far_from_zero_keep_their_variance() -> None:
    rng = np.random.default_rng(1)
    for dtype, center, rtol in ((np.float64, 1e9, 1e-12), (np.float32, 1e4, 1e-6)):
        whole = (center + rng.normal(size=(100_000, 2))).astype(dtype)
        from_center = whole.astype(np.float64) - center  # exact
        with mirrored(3) as strategy:
            mean, variance = strategy.run(lambda x: sync_moments(x, 0), (shares(whole, 3),))
            expected = center + from_center.mean(0)
            np.testing.assert_allclose(
                strategy.local_results(mean)[0], expected, rtol=float(np.finfo(dtype).eps)
            )
            np.testing.assert_allclose(strategy.local_results(variance)[0], from_center.var(0), rtol=rtol)


@pytest.mark.parametrize("dtype", [np.float16, "bfloat16"])
def test_half_precision_is_added_up_wider_and_comes_back_in_its_own_dtype(dtype: Any) -> None:
    if dtype == "bfloat16":
        dtype = pytest.importorskip("ml_dtypes", reason="needs ml-dtypes, the checkpoint extra").bfloat16
    with mirrored() as strategy:
        # 5000 times 100 is beyond float16's largest number, and 256 + 1 is 256 in bfloat16
        whole = np.where(np.arange(5000) % 2, 101, 99).astype(dtype)
        mean, variance = strategy.run(lambda x: sync_moments(x, 0), (shares(whole, 2),))
        assert [m.dtype for m in strategy.local_results(mean)] == [np.dtype(dtype)] * 2
        assert float(strategy.local_results(mean)[0]) == 100
        assert float(strategy.local_results(variance)[0]) == 1


def test_integers_give_float64_and_nothing_at_all_gives_nan() -> None:
    with mirrored() as strategy:
        mean, variance = strategy.run(
            lambda x: sync_moments(x, 0), (PerReplica([np.array([1, 2]), np.array([6])]),)
        )
        assert [(m.dtype, m) for m in strategy.local_results(mean)] == [(np.float64, 3.0)] * 2
        np.testing.assert_allclose(strategy.local_results(variance), 14 / 3)
        mean, variance = strategy.run(lambda: sync_moments(np.zeros((0, 3), np.float32), 0))
        np.testing.assert_array_equal(strategy.local_results(mean)[1], np.full(3, np.nan, np.float32))
        np.testing.assert_array_equal(strategy.local_results(variance)[1], np.full(3, np.nan, np.float32))


def test_outside_of_a_step_moments_are_of_the_one_array() -> None:
    whole = np.random.default_rng(2).normal(size=(5, 3))
    mean, variance = sync_moments(whole, 0)
    np.testing.assert_allclose(mean, whole.mean(0))
    np.testing.assert_allclose(variance, whole.var(0))


@pytest.mark.parametrize(
    ("x", "axis", "error", "message"),
    [
        (np.zeros((2, 3)), 2, ValueError, r"sync_moments: got axis=2 for float64 of shape \(2, 3\)"),
        (np.zeros((2, 3)), (0, -2), ValueError, "each once"),
        (np.zeros((2, 3)), None, TypeError, "got axis=None; need an integer or a tuple of integers"),
        (np.zeros((2, 3)), 0.5, TypeError, "got axis=0.5"),
        (np.zeros(2, complex), 0, TypeError, "need real numbers"),
        (PerReplica([np.zeros(2)]), 0, ValueError, "need this replica's part alone"),
    ],
)
def test_moments_of_what_has_none_are_refused(
    x: Any, axis: Any, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        sync_moments(x, axis)


def test_shares_whose_other_axes_differ_are_a_mismatch() -> None:
    with mirrored() as strategy, pytest.raises(CollectiveMismatchError, match="replica 1"):
        strategy.run(lambda x: sync_moments(x, 0), (PerReplica([np.zeros((2, 3)), np.zeros((2, 4))]),))


# ------------------------------------------------------------- batch normalization


class WholeBatch:
    """Batch normalization of one array in one piece, by the formulas, in float64; features last."""

    def __init__(self, gamma: Array, beta: Array, epsilon: float = 1e-3) -> None:
        self.gamma, self.beta, self.epsilon = gamma, beta, epsilon

    def forward(self, x: Array) -> Array:
        axes = tuple(range(x.ndim - 1))
        mean, variance = x.mean(axes), x.var(axes)
        return np.asarray((x - mean) / np.sqrt(variance + self.epsilon) * self.gamma + self.beta)


def numerical_gradient(function: Callable[[Array], float], at: Array, h: float = 1e-5) -> Array:
    gradient = np.zeros_like(at)
    for index in np.ndindex(at.shape):
        moved = at.copy()
        moved[index] += h
        up = function(moved)
        moved[index] -= 2 * h
        gradient[index] = (up - function(moved)) / (2 * h)
    return gradient


def make(strategy: Strategy, features: int, **settings: Any) -> SyncBatchNorm:
    with strategy.scope():
        norm = SyncBatchNorm(features, **{"dtype": np.float64, **settings})
    rng = np.random.default_rng(9)
    norm.gamma.assign(rng.uniform(0.5, 2, features))
    norm.beta.assign(rng.normal(size=features))
    return norm


def test_forward_is_that_of_the_whole_batch_and_moves_the_moving_moments(strategy: Strategy) -> None:
    rng = np.random.default_rng(0)
    norm = make(strategy, 3, momentum=0.9)
    whole_batch = WholeBatch(norm.gamma.numpy(), norm.beta.numpy())
    mean, variance = np.zeros(3), np.ones(3)
    for _ in range(3):
        whole = rng.normal([5, 0, -3], [1, 2, 0.1], size=(13, 3))
        y = strategy.run(lambda x: norm.forward(x)[0], (shares(whole, strategy.num_replicas_in_sync),))
        np.testing.assert_allclose(all_parts(strategy, y), whole_batch.forward(whole), rtol=1e-12)
        mean, variance = (
            0.9 * mean + 0.1 * whole.mean(0),
            0.9 * variance + 0.1 * whole.var(0),
        )
    np.testing.assert_allclose(norm.moving_mean.read_value(), mean, rtol=1e-12)
    np.testing.assert_allclose(norm.moving_variance.read_value(), variance, rtol=1e-12)
    assert_replicas_equal(norm.variables.values())

    y = strategy.run(
        lambda x: norm.forward(x, training=False)[0], (shares(whole, strategy.num_replicas_in_sync),)
    )
    expected = (whole - mean) / np.sqrt(variance + 1e-3) * norm.gamma.numpy() + norm.beta.numpy()
    np.testing.assert_allclose(all_parts(strategy, y), expected, rtol=1e-12)
    np.testing.assert_allclose(norm.moving_mean.read_value(), mean, rtol=1e-12)


@pytest.mark.parametrize("training", [True, False])
def test_backward_is_the_numerical_gradient_of_all_replicas_losses(
    strategy: Strategy, training: bool
) -> None:
    rng = np.random.default_rng(1)
    norm = make(strategy, 2)
    gamma, beta = norm.gamma.numpy(), norm.beta.numpy()
    whole, towards = rng.normal(2, 3, size=(7, 2, 2)), rng.normal(size=(7, 2, 2))
    size = strategy.num_replicas_in_sync

    def step(x: Array, towards: Array) -> Any:
        y, saved = norm.forward(x, training=training)
        return norm.backward(np.cos(y) * towards, saved)

    by_x, by_gamma, by_beta = strategy.run(step, (shares(whole, size), shares(towards, size)))

    def loss(x: Array, gamma: Array = gamma, beta: Array = beta) -> float:
        y = WholeBatch(gamma, beta).forward(x) if training else x / np.sqrt(1 + 1e-3) * gamma + beta
        return float(np.sum(np.sin(y) * towards))

    np.testing.assert_allclose(all_parts(strategy, by_x), numerical_gradient(loss, whole), atol=1e-7)
    for parts, expected in (
        (by_gamma, numerical_gradient(lambda g: loss(whole, gamma=g), gamma)),
        (by_beta, numerical_gradient(lambda b: loss(whole, beta=b), beta)),
    ):
        np.testing.assert_allclose(np.sum(strategy.local_results(parts), axis=0), expected, atol=1e-7)


def test_training_on_replicas_equals_training_on_one() -> None:
    whole = np.random.default_rng(2).normal(4, 2, size=(24, 3)).astype(np.float32)
    trained = []
    for size in (1, 4):
        with mirrored(size) as strategy:
            with strategy.scope():
                norm, optimizer = SyncBatchNorm(3), SGD(0.05)

            def step(x: Array, norm: SyncBatchNorm = norm, optimizer: Any = optimizer) -> None:
                y, saved = norm.forward(x)
                _, by_gamma, by_beta = norm.backward(2 * (y - x / 4) / 24, saved)
                optimizer.apply_gradients([(by_gamma, norm.gamma), (by_beta, norm.beta)])

            for _ in range(20):
                strategy.run(step, (shares(whole, size),))
            assert_replicas_equal(norm.variables.values())
            trained.append({name: variable.numpy() for name, variable in norm.variables.items()})
    assert np.abs(trained[0]["beta"]).min() > 0.1
    for name, value in trained[0].items():
        np.testing.assert_allclose(trained[1][name], value, rtol=2e-5, err_msg=name)


@pytest.mark.parametrize("channels_first", [True, False])
def test_it_is_pytorchs_batch_norm_of_the_whole_batch(channels_first: bool) -> None:
    torch = pytest.importorskip("torch", reason="needs PyTorch, the torch extra")
    rng = np.random.default_rng(3)
    batches = [rng.normal(3, 2, size=(11, 4, 5, 6)).astype(np.float32) for _ in range(2)]
    upstream = rng.normal(size=(11, 4, 5, 6)).astype(np.float32)
    theirs = torch.nn.BatchNorm2d(4, eps=1e-5, momentum=0.1)
    with mirrored(3) as strategy:
        with strategy.scope():
            norm = SyncBatchNorm(
                4, axis=1 if channels_first else -1, momentum=0.9, epsilon=1e-5, correction=1
            )
        norm.gamma.assign(np.array([0.5, 1, 1.5, 2], np.float32))
        norm.beta.assign(np.array([3, 0, -1, 1], np.float32))
        with torch.no_grad():
            theirs.weight.copy_(torch.tensor(norm.gamma.numpy()))
            theirs.bias.copy_(torch.tensor(norm.beta.numpy()))

        def ours(nchw: Array) -> PerReplica:
            return shares(nchw if channels_first else np.moveaxis(nchw, 1, -1), 3)

        def nchw(parts: Any) -> Array:
            whole = all_parts(strategy, parts)
            return whole if channels_first else np.moveaxis(whole, -1, 1)

        def step(x: Array, dy: Array) -> Any:
            y, saved = norm.forward(x)
            return (y, *norm.backward(dy, saved))

        for batch in batches:
            y, by_x, by_gamma, by_beta = strategy.run(step, (ours(batch), ours(upstream)))
            x = torch.tensor(batch, requires_grad=True)
            theirs.zero_grad()
            expected = theirs(x)
            expected.backward(torch.tensor(upstream))
            np.testing.assert_allclose(nchw(y), expected.detach().numpy(), rtol=1e-5, atol=1e-5)
            np.testing.assert_allclose(nchw(by_x), x.grad.numpy(), rtol=1e-4, atol=1e-5)
            for parts, gradient in ((by_gamma, theirs.weight.grad), (by_beta, theirs.bias.grad)):
                np.testing.assert_allclose(
                    np.sum(strategy.local_results(parts), axis=0), gradient.numpy(), rtol=1e-4, atol=1e-4
                )
        np.testing.assert_allclose(norm.moving_mean.numpy(), theirs.running_mean.numpy(), rtol=1e-5)
        np.testing.assert_allclose(norm.moving_variance.numpy(), theirs.running_var.numpy(), rtol=1e-5)

        theirs.eval()
        y = strategy.run(lambda x: norm.forward(x, training=False)[0], (ours(batches[0]),))
        expected = theirs(torch.tensor(batches[0])).detach().numpy()
        np.testing.assert_allclose(nchw(y), expected, rtol=1e-5, atol=1e-5)


def test_half_precision_is_computed_in_float32() -> None:
    rng = np.random.default_rng(4)
    whole = (300 + rng.normal(size=(40, 2))).astype(np.float16)  # whose squares float16 can't hold
    with mirrored() as strategy:
        with strategy.scope():
            norm = SyncBatchNorm(2)

        def step(x: Array) -> Any:
            y, saved = norm.forward(x)
            return (y, *norm.backward(y, saved))

        y, by_x, by_gamma, _ = strategy.run(step, (shares(whole, 2),))
        assert all_parts(strategy, y).dtype == all_parts(strategy, by_x).dtype == np.float16
        assert strategy.local_results(by_gamma)[0].dtype == np.float32
        expected = WholeBatch(np.ones(2), np.zeros(2)).forward(whole.astype(np.float64))
        np.testing.assert_allclose(all_parts(strategy, y), expected, atol=2e-3)


def test_a_batch_that_is_empty_on_all_replicas_changes_nothing() -> None:
    with mirrored() as strategy:
        with strategy.scope():
            norm = SyncBatchNorm(2)

        def step() -> Any:
            y, saved = norm.forward(np.zeros((0, 2), np.float32))
            return (y, *norm.backward(y, saved))

        y, by_x, by_gamma, by_beta = strategy.run(step)
        assert all_parts(strategy, y).shape == all_parts(strategy, by_x).shape == (0, 2)
        np.testing.assert_array_equal(all_parts(strategy, by_gamma), np.zeros(4))
        np.testing.assert_array_equal(all_parts(strategy, by_beta), np.zeros(4))
        np.testing.assert_array_equal(norm.moving_mean.numpy(), [0, 0])
        np.testing.assert_array_equal(norm.moving_variance.numpy(), [1, 1])


def test_outside_of_any_strategy_it_is_plain_batch_normalization() -> None:
    whole = np.random.default_rng(6).normal(size=(9, 2))
    norm = SyncBatchNorm(2, dtype=np.float64)
    y, _ = norm.forward(whole)
    np.testing.assert_allclose(y, WholeBatch(np.ones(2), np.zeros(2)).forward(whole), rtol=1e-12)
    np.testing.assert_allclose(norm.moving_mean, 0.01 * whole.mean(0))


def test_layers_in_another_order_on_one_replica_are_a_mismatch_that_names_them() -> None:
    with mirrored() as strategy:
        with strategy.scope():
            wide, narrow = SyncBatchNorm(3, name="wide"), SyncBatchNorm(2, name="narrow")

        def step(swapped: bool) -> None:
            layers = [(wide, 3), (narrow, 2)]
            for layer, features in reversed(layers) if swapped else layers:
                y, saved = layer.forward(np.ones((4, features)))
                layer.backward(y, saved)

        with pytest.raises(CollectiveMismatchError, match="replica 1"):
            strategy.run(step, (PerReplica([False, True]),))


def test_a_layer_made_outside_of_the_scope_is_refused_in_a_step() -> None:
    norm = SyncBatchNorm(2)
    with (
        mirrored() as strategy,
        pytest.raises(ReplicaContextError, match=r"batch_norm.forward.*outside any scope"),
    ):
        strategy.run(lambda: norm.forward(np.ones((3, 2))))


@pytest.mark.parametrize(
    ("x", "error", "message"),
    [
        (np.ones((4, 3)), ValueError, r"batch_norm.forward: got float64 of shape \(4, 3\); need 2 features along axis -1"),
        (np.ones((4, 2), np.int64), TypeError, "need floats"),
        (np.float64(3), ValueError, "batch_norm.forward: got axis=-1"),
    ],
)  # fmt: skip
def test_inputs_that_do_not_fit_are_refused(x: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        SyncBatchNorm(2).forward(x)


def test_a_gradient_of_another_shape_is_refused() -> None:
    norm = SyncBatchNorm(2)
    _, saved = norm.forward(np.ones((4, 2)))
    with pytest.raises(ValueError, match=r"batch_norm.backward: got dy of shape \(3, 2\); need \(4, 2\)"):
        norm.backward(np.ones((3, 2)), saved)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_features": 0}, "got num_features=0"),
        ({"momentum": 1.5}, "got momentum=1.5; need a number from 0 to 1"),
        ({"epsilon": -1}, "got epsilon=-1"),
        ({"correction": 2}, "got correction=2; need 0 or 1"),
    ],
)
def test_settings_without_a_meaning_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SyncBatchNorm(**{"num_features": 2, **settings})
