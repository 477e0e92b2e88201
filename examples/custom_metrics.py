"""Metrics of your own, exact on any number of replicas and any size of batch.

Run it with ``python -m examples.custom_metrics``. A classifier of points in the plane is trained and
tested on three replicas. Three kinds of metric show three ways for numbers to leave a step:

- the confusion matrix is an ON_READ variable: each replica counts on its own, without a word to the
  others, and reading it between steps adds the counts up;
- the smoothed loss must be computed once for all: `merge_call` leaves the replicas for that;
- the loss of each test point is returned from the step, and `gather` puts the shares together.

The test set has 97 points in batches of 32. Its last batch is 1 point, so two of the replicas are
given arrays of length 0, and neither the code nor the numbers notice.
"""

from __future__ import annotations

import argparse
from typing import Any, NamedTuple

import numpy as np

from examples import mlp
from strategies import (
    SGD,
    MirroredStrategy,
    Strategy,
    all_reduce,
    compute_average_loss,
    from_arrays,
    merge_call,
)
from variables import Variable

CENTERS = np.array([[0.0, 1.5], [-1.5, -1.0], [1.5, -1.0]])
NUM_CLASSES = len(CENTERS)


class Points(NamedTuple):
    """Coordinates of shape ``(points, 2)``, and from which center each point was scattered."""

    places: mlp.Floats
    labels: mlp.Labels


class Results(NamedTuple):
    """What the program found out."""

    weight: mlp.Floats  # (2, classes)
    bias: mlp.Floats  # (classes,)
    smoothed_loss: float  # of training
    confusion: mlp.Labels  # (classes, classes): test points by true and by predicted class
    test_losses: mlp.Floats  # (test points,)


def scatter(num_points: int, seed: int) -> Points:
    """Points scattered around the centers."""
    rng = np.random.default_rng(seed)
    labels = rng.integers(0, NUM_CLASSES, num_points)
    return Points(CENTERS[labels] + rng.normal(size=(num_points, 2)), labels)


def run(strategy: Strategy, train_set: Points, test_set: Points) -> Results:
    """Train on one set of points, test on the other."""
    with strategy.scope():
        weight, bias = Variable(np.zeros((2, NUM_CLASSES))), Variable(np.zeros(NUM_CLASSES))
        optimizer = SGD(learning_rate=0.5)
        smoothed_loss = Variable(np.log(NUM_CLASSES), trainable=False)
        confusion = Variable(
            np.zeros((NUM_CLASSES, NUM_CLASSES), np.int64),
            trainable=False,
            synchronization="ON_READ",
            aggregation="SUM",
        )

    def smooth(strategy: Strategy, losses: Any) -> None:  # once for all, with what each replica passed
        loss = strategy.reduce("SUM", losses)
        smoothed_loss.assign(0.95 * smoothed_loss.numpy() + 0.05 * loss)

    def train_step(places: mlp.Floats, labels: mlp.Labels) -> None:
        global_batch_size = int(all_reduce("SUM", len(labels)))
        logits, inputs = mlp.forward([weight, bias], places)
        losses, derivatives = mlp.cross_entropy(logits, labels)
        gradients = mlp.backward([weight, bias], inputs, derivatives / global_batch_size)
        optimizer.apply_gradients(zip(gradients, [weight, bias], strict=True))
        merge_call(smooth, args=(compute_average_loss(losses, global_batch_size=global_batch_size),))

    def test_step(places: mlp.Floats, labels: mlp.Labels) -> Any:
        logits, _ = mlp.forward([weight, bias], places)
        cells = NUM_CLASSES * labels + logits.argmax(axis=1)
        confusion.assign_add(np.bincount(cells, minlength=NUM_CLASSES**2).reshape(confusion.shape))
        return mlp.cross_entropy(logits, labels)[0]

    for batch in strategy.distribute_dataset(from_arrays(tuple(train_set)).shuffle(seed=0).batch(32)):
        strategy.run(train_step, args=batch)
    test_losses = [
        strategy.gather(strategy.run(test_step, args=batch), axis=0)
        for batch in strategy.distribute_dataset(from_arrays(tuple(test_set)).batch(32))
    ]
    return Results(
        weight.numpy(),
        bias.numpy(),
        float(smoothed_loss.numpy()),
        confusion.numpy(),
        np.concatenate(test_losses),
    )


def main() -> None:
    """Train, test and print the metrics."""
    argparse.ArgumentParser(
        prog="python -m examples.custom_metrics", description="Train and test with metrics of your own."
    ).parse_args()
    with MirroredStrategy(["cpu:0", "cpu:1", "cpu:2"]) as strategy:
        results = run(strategy, scatter(3000, seed=1), scatter(97, seed=2))

    print(f"smoothed training loss {results.smoothed_loss:.3f}")
    print(f"test loss {results.test_losses.mean():.3f} over {len(results.test_losses)} points")
    print(f"test accuracy {results.confusion.trace() / results.confusion.sum():.1%}")
    print("test points by true class (row) and predicted class (column)")
    print(results.confusion)


if __name__ == "__main__":
    main()
