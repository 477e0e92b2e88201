"""How long do the gradients of real models take to reduce and apply, and does the bucket size matter?"""

from __future__ import annotations

from contextlib import closing
from typing import Any

import numpy as np

from benchmarks.gradient_lists import MODELS, Shape, num_elements
from benchmarks.harness import Effort, Timing, by_turns, call
from benchmarks.machine import available_bytes
from benchmarks.report import Report
from benchmarks.setups import Settings, cpus
from collectives import CommunicationOptions
from collectives.buckets import group_by_size
from strategies import SGD, MirroredStrategy, get_replica_context
from variables import Variable

LEARNING_RATE = 0.5

BUCKET_MB = (0, 1, 4, 16, 64)
"""2 ** 20 bytes each; 0 leaves the size to the strategy."""

_COPIES = 6
"""Arrays of the model's size for each replica: variable, gradient, the optimizer's, the reduced ones, twice spare."""


def run_buckets(settings: Settings, report: Report) -> None:
    """Print the table of each model."""
    models = ["DLRM-dense"] if settings.quick else list(MODELS)
    sizes = (0, 1) if settings.quick else BUCKET_MB
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
            comm, step, num_buckets, wrong = _measure(shapes, bucket, settings)
            rows.append(
                [
                    bucket or "auto",
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
        "# comm: all_reduce of the list in a step; step: apply_gradients (reduce and SGD update) in a step"
    )


def _measure(shapes: list[Shape], bucket_mb: int, settings: Settings) -> tuple[Timing, Timing, int, int]:
    options = CommunicationOptions(bytes_per_pack=bucket_mb << 20, timeout_seconds=settings.timeout)
    ranks = settings.ranks
    with closing(MirroredStrategy(cpus(ranks), communication_options=options)) as strategy:
        with strategy.scope():
            variables = [Variable(np.zeros(shape, np.float32)) for shape in shapes]
            optimizer = SGD(learning_rate=LEARNING_RATE)
        # Replica r's gradients are r + 1 everywhere.
        gradients = [[np.full(shape, rank + 1, np.float32) for shape in shapes] for rank in range(ranks)]

        def mine() -> list[Any]:
            return gradients[get_replica_context().replica_id_in_sync_group]

        def reduce() -> Any:
            return get_replica_context().all_reduce("SUM", mine())

        def reduce_and_forget() -> None:
            reduce()

        def update() -> None:
            optimizer.apply_gradients(zip(mine(), variables, strict=True))

        total = sum(range(1, ranks + 1))
        wrong = 0
        for reduced in strategy.experimental_local_results(strategy.run(reduce)):
            wrong += sum(int(np.count_nonzero(np.asarray(array) != total)) for array in reduced)
        strategy.run(update)
        expected = np.float32(-LEARNING_RATE * total)
        wrong += sum(int(np.count_nonzero(np.asarray(variable) != expected)) for variable in variables)
        effort = (
            Effort(rounds=2, iterations=4, seconds=0.05, warm_up=1) if settings.quick else Effort(warm_up=1)
        )
        timings = by_turns(
            {
                "comm": call(lambda: strategy.run(reduce_and_forget)),
                "step": call(lambda: strategy.run(update)),
            },
            effort,
        )
        num_buckets = len(group_by_size(gradients[0], bucket_mb << 20))
        return timings["comm"], timings["step"], num_buckets, wrong
