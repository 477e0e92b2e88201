"""What does clipping by the global norm cost? 200 variables, against one more pass over their gradients' bytes.

The norm can only be known when all gradients have been read, and only then can they be scaled, so that an update that
clips reads them twice. A pass is ``np.multiply`` of one array with all the gradients' bytes in place: it reads and writes each.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import ExitStack, closing
from functools import partial
from typing import Any

import numpy as np

from benchmarks.harness import by_turns, call
from benchmarks.report import Report
from benchmarks.setups import STRATEGIES, Settings, this_replica
from strategies import SGD, Strategy, clip_by_global_norm, global_norm
from variables import Variable

MANY = 200
SIZES = (1_000, 50_000)
BOUND = 0.5


def run_clipping(settings: Settings, report: Report) -> None:
    """Print steps with and without a bound, and the functions for gradients outside of optimizers."""
    steps: list[list[object]] = []
    functions: list[list[object]] = []
    for size in SIZES[:1] if settings.quick else SIZES:
        for name, replicas in (("OneDevice", 1), ("Mirrored", settings.ranks)):
            report.working(f"{MANY} x {size}, {name}")
            with ExitStack() as stack:
                strategy = stack.enter_context(closing(STRATEGIES[name](replicas)))
                gradients = _gradients(replicas, size)
                plain, _ = _step(strategy, gradients, None)
                clipped, wrong = _step(strategy, gradients, BOUND)
                own, flat = gradients[0], np.concatenate(gradients[0])
                cases = {
                    "plain": call(plain),
                    "clipped": call(clipped),
                    "pass": call(partial(np.multiply, flat, 1.0, out=flat)),
                    "norm": call(partial(global_norm, own)),
                    "clip": call(partial(clip_by_global_norm, own, BOUND)),
                }
                timings = by_turns(cases, settings.effort)
            medians = {case: timing.median * 1e6 for case, timing in timings.items()}
            ratio = medians["clipped"] / (medians["plain"] + medians["pass"])
            label = f"{MANY} x {size}"
            steps.append(
                [label, name, replicas, *(medians[c] for c in ("plain", "pass", "clipped")), ratio, wrong]
            )
            if replicas == 1:
                functions.append([label, medians["pass"], medians["norm"], medians["clip"]])
            report.record(
                "clipping",
                {
                    "variables": MANY,
                    "size": size,
                    "strategy": name,
                    "replicas": replicas,
                    **{case: timing.describe() for case, timing in timings.items()},
                    "ratio": ratio,
                    "wrong": wrong,
                },
            )
    report.line("# a step of SGD without and with global_clipnorm, p50 us; ratio: clipped / (plain + pass)")
    titles = ["plain", "pass", "clipped", "ratio", "wrong"]
    report.table(["variables", "strategy", "replicas", *titles], steps)
    report.line()
    report.line("# the functions for gradients outside of optimizers, p50 us")
    report.table(["gradients", "pass", "global_norm", "clip_by_global_norm"], functions)


def _gradients(replicas: int, size: int) -> list[list[np.ndarray[Any, Any]]]:
    random = np.random.default_rng(0)
    return [[random.standard_normal(size, np.float32) for _ in range(MANY)] for _ in range(replicas)]


def _step(
    strategy: Strategy, gradients: list[list[np.ndarray[Any, Any]]], bound: float | None
) -> tuple[Callable[[], object], int]:
    """A call that makes a step, and how many of the values after the first one are wrong."""
    size = len(gradients[0][0])
    with strategy.scope():
        variables = [Variable(np.zeros(size, np.float32)) for _ in range(MANY)]
        optimizer = SGD(1.0, global_clipnorm=bound)

    def update() -> None:
        mine = gradients[this_replica().replica_id_in_sync_group]
        optimizer.apply_gradients(zip(mine, variables, strict=True))

    def step() -> object:
        return strategy.run(update)

    step()
    totals = [np.sum([own[i].astype(np.float64) for own in gradients], axis=0) for i in range(MANY)]
    norm = math.sqrt(sum(float(total @ total) for total in totals))
    scale = 1.0 if bound is None else min(1.0, bound / norm)
    wrong = sum(
        int(np.count_nonzero(~np.isclose(np.asarray(variable), -scale * total, rtol=1e-3, atol=1e-7)))
        for variable, total in zip(variables, totals, strict=True)
    )
    return step, wrong
