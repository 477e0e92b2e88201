"""How fast does a small model train, and how well does it scale with replicas?

The MLP 784-128-10 on made-up data, a batch of 64 a replica: first in the words of tf_cnn_benchmarks and
Horovod, then weak scaling (64 a replica) and strong scaling (one global batch split over the replicas).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from typing import Any, final

import numpy as np

from benchmarks.harness import Case, Timing, by_turns, call
from benchmarks.mlp import SIZES, num_wrong, num_wrong_losses, start_and_batch, training_step
from benchmarks.report import Report
from benchmarks.setups import STRATEGIES, Settings, cpus, report_ratios, this_replica
from benchmarks.thread_floor import BareThreads
from strategies import Strategy

REPLICA_BATCH = 64
BATCHES_AN_ITERATION = 10  # Horovod's --num-batches-per-iter


def run_train(settings: Settings, report: Report) -> None:
    """Print the training log, the scaling table, and the rival's ratios."""
    _training_log(settings, report)
    report.line()
    _scaling(settings, report)


def speed(batch: int, step_seconds: Sequence[float]) -> tuple[float, float, float]:
    """Examples a second as tf_cnn_benchmarks computes them: the mean, its standard error, and the jitter.

    Args:
        batch: examples a step, on all replicas.
        step_seconds: of each step.
    """
    speeds = batch / np.asarray(step_seconds)
    error = float(np.std(speeds) / np.sqrt(len(speeds)))
    jitter = float(1.4826 * np.median(np.abs(speeds - np.median(speeds))))
    return float(batch / np.mean(step_seconds)), error, jitter


def _strategy(replicas: int) -> Strategy:
    return STRATEGIES["OneDevice" if replicas == 1 else "Mirrored"](replicas)


