"""The least that a training step takes on threads: the same arithmetic as ``train``'s, with nothing of the library.

A thread for each replica computes its gradients; the caller computes its own, then adds them up and updates one copy of the
parameters. What a strategy does besides (contexts, checks, copies, reports) is above this; what the interpreter's lock and the
waking of threads cost is in it.
"""

from __future__ import annotations

import _thread
import threading
from typing import Any, final

import numpy as np

from benchmarks.mlp import LEARNING_RATE, losses_and_gradients, start_and_batch

Array = np.ndarray[Any, np.dtype[Any]]


@final
class BareThreads:
    """Steps of the benchmark's MLP on threads of its own; to be closed.

    Args:
        replicas: how many threads, the caller's among them.
        replica_batch: examples for each.
    """

    def __init__(self, replicas: int, replica_batch: int) -> None:
        self._examples = replicas * replica_batch
        self.parameters, inputs, labels = start_and_batch(self._examples)
        cuts = [slice(r * replica_batch, (r + 1) * replica_batch) for r in range(replicas)]
        self._shares = [(inputs[cut], labels[cut]) for cut in cuts]
        self._gradients = [[np.empty_like(array) for array in self.parameters] for _ in range(replicas)]
        self._losses: list[Array] = [np.empty(0)] * replicas
        # One raw lock wakes each thread, the last thread to end wakes the caller: as the strategies do.
        self._bells = [_thread.allocate_lock() for _ in range(replicas)]
        self._left: list[int] = []
        self._done = _thread.allocate_lock()
        for lock in (*self._bells, self._done):
            lock.acquire()
        self._is_closed = False
        self._threads = [
            threading.Thread(target=self._work, args=(replica,), daemon=True)
            for replica in range(1, replicas)
        ]
        for thread in self._threads:
            thread.start()

    def step(self) -> float:
        """One training step; the mean loss of the global batch."""
        self._left = list(range(len(self._threads)))
        for bell in self._bells[1:]:
            bell.release()
        self._compute(0)
        if self._threads and not self._done.acquire(timeout=60):
            raise TimeoutError("bare threads: one did not end its share within 60 s; is the machine stopped?")
        first, *others = self._gradients
        for gradients in others:
            for total, gradient in zip(first, gradients, strict=True):
                np.add(total, gradient, out=total)
        for parameter, total in zip(self.parameters, first, strict=True):
            np.multiply(total, LEARNING_RATE, out=total)
            np.subtract(parameter, total, out=parameter)
        return float(sum(losses.sum() for losses in self._losses)) / self._examples

    def close(self) -> None:
        """End the threads."""
        self._is_closed = True
        for bell in self._bells[1:]:
            bell.release()
        for thread in self._threads:
            thread.join(10)

    def _work(self, replica: int) -> None:
        while True:
            self._bells[replica].acquire()
            if self._is_closed:
                return
            self._compute(replica)
            self._left.pop()  # atomic
            if not self._left:
                self._done.release()

    def _compute(self, replica: int) -> None:
        x, y = self._shares[replica]
        self._losses[replica] = losses_and_gradients(
            self.parameters, x, y, self._examples, self._gradients[replica]
        )
