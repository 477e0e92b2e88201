"""TensorFlow's side of the benchmarks: answers ``measure`` lines on stdin, runs alone in its own interpreter.

It imports nothing of ours. TensorFlow keeps its defaults for threads; there is one logical CPU device for
each replica. With ``TF_CONFIG`` set it is a program for ``rank.py`` instead: one worker of several, with one replica. What a case computes is what its twin of the same name computes in our suite, and each
case checks its result against NumPy before it is timed.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from functools import cache
from itertools import pairwise
from typing import Any, TextIO

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

_begin = time.perf_counter()
import numpy as np  # noqa: E402

_numpy_seconds = time.perf_counter() - _begin
import tensorflow as tf  # noqa: E402

_IMPORT_SECONDS = time.perf_counter() - _begin - _numpy_seconds
"""What ``import tensorflow`` took beyond NumPy."""

Call = Callable[[], Any]

_AMONG_WORKERS = "TF_CONFIG" in os.environ

LEARNING_RATE = 0.1
SEED = 1


@cache
def strategy_of(replicas: int, cross_device_ops: str = "default") -> tf.distribute.Strategy:
    """OneDevice for one replica, Mirrored for more; one of each kind, since the collectives of two would mix.

    As one worker of several: MultiWorkerMirrored, which waits for the others to be there.
    """
    if _AMONG_WORKERS:
        return tf.distribute.MultiWorkerMirroredStrategy()
    if replicas == 1:
        return tf.distribute.OneDeviceStrategy("cpu:0")
    ops = tf.distribute.ReductionToOneDevice() if cross_device_ops == "reduction_to_one_device" else None
    return tf.distribute.MirroredStrategy([f"cpu:{i}" for i in range(replicas)], cross_device_ops=ops)


def under(mode: str, call: Call) -> Call:
    """The call as it is (``eager``), or as one graph (``function``)."""
    return call if mode == "eager" else tf.function(call, autograph=False)


def per_replica(strategy: tf.distribute.Strategy, num_bytes: int) -> Any:
    """Replica r's array holds r + 1 everywhere."""
    return strategy.experimental_distribute_values_from_function(
        lambda context: tf.constant(
            np.full(max(1, num_bytes // 4), context.replica_id_in_sync_group + 1, np.float32)
        )
    )


def wrong_sums(strategy: tf.distribute.Strategy, result: Any) -> int:
    """How many elements are not the sum of 1 .. replicas."""
    expected = sum(range(1, strategy.num_replicas_in_sync + 1))
    return sum(
        int(np.count_nonzero(value.numpy() != expected))
        for value in strategy.experimental_local_results(result)
    )


def run(*, replicas: int, mode: str, returns: str = "nothing") -> tuple[Call, int]:
    """``strategy.run`` of a step that does nothing, or only returns a number."""
    strategy = strategy_of(replicas)

    def nothing() -> None:
        pass

    def number() -> Any:
        return tf.constant(1.0)

    step = number if returns == "number" else nothing

    def call() -> Any:
        return strategy.run(step)

    call = under(mode, call)
    results = strategy.experimental_local_results(call())
    expected = 1.0 if returns == "number" else None
    return call, sum(expected != (None if value is None else float(value)) for value in results)


def merge_call(*, replicas: int, mode: str) -> tuple[Call, int]:
    """A step that makes one empty ``merge_call``."""
    strategy = strategy_of(replicas)

    def merge(strategy: tf.distribute.Strategy) -> Any:
        return tf.constant(float(strategy.num_replicas_in_sync))

    def step() -> Any:
        return tf.distribute.get_replica_context().merge_call(merge)

    def call() -> Any:
        return strategy.run(step)

    call = under(mode, call)
    results = strategy.experimental_local_results(call())
    return call, sum(float(value) != replicas for value in results)


def all_reduce(*, replicas: int, num_bytes: int, mode: str, cross_device_ops: str) -> tuple[Call, int]:
    """A step that makes one ``all_reduce``; each replica gets its own result."""
    strategy = strategy_of(replicas, cross_device_ops)
    values = per_replica(strategy, num_bytes)

    def step(value: Any) -> Any:
        if _AMONG_WORKERS:
            # Which copies nothing; a graph's own argument is on no device, and MultiWorkerMirrored refuses that.
            value = tf.identity(value)
        return tf.distribute.get_replica_context().all_reduce(tf.distribute.ReduceOp.SUM, value)

    def over(values: Any) -> Any:
        return strategy.run(step, args=(values,))

    over = over if mode == "eager" else tf.function(over, autograph=False)

    def call() -> Any:
        return over(values)

    return call, wrong_sums(strategy, call())


def reduce(*, replicas: int, num_bytes: int) -> tuple[Call, int]:
    """``strategy.reduce`` from outside the replicas, eagerly."""
    strategy = strategy_of(replicas)
    values = per_replica(strategy, num_bytes)

    def call() -> Any:
        return strategy.reduce(tf.distribute.ReduceOp.SUM, values, axis=None)

    return call, wrong_sums(strategy, call())


def mlp(*, replicas: int, batch: int, mode: str) -> tuple[Call, int]:
    """A training step of the MLP 784-128-10 with SGD; ``batch`` examples a replica."""
    strategy = strategy_of(replicas)
    start, inputs, labels = mlp_data(replicas * batch)
    with strategy.scope():
        variables = [tf.Variable(array) for array in start]
        optimizer = tf.keras.optimizers.SGD(LEARNING_RATE)
        optimizer.build(variables)

    def share(array: Any) -> Any:
        def of(context: Any) -> Any:
            first = context.replica_id_in_sync_group * batch
            return tf.constant(array[first : first + batch])

        return strategy.experimental_distribute_values_from_function(of)

    x, y = share(inputs), share(labels)

    def step(x: Any, y: Any) -> Any:
        w1, b1, w2, b2 = variables
        with tf.GradientTape() as tape:
            hidden = tf.nn.relu(x @ w1 + b1)
            losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels=y, logits=hidden @ w2 + b2)
            loss = tf.nn.compute_average_loss(losses, global_batch_size=replicas * batch)
        optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))
        return loss

    def over(x: Any, y: Any) -> Any:
        return strategy.run(step, args=(x, y))

    over = over if mode == "eager" else tf.function(over, autograph=False)

    def call() -> Any:
        return over(x, y)

    expected = mlp_losses(start, inputs, labels, steps=3)
    losses = [float(strategy.reduce(tf.distribute.ReduceOp.SUM, call(), axis=None)) for _ in range(3)]
    return call, int(np.count_nonzero(~np.isclose(losses, expected, rtol=1e-4)))


