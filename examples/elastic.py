"""Goes on when processes are killed: a straight line, fitted by processes that come and go.

Run it with ``xpdistribute run -n 3 --elastic -m examples.elastic --kill 20 40``: process 1 kills itself before step 20 and its
successor before step 40, as a crash or a preemption would. The line comes out as if nothing had happened, up to rounding:
a step that loses a process is taken back and made again by those who are left, with all its examples. ``python -m examples.elastic`` fits
it in one process.
"""

from __future__ import annotations

import argparse
import os
import signal
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from strategies import SGD, Checkpoint, MembershipChange, MultiWorkerMirroredStrategy, from_arrays
from variables import Variable

NUM_EPOCHS, BATCH_SIZE = 5, 20


def tell(change: MembershipChange) -> None:
    """Say what has changed; the chief does it for all."""
    if change.worker_id == 0:
        what = f"lost {list(change.lost)}" if change.lost else f"{change.num_joined} came"
        print(f"{what}: {change.num_workers} processes after {change.seconds:.2f} s", flush=True)


def fit(strategy: MultiWorkerMirroredStrategy, kill_at: Sequence[int] = (), pause: float = 0.0) -> Any:
    """Fit ``y = 3 x - 1`` to noisy points.

    Args:
        strategy: runs the steps.
        kill_at: steps before which process 1 kills itself.
        pause: seconds after each step, for newcomers to start in while there is something left to do.

    Returns:
        Slope and intercept, shape ``(2,)``, and the number of steps.
    """
    rng = np.random.default_rng(0)
    x = rng.uniform(-1, 1, size=600)
    y = 3 * x - 1 + rng.normal(scale=0.1, size=600)

    with strategy.scope():
        slope, intercept = Variable(0.0), Variable(0.0)
        optimizer = SGD(learning_rate=0.1)
    dataset = from_arrays((x, y)).shuffle(seed=0).repeat(NUM_EPOCHS).batch(BATCH_SIZE)
    batches = iter(strategy.distribute_dataset(dataset))
    progress = {"steps": 0}  # what the loop below goes by is part of the state, as the weights are
    strategy.share_state(
        Checkpoint(slope=slope, intercept=intercept, optimizer=optimizer, batches=batches, progress=progress)
    )

    def step(x: Any, y: Any) -> None:
        error = slope * x + intercept - y
        # Divided by the size of the global batch and summed: right for any number of replicas.
        optimizer.apply_gradients(
            [(np.sum(error * x) / BATCH_SIZE, slope), (np.sum(error) / BATCH_SIZE, intercept)]
        )

    for batch in batches:
        if progress["steps"] in kill_at and strategy.worker_id == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        strategy.run(step, args=batch)
        progress["steps"] += 1
        time.sleep(pause)
    return np.array([slope, intercept]), progress["steps"]


def main() -> None:
    """Fit the line as the command line says, and print it."""
    parser = argparse.ArgumentParser(prog="python -m examples.elastic", description="Fit a straight line.")
    parser.add_argument(
        "--kill", type=int, nargs="*", default=[], metavar="STEP", help="process 1 dies there"
    )
    options = parser.parse_args()
    strategy = MultiWorkerMirroredStrategy(on_membership_change=tell)
    (slope, intercept), num_steps = fit(strategy, options.kill, pause=0.02 if options.kill else 0.0)
    if strategy.is_chief:
        print(f"y = {slope:.2f} x {intercept:+.2f} after {num_steps} steps")


if __name__ == "__main__":
    main()
