"""HIPS autograd differentiates plain NumPy, and two replicas learn to read handwritten digits.

Run ``python -m examples.autograd_mlp`` after ``pip install autograd 'xpdistribute[demo]'``. The loss is written
with ``autograd.numpy``, which is NumPy that remembers what it did.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import autograd.numpy as anp
import numpy as np
from autograd import value_and_grad

from examples.digits import Accuracy, Digits, load
from examples.digits_flags import parse_few
from examples.mlp import initial_parameters
from strategies import (
    SGD,
    MirroredStrategy,
    Strategy,
    Variable,
    compute_average_loss,
    from_arrays,
)


def forward(parameters: Sequence[Any], x: Any) -> Any:
    """Logits of shape ``(batch, 10)`` for images of shape ``(batch, 64)``."""
    *hidden, (weight, bias) = zip(parameters[::2], parameters[1::2], strict=True)
    for hidden_weight, hidden_bias in hidden:
        x = anp.tanh(anp.dot(x, hidden_weight) + hidden_bias)
    return anp.dot(x, weight) + bias


def loss(parameters: Sequence[Any], images: Any, labels: Any) -> Any:
    """This replica's part of the mean loss over the global batch."""
    logits = forward(parameters, images)
    shifted = logits - anp.max(logits, axis=1, keepdims=True)
    likelihoods = shifted - anp.log(anp.sum(anp.exp(shifted), axis=1, keepdims=True))
    return compute_average_loss(-likelihoods[np.arange(len(labels)), labels])


def train(
    strategy: Strategy, digits: Digits, *, epochs: int = 12, batch_size: int = 64, seed: int = 0
) -> tuple[list[float], float]:
    """Train a new network; arguments and results as in `examples.torch_cnn.train`."""
    weights = initial_parameters((64, 64, 10), np.random.default_rng(seed), digits.train_images.dtype)
    with strategy.scope():
        parameters = [Variable(weight) for weight in weights]
        optimizer = SGD(learning_rate=0.1, momentum=0.9, nesterov=True)
        accuracy = Accuracy()
    loss_and_gradients = value_and_grad(loss)

    def train_step(images: Any, labels: Any) -> Any:
        values = [parameter.value() for parameter in parameters]
        value, gradients = loss_and_gradients(values, images, labels)
        optimizer.apply_gradients(zip(gradients, parameters, strict=True))
        return value

    def test_step(images: Any, labels: Any) -> None:
        accuracy.update(forward([parameter.value() for parameter in parameters], images), labels)

    train_set = from_arrays((digits.train_images, digits.train_labels)).shuffle(seed=seed).batch(batch_size)
    losses = []
    for _ in range(epochs):
        for batch in strategy.distribute_dataset(train_set):
            losses.append(float(strategy.reduce("SUM", strategy.run(train_step, args=batch))))
    test_set = from_arrays((digits.test_images, digits.test_labels)).batch(256)
    for batch in strategy.distribute_dataset(test_set):
        strategy.run(test_step, args=batch)
    return losses, accuracy.pop()[0]


def main() -> None:
    """Train as the command line says, and say how well it went."""
    options = parse_few("examples.autograd_mlp", "Learn to read handwritten digits by autograd.")
    with MirroredStrategy([f"cpu:{number}" for number in range(options.replicas)]) as strategy:
        losses, accuracy = train(strategy, load("float64"), epochs=options.epochs)
    print(f"loss {np.mean(losses[:20]):.3f} at first, {np.mean(losses[-20:]):.3f} at last")
    print(f"test accuracy {accuracy:.1%}")


if __name__ == "__main__":
    main()