def mlp_data(examples: int) -> tuple[list[Any], Any, Any]:
    """The same start and batch as in our suite: the same generator, seed and order of draws."""
    random = np.random.default_rng(SEED)
    sizes = (784, 128, 10)
    start: list[Any] = []
    for n, m in pairwise(sizes):
        start.append((random.standard_normal((n, m)) * np.sqrt(2 / n)).astype(np.float32))
        start.append(np.zeros(m, np.float32))
    inputs = random.random((examples, sizes[0]), np.float32)
    return start, inputs, random.integers(0, sizes[-1], examples)


def mlp_losses(start: list[Any], x: Any, y: Any, steps: int) -> list[float]:
    """The losses of the first steps on the whole batch, by NumPy in float64."""
    w1, b1, w2, b2 = (array.astype(np.float64) for array in start)
    losses, rows = [], np.arange(len(x))
    for _ in range(steps):
        hidden = np.maximum(x @ w1 + b1, 0)
        logits = hidden @ w2 + b2
        logits -= logits.max(axis=1, keepdims=True)
        likely = np.exp(logits)
        total = likely.sum(axis=1, keepdims=True)
        losses.append(float(np.mean(np.log(total[:, 0]) - logits[rows, y])))
        likely /= total
        likely[rows, y] -= 1
        likely /= len(x)
        below = (likely @ w2.T) * (hidden > 0)
        w2 -= LEARNING_RATE * hidden.T @ likely
        b2 -= LEARNING_RATE * likely.sum(axis=0)
        w1 -= LEARNING_RATE * x.T @ below
        b1 -= LEARNING_RATE * below.sum(axis=0)
    return losses


CASES: dict[str, Callable[..., tuple[Call, int]]] = {
    "run": run,
    "merge_call": merge_call,
    "all_reduce": all_reduce,
    "reduce": reduce,
    "mlp": mlp,
}


def timed(call: Call, iterations: int) -> list[float]:
    """Seconds of each call."""
    now = time.perf_counter_ns
    seconds = []
    for _ in range(iterations):
        begin = now()
        call()
        seconds.append((now() - begin) * 1e-9)
    return seconds


def answer_lines(lines: TextIO, out: TextIO) -> None:
    """Answer one line after the other; a case is made once and kept for the rounds that follow."""
    made: dict[str, Call] = {}
    for line in lines:
        verb, _, rest = line.strip().partition(" ")
        if verb == "quit":
            return
        try:
            if verb != "measure":
                raise ValueError(f"got {line.strip()!r}; need 'measure NAME {{...}}' or 'quit'")
            name, _, details = rest.partition(" ")
            given = json.loads(details)
            iterations = given.pop("iterations")
            key, wrong = f"{name} {json.dumps(given, sort_keys=True)}", 0
            if key not in made:
                made[key], wrong = CASES[name](**given)
            answer: dict[str, Any] = {"seconds": timed(made[key], iterations), "wrong": wrong}
        except Exception as error:  # noqa: BLE001  said to the other side, which raises it
            answer = {"error": f"{line.strip()}: {type(error).__name__}: {error}"}
        print(json.dumps(answer), file=out, flush=True)


def about() -> dict[str, Any]:
    """Who is here."""
    return {"TensorFlow": tf.__version__, "NumPy": np.__version__, "threads": "its own defaults"}


def main() -> None:
    """Say who is here, then answer."""
    # TensorFlow may write to stdout: only the answers may reach the other side.
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    num_devices = int(sys.argv[1])
    tf.config.set_logical_device_configuration(
        tf.config.list_physical_devices("CPU")[0], [tf.config.LogicalDeviceConfiguration()] * num_devices
    )
    told = {**about(), "logical CPUs": num_devices, "import_seconds": _IMPORT_SECONDS}
    print(json.dumps(told), file=out, flush=True)
    answer_lines(sys.stdin, out)


if __name__ == "__main__":
    main()
