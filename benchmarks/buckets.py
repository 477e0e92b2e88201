"""How long do the gradients of real models take to reduce and apply, and does the bucket size matter?

Replicas hold their gradients in arrays of their own. ``flat`` is what an optimizer does: one flat memory for all
variables, whatever their number. The other rows pack the gradients into `Buckets` of that size, reduce these
together, and update flat parameters of the same layout.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import closing
from functools import partial
from typing import Any

import numpy as np

from benchmarks.gradient_lists import MODELS, Shape, num_elements
from benchmarks.harness import Effort, Timing, by_turns, call
from benchmarks.machine import available_bytes
from benchmarks.report import Report
from benchmarks.setups import Settings, cpus, this_replica
from collectives import Buckets
from strategies import SGD, MirroredStrategy, Strategy
from variables import Variable

LEARNING_RATE = 0.5

FLAT = 0
"""No buckets: the optimizer's own memory."""

BUCKET_MB = (FLAT, 1, 4, 16, 64)
"""2 ** 20 bytes each."""

_COPIES = 6
"""Arrays of the model's size for each replica: variable, gradient, the optimizer's, the reduced ones, twice spare."""


def run_buckets(settings: Settings, report: Report) -> None:
    """Print the table of each model."""
    models = ["DLRM-dense"] if settings.quick else list(MODELS)
    sizes = (FLAT, 1) if settings.quick else BUCKET_MB
    for model in models:
        shapes = MODELS[model]()
        num_bytes = 4 * num_elements(shapes)
        report.line(
            f"# {model}: {len(shapes)} gradients, {num_elements(shapes):,} float32, {num_bytes / 1e6:.1f} MB, "
            f"{settings.ranks} replicas of Mirrored"
        )
        needed, available = _COPIES * num_bytes * settings.ranks, available_bytes()
        if 0 < available < needed:
            report.line(
                f"# left out: needs {needed / 1e9:.1f} GB of memory, {available / 1e9:.1f} GB are free"
            )
            continue
        rows: list[list[object]] = []
        for bucket in sizes:
            report.working(f"{model}, {bucket} MB")
            measure = _measure_flat if bucket == FLAT else partial(_measure_buckets, bucket)
            timings, num_buckets, wrong = measure(shapes, settings)
            comm, step = timings["comm"], timings["step"]
            rows.append(
                [
                    bucket or "flat",
                    num_buckets,
                    comm.median * 1e3,
                    step.median * 1e3,
                    *(timing * 1e3 for timing in (comm.minimum, comm.p95, step.minimum, step.p95)),
                ]
            )
            report.record(
                "buckets",
                {
                    "model": model,
                    "bucket_MB": bucket,
                    "n_buckets": num_buckets,
                    "replicas": settings.ranks,
                    "bytes": num_bytes,
                    "comm": comm.describe(),
                    "step": step.describe(),
                    "wrong": wrong,
                },
            )
        report.table(
            ["bucket_MB", "n_buckets", "comm_ms", "step_ms", "comm min", "comm p95", "step min", "step p95"],
            rows,
        )
    report.line(
        "# comm: all_reduce of the gradients (flat: of the list; else packed first); step: that and SGD's update"
    )


def _measure_flat(shapes: list[Shape], settings: Settings) -> tuple[dict[str, Timing], int, int]:
    with closing(MirroredStrategy(cpus(settings.ranks))) as strategy:
        with strategy.scope():
            variables = [Variable(np.zeros(shape, np.float32)) for shape in shapes]
            optimizer = SGD(learning_rate=LEARNING_RATE)
        gradients, total = _gradients(shapes, settings.ranks)

        def reduce() -> list[Any]:
            context = this_replica()
            reduced: list[Any] = context.all_reduce("SUM", gradients[context.replica_id_in_sync_group])
            return reduced

        def forget() -> None:
            reduce()

        def update() -> None:
            mine = gradients[this_replica().replica_id_in_sync_group]
            optimizer.apply_gradients(zip(mine, variables, strict=True))

        results = strategy.experimental_local_results(strategy.run(reduce))
        wrong = sum(_num_unlike(reduced, total) for reduced in results)
        del results
        strategy.run(update)
        wrong += _num_unlike([np.asarray(variable) for variable in variables], -LEARNING_RATE * total)
        return _time(strategy, forget, update, settings), 1, wrong


def _measure_buckets(
    bucket_mb: int, shapes: list[Shape], settings: Settings
) -> tuple[dict[str, Timing], int, int]:
    dtypes = [np.dtype(np.float32)] * len(shapes)
    # Each replica's gradients and parameters.
    made = [[Buckets(shapes, dtypes, bucket_mb << 20) for _ in range(2)] for _ in range(settings.ranks)]
    with closing(MirroredStrategy(cpus(settings.ranks))) as strategy:
        gradients, total = _gradients(shapes, settings.ranks)

        def reduce() -> None:
            context = this_replica()
            packed, _ = made[context.replica_id_in_sync_group]
            packed.pack(gradients[context.replica_id_in_sync_group])
            packed.all_reduce(context.communicator)

        def update() -> None:
            reduce()
            packed, parameters = made[this_replica().replica_id_in_sync_group]
            for gradient, parameter in zip(packed.flats, parameters.flats, strict=True):
                np.multiply(gradient, LEARNING_RATE, out=gradient)
                np.subtract(parameter, gradient, out=parameter)

        strategy.run(reduce)
        wrong = sum(_num_unlike(packed.flats, total) for packed, _ in made)
        strategy.run(update)
        wrong += sum(_num_unlike(parameters.flats, -LEARNING_RATE * total) for _, parameters in made)
        return _time(strategy, reduce, update, settings), len(made[0][0].flats), wrong


def _gradients(shapes: list[Shape], ranks: int) -> tuple[list[list[Any]], int]:
    """Replica r's gradients, r + 1 everywhere, and what they add up to."""
    gradients = [[np.full(shape, rank + 1, np.float32) for shape in shapes] for rank in range(ranks)]
    return gradients, sum(range(1, ranks + 1))


def _num_unlike(arrays: Sequence[Any], value: float) -> int:
    return sum(int(np.count_nonzero(np.asarray(array) != np.float32(value))) for array in arrays)


def _time(
    strategy: Strategy, comm: Callable[[], None], step: Callable[[], None], settings: Settings
) -> dict[str, Timing]:
    effort = Effort(rounds=2, iterations=4, seconds=0.05, warm_up=1) if settings.quick else Effort(warm_up=1)
    return by_turns(
        {"comm": call(lambda: strategy.run(comm)), "step": call(lambda: strategy.run(step))}, effort
    )
