"""A rank of an elastic job that trains until it is told to stop, and tells when which step was done after a change.

Run by `benchmarks.processes.recovery`; its first argument is a folder: it ends when there is a file ``stop`` in it.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

import strategies as xd

INPUTS, OUTPUTS, ROWS, BATCH = 512, 512, 96, 24
RATE, MOMENTUM = 1e-4, 0.9
"""Small enough that the weights don't come to rest while it is measured."""


def data() -> tuple[Any, Any]:
    """Inputs and targets, the same everywhere."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((ROWS, INPUTS))
    return x, x @ rng.standard_normal((INPUTS, OUTPUTS))


def gradient(w: Any, x: Any, y: Any) -> Any:
    """Of half the squared error of a part of the global batch."""
    return x.T @ (x @ w - y) / BATCH


def expected(num_steps: int) -> Any:
    """The weights after so many steps, in NumPy."""
    x, y = data()
    w, velocity = np.zeros((INPUTS, OUTPUTS)), np.zeros((INPUTS, OUTPUTS))
    for step in range(num_steps):
        rows = slice(step * BATCH % ROWS, step * BATCH % ROWS + BATCH)
        velocity = MOMENTUM * velocity - RATE * gradient(w, x[rows], y[rows])
        w = w + velocity
    return w


def train(folder: Path) -> None:
    """All of it."""
    changes: list[xd.MembershipChange] = []
    strategy = xd.MultiWorkerMirroredStrategy(
        communication_options=xd.CommunicationOptions(timeout_seconds=30.0),
        on_membership_change=changes.append,
    )
    with strategy.scope():
        w = xd.Variable(np.zeros((INPUTS, OUTPUTS)), name="w")
        optimizer = xd.SGD(RATE, momentum=MOMENTUM)
    batches = iter(strategy.distribute_dataset(xd.from_arrays(data()).batch(BATCH).repeat()))
    state = xd.Checkpoint(w=w, optimizer=optimizer, batches=batches, step=0)
    strategy.share_state(state)
    _tell("ready", process=strategy.worker_id)

    def step(x: Any, y: Any) -> None:
        optimizer.apply_gradients([(gradient(w.value(), x, y), w)])

    is_over = False
    while not is_over:
        strategy.run(step, next(batches))
        state.step += 1
        for change in changes:
            _tell("done", workers=change.num_workers, lost=len(change.lost), seconds=change.seconds)
        changes.clear()
        # One look decides for all: others may see the file a step earlier or later.
        seen = float((folder / "stop").exists()) if state.step % 20 == 0 else 0.0
        is_over = state.step % 20 == 0 and bool(strategy.reduce("MAX", seen))
    error = float(np.max(np.abs(np.asarray(w) - expected(state.step))))
    _tell("end", step=state.step, error=error)


def _tell(what: str, **more: Any) -> None:
    # One write each, as lines of several ranks come in one pipe.
    line = json.dumps({"what": what, "pid": os.getpid(), "at": time.monotonic(), **more}) + "\n"
    sys.stdout.write(line)
    sys.stdout.flush()


if __name__ == "__main__":
    train(Path(sys.argv[1]))
