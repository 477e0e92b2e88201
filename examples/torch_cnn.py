"""A PyTorch module that learns to read handwritten digits on two replicas.

Run ``python -m examples.torch_cnn`` after ``pip install 'xpdistribute[torch,demo]'``. The module and the
loss are plain PyTorch; `ReplicatedModule` lets the module's parameters be the strategy's variables, so that what
``backward`` finds is added up over the replicas and applied by our optimizer, without a copy.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from examples.digits import Accuracy, Digits, load
from examples.digits_flags import parse_few
from strategies import (
    SGD,
    MirroredStrategy,
    ReplicatedModule,
    Strategy,
    asarray,
    compute_average_loss,
    from_arrays,
)


def make_cnn(seed: int = 0) -> Any:
    """Two convolutions and two dense layers: from images ``(batch, 1, 8, 8)`` to logits ``(batch, 10)``."""
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Conv2d(1, 16, kernel_size=3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 32, kernel_size=3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(128, 64),
        nn.ReLU(),
        nn.Linear(64, 10),
    )


def train(
    strategy: Strategy, digits: Digits, *, epochs: int = 12, batch_size: int = 64, seed: int = 0
) -> tuple[list[float], float]:
    """Train a new network.

    Args:
        strategy: runs the steps.
        digits: what to learn; the network computes in the type of the images.
        epochs: passes over the training set.
        batch_size: examples in a global batch, which the replicas share.
        seed: of the first weights and of the order of the examples.

    Returns:
        The loss of each step, and the share of right answers to the test set.
    """
    images = [part.reshape(-1, 1, 8, 8) for part in (digits.train_images, digits.test_images)]
    cnn = make_cnn(seed).to(asarray(images[0], like=torch.empty(0)).dtype)
    with strategy.scope():
        optimizer = SGD(learning_rate=0.05, momentum=0.9, nesterov=True)
        model = ReplicatedModule(cnn, optimizer)
        accuracy = Accuracy()

    def train_step(images: Any, labels: Any) -> Any:
        model.zero_grad()
        logits = model(images)
        losses = functional.cross_entropy(logits, asarray(labels, like=logits), reduction="none")
        loss = compute_average_loss(losses)  # a part of the mean over the global batch
        loss.backward()
        optimizer.apply_gradients(model.gradients())
        return loss.detach()

    def test_step(images: Any, labels: Any) -> None:
        with torch.no_grad():
            accuracy.update(asarray(model(images)), labels)

    train_set = from_arrays((images[0], digits.train_labels)).shuffle(seed=seed).batch(batch_size)
    losses = []
    for _ in range(epochs):
        for batch in strategy.distribute_dataset(train_set):
            losses.append(float(strategy.reduce("SUM", strategy.run(train_step, args=batch))))
    model.eval()
    for batch in strategy.distribute_dataset(from_arrays((images[1], digits.test_labels)).batch(256)):
        strategy.run(test_step, args=batch)
    return losses, accuracy.pop()[0]


def main() -> None:
    """Train as the command line says, and say how well it went."""
    options = parse_few("examples.torch_cnn", "Learn to read handwritten digits by a PyTorch module.")
    with MirroredStrategy([f"cpu:{number}" for number in range(options.replicas)]) as strategy:
        losses, accuracy = train(strategy, load(np.dtype(np.float32).name), epochs=options.epochs)
    print(f"loss {np.mean(losses[:20]):.3f} at first, {np.mean(losses[-20:]):.3f} at last")
    print(f"test accuracy {accuracy:.1%}")


if __name__ == "__main__":
    main()
