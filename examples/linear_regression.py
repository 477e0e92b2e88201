"""The shortest complete training loop: a straight line, fitted on two replicas.

Run it with ``python -m examples.linear_regression``.
"""

import argparse
from typing import Any

import numpy as np

from strategies import SGD, MirroredStrategy, from_arrays
from variables import Variable


def main() -> None:
    """Fit ``y = 3 x - 1`` to noisy points and print slope and intercept."""
    rng = np.random.default_rng(0)
    x = rng.uniform(-1, 1, size=600)
    y = 3 * x - 1 + rng.normal(scale=0.1, size=600)

    strategy = MirroredStrategy(["cpu:0", "cpu:1"])  # change this line to run elsewhere
    with strategy.scope():
        slope, intercept = Variable(0.0), Variable(0.0)
        optimizer = SGD(learning_rate=0.1, gradient_aggregation="MEAN")
    batches = strategy.distribute_dataset(from_arrays((x, y)).shuffle(seed=0).batch(20))

    def step(x: Any, y: Any) -> Any:  # runs in each replica; x and y are its share of the batch
        error = slope * x + intercept - y
        optimizer.apply_gradients([(np.mean(error * x), slope), (np.mean(error), intercept)])
        return np.mean(error**2) / 2

    for epoch in range(10):
        for batch in batches:
            losses = strategy.run(step, args=batch)
        print(f"epoch {epoch}: loss {strategy.reduce('MEAN', losses):.5f}")
    print(f"y = {slope.numpy():.2f} x {intercept.numpy():+.2f}")


if __name__ == "__main__":
    argparse.ArgumentParser(
        prog="python -m examples.linear_regression", description="Fit a straight line."
    ).parse_args()
    main()