def _training_log(settings: Settings, report: Report) -> None:
    replicas, steps = settings.ranks, 20 if settings.quick else 200
    batch, every = replicas * REPLICA_BATCH, max(1, steps // 10)
    iterations = steps // BATCHES_AN_ITERATION
    for title, value in (
        ("Model", f"mlp {'-'.join(map(str, SIZES))}, float32"),
        ("Dataset", "synthetic"),
        ("Mode", "training"),
        ("Batch size", f"{batch} global"),
        ("", f"{REPLICA_BATCH} per device"),
        ("Num batches", str(steps)),
        ("Devices", str(cpus(replicas))),
        ("Optimizer", "sgd"),
        ("Variables", "replicated" if replicas > 1 else "one device"),
        ("AllReduce", "in-process" if replicas > 1 else "None"),
        ("Sync", "True"),
    ):
        report.line(f"{title + ':' if title else '':<13}{value}")
    report.line("==========")
    report.line("Generating training model")
    report.working(f"{replicas} replicas")
    with closing(_strategy(replicas)) as strategy:
        step = training_step(strategy, REPLICA_BATCH)
        report.line("Running warm up")
        wrong = num_wrong(strategy, step, batch)
        for _ in range(max(0, steps // 10 - 3)):
            step()
        report.line("Done warm up")
        report.line("Step\tImg/sec\ttotal_loss")
        seconds: list[float] = []
        for number in range(1, steps + 1):
            begin = time.perf_counter_ns()
            losses = step()
            seconds.append((time.perf_counter_ns() - begin) * 1e-9)
            if number == 1 or number % every == 0:
                mean, error, jitter = speed(batch, seconds)
                loss = float(np.asarray(strategy.reduce("SUM", losses, axis=None)))
                report.line(
                    f"{number}\timages/sec: {mean:.1f} +/- {error:.1f} (jitter = {jitter:.1f})\t{loss:.3f}"
                )
    mean, error, jitter = speed(batch, seconds)
    report.line("-" * 64)
    report.line(f"total images/sec: {mean:.2f}")
    report.line("-" * 64)
    each = np.asarray(seconds[: iterations * BATCHES_AN_ITERATION]).reshape(iterations, -1)
    per_device = REPLICA_BATCH * each.shape[1] / each.sum(axis=1)
    spread = 1.96 * float(np.std(per_device))
    report.line(f"Img/sec per CPU: {np.mean(per_device):.1f} +-{spread:.1f}")
    report.line(
        f"Total img/sec on {replicas} CPU(s): {replicas * np.mean(per_device):.1f} +-{replicas * spread:.1f}"
    )
    report.record(
        "train",
        {
            "what": "log",
            "replicas": replicas,
            "global_batch": batch,
            "images_per_second": mean,
            "standard_error": error,
            "jitter": jitter,
            "wrong": wrong,
            **Timing(tuple(seconds)).describe(),
        },
    )


@final
@dataclass(frozen=True)
class _Setup:
    """One strategy in training: its step, what only the step's communication is, and what only its dispatch."""

    replicas: int
    replica_batch: int
    step: Callable[[], Any]
    communicate: Callable[[], Any]
    dispatch: Callable[[], Any]

    @property
    def examples(self) -> int:
        """In a step, on all replicas."""
        return self.replicas * self.replica_batch


def _scaling(settings: Settings, report: Report) -> None:
    counts = [1, 2] if settings.quick else settings.replica_counts
    # A global batch for strong scaling that every number of replicas divides.
    strong_batch = REPLICA_BATCH * int(np.lcm.reduce(counts))
    wrong = 0
    with ExitStack() as stack:
        weak, strong = {}, {}
        for replicas in counts:
            weak[replicas], found = _setup(stack, replicas, REPLICA_BATCH)
            wrong += found
            strong[replicas], found = _setup(stack, replicas, strong_batch // replicas)
            wrong += found
        cases: dict[str, Case] = {}
        for replicas in counts:
            cases[f"weak {replicas}"] = call(weak[replicas].step)
            cases[f"strong {replicas}"] = call(strong[replicas].step)
            cases[f"communicate {replicas}"] = call(weak[replicas].communicate)
            cases[f"dispatch {replicas}"] = call(weak[replicas].dispatch)
            bare = stack.enter_context(closing(BareThreads(replicas, REPLICA_BATCH)))
            wrong += num_wrong_losses([bare.step() for _ in range(3)], replicas * REPLICA_BATCH)
            cases[f"bare {replicas}"] = call(bare.step)
            if settings.rival is not None and replicas <= 2:
                for mode in ("eager", "function"):
                    cases[f"{settings.rival.name} {mode} {replicas}"] = settings.rival.case(
                        "mlp", replicas=replicas, batch=REPLICA_BATCH, mode=mode
                    )
        timings = by_turns(cases, settings.effort, report.working)

    rows: list[list[object]] = []
    for replicas in counts:
        examples = replicas * REPLICA_BATCH
        step, whole = timings[f"weak {replicas}"], timings[f"strong {replicas}"]
        each_second = examples / step.median
        weak_share = timings["weak 1"].median / step.median
        strong_share = timings["strong 1"].median / (replicas * whole.median)
        alone = timings[f"communicate {replicas}"].median - timings[f"dispatch {replicas}"].median
        communication = max(0.0, alone) / step.median
        bare_threads = timings[f"bare {replicas}"]
        rows.append(
            [
                replicas,
                f"{each_second:.0f}",
                f"{each_second / replicas:.0f}",
                f"{100 * weak_share:.1f}",
                f"{100 * strong_share:.1f}",
                f"{100 * communication:.1f}",
                *(f"{seconds * 1e6:.0f}" for seconds in (step.minimum, step.median, step.p95)),
                f"{bare_threads.median * 1e6:.0f}",
            ]
        )
        report.record(
            "train",
            {
                "what": "scaling",
                "replicas": replicas,
                "examples_per_second": each_second,
                "ratio_to_one_device": each_second / (REPLICA_BATCH / timings["weak 1"].median),
                "weak_efficiency": weak_share,
                "strong_efficiency": strong_share,
                "communication_share_of_step": communication,
                "strong_global_batch": strong_batch,
                "bare_threads": bare_threads.describe(),
                "weak": step.describe(),
                "strong": whole.describe(),
                "wrong": wrong if replicas == counts[0] else 0,
            },
        )
    report.line(
        f"# weak: {REPLICA_BATCH} examples a replica; strong: {strong_batch} in all; 1 replica is OneDevice"
    )
    titles = (
        "replicas,global ex/s,ex/s/replica,weak eff%,strong eff%,comm%,step min_us,p50_us,p95_us,bare p50_us"
    )
    report.table(titles.split(","), rows)
    report.line(
        "# comm%: an in-place all_reduce of as many bytes as the gradients, alone and without the dispatch, "
        "as a share of the weak step"
    )
    report.line("# bare: the same arithmetic on as many threads, without the library")
    compared = [
        (
            f"MLP step, {replicas} x {REPLICA_BATCH}",
            timings[f"weak {replicas}"],
            name.rsplit(" ", 1)[0],
            timing,
        )
        for replicas in counts
        for name, timing in timings.items()
        if settings.rival is not None
        and name.startswith(settings.rival.name)
        and name.endswith(f" {replicas}")
    ]
    report_ratios(report, "ours", compared)
    for what, ours, name, theirs in compared:
        report.record(
            "train",
            {
                "what": what,
                "rival": name,
                **theirs.describe(),
                "ratio": theirs.median / ours.median,
                "wrong": 0,
            },
        )


def _setup(stack: ExitStack, replicas: int, replica_batch: int) -> tuple[_Setup, int]:
    strategy = stack.enter_context(closing(_strategy(replicas)))
    step = training_step(strategy, replica_batch)
    wrong = num_wrong(strategy, step, replicas * replica_batch)
    size = sum(array.size for array in start_and_batch(1)[0])
    # Zeros, written: sums in place of anything else would grow out of bounds.
    flats = [np.full(size, 0, np.float32) for _ in range(replicas)]

    def reduce() -> None:
        if replicas > 1:
            context = this_replica()
            flat = flats[context.replica_id_in_sync_group]
            context.communicator.all_reduce(flat, out=flat)

    def nothing() -> None:
        pass

    setup = _Setup(replicas, replica_batch, step, lambda: strategy.run(reduce), lambda: strategy.run(nothing))
    return setup, wrong
