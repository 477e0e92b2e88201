"""The MLP 784-128-10 that ``train`` measures: ReLU, softmax cross-entropy, SGD, gradients by hand in float32."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from strategies import SGD, Strategy, compute_average_loss
from variables import Variable

Array = np.ndarray[Any, np.dtype[Any]]

SIZES = (784, 128, 10)
LEARNING_RATE = 0.1
SEED = 1


def start_and_batch(examples: int) -> tuple[list[Array], Array, Array]:
    """Parameters ``w1 b1 w2 b2``, inputs and labels; always the same ones.

    The rivals' programs draw the same numbers: the seed and the order of the draws are part of the benchmark.
    """
    random = np.random.default_rng(SEED)
    start: list[Array] = []
    for n, m in pairwise(SIZES):
        start.append((random.standard_normal((n, m)) * np.sqrt(2 / n)).astype(np.float32))
        start.append(np.zeros(m, np.float32))
    inputs = random.random((examples, SIZES[0]), np.float32)
    return start, inputs, random.integers(0, SIZES[-1], examples)


def losses_and_gradients(
    parameters: Sequence[Array], x: Array, y: Array, global_batch_size: int, gradients: Sequence[Array]
) -> Array:
    """One pass forward and back.

    Args:
        parameters: ``w1 b1 w2 b2``.
        x: shape ``(examples, 784)``.
        y: labels, shape ``(examples,)``.
        global_batch_size: what the gradients are divided by.
        gradients: where this replica's share of the gradients of the mean loss over the global batch goes; shapes of
            ``parameters``.

    Returns:
        The examples' losses.
    """
    w1, b1, w2, b2 = parameters
    rows = np.arange(len(x))
    hidden = x @ w1
    hidden += b1
    np.maximum(hidden, 0, out=hidden)
    logits = hidden @ w2
    logits += b2
    logits -= logits.max(axis=1, keepdims=True)
    chosen = logits[rows, y]
    likely = np.exp(logits, out=logits)
    total = likely.sum(axis=1, keepdims=True)
    losses: Array = np.log(total[:, 0]) - chosen
    likely /= total
    likely[rows, y] -= 1
    likely /= global_batch_size
    below = likely @ w2.T
    below *= hidden > 0
    for left, right, of_weights, of_bias in ((x, below, *gradients[:2]), (hidden, likely, *gradients[2:])):
        np.matmul(left.T, right, out=of_weights)
        np.sum(right, axis=0, out=of_bias)
    return losses


def plain_losses(examples: int, steps: int) -> list[float]:
    """The losses of the first steps on one device with nothing but NumPy, in float64."""
    start, x, y = start_and_batch(examples)
    parameters = [array.astype(np.float64) for array in start]
    gradients = [np.empty_like(parameter) for parameter in parameters]
    losses = []
    for _ in range(steps):
        each = losses_and_gradients(parameters, x.astype(np.float64), y, examples, gradients)
        losses.append(float(each.mean()))
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter -= LEARNING_RATE * gradient
    return losses


def training_step(strategy: Strategy, replica_batch_size: int) -> Callable[[], Any]:
    """A call that makes one training step on all replicas and gives their parts of the loss.

    Args:
        strategy: with any number of replicas.
        replica_batch_size: examples a replica.
    """
    examples = replica_batch_size * strategy.num_replicas_in_sync
    start, inputs, labels = start_and_batch(examples)
    with strategy.scope():
        variables = [Variable(array) for array in start]
        optimizer = SGD(learning_rate=LEARNING_RATE)

    def share(array: Array) -> Any:
        def of(context: Any) -> Array:
            first = context.replica_id_in_sync_group * replica_batch_size
            return array[first : first + replica_batch_size]

        return strategy.experimental_distribute_values_from_function(of)

    def step(x: Array, y: Array) -> Any:
        parameters = [np.asarray(variable) for variable in variables]
        # Written where the optimizer wants them, so that nothing is copied on the way.
        gradients = [optimizer.gradient(variable) for variable in variables]
        losses = losses_and_gradients(parameters, x, y, examples, gradients)
        optimizer.apply_gradients(zip(gradients, variables, strict=True))
        return compute_average_loss(losses, global_batch_size=examples)

    x, y = share(inputs), share(labels)
    return lambda: strategy.run(step, args=(x, y))


def num_wrong(strategy: Strategy, step: Callable[[], Any], examples: int, steps: int = 3) -> int:
    """How many of the first losses differ from plain NumPy's. Makes those steps."""
    losses = [float(np.asarray(strategy.reduce("SUM", step(), axis=None))) for _ in range(steps)]
    return num_wrong_losses(losses, examples)


def num_wrong_losses(losses: Sequence[float], examples: int) -> int:
    """How many of the first steps' losses differ from plain NumPy's."""
    return int(np.count_nonzero(~np.isclose(losses, plain_losses(examples, len(losses)), rtol=1e-4)))
