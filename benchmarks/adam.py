"""Do many small variables cost more than one large one? 200 of 1,000 floats against one of 200,000, Adam."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack, closing

import numpy as np

from benchmarks.harness import by_turns, call
from benchmarks.report import Report
from benchmarks.setups import STRATEGIES, Settings, this_replica
from strategies import Adam, Strategy
from variables import Variable

MANY, EACH = 200, 1000
STEPS_CHECKED = 3


def run_adam(settings: Settings, report: Report) -> None:
    """Print the time of a step for both, and the ratio."""
    rows: list[list[object]] = []
    for name, replicas in (("OneDevice", 1), ("Mirrored", settings.ranks)):
        report.working(f"{name}, {replicas} replicas")
        with ExitStack() as stack:
            many, wrong_many = _step(stack, STRATEGIES[name](replicas), MANY, EACH)
            one, wrong_one = _step(stack, STRATEGIES[name](replicas), 1, MANY * EACH)
            timings = by_turns({"many": call(many), "one": call(one)}, settings.effort)
        many_timing, one_timing = timings["many"], timings["one"]
        ratio = many_timing.median / one_timing.median
        cells = [
            t * 1e6
            for timing in (many_timing, one_timing)
            for t in (timing.minimum, timing.median, timing.p95)
        ]
        rows.append([name, replicas, *cells, ratio])
        report.record(
            "adam",
            {
                "strategy": name,
                "replicas": replicas,
                "many": many_timing.describe(),
                "one": one_timing.describe(),
                "ratio": ratio,
                "wrong": wrong_many + wrong_one,
            },
        )
    report.line(f"# one step of Adam, us: {MANY} variables of {EACH} float32, and 1 of {MANY * EACH}")
    titles = [f"{MANY} min", "p50", "p95", "1 min", "p50", "p95"]
    report.table(["strategy", "replicas", *titles, "ratio"], rows)


def _step(stack: ExitStack, strategy: Strategy, count: int, size: int) -> tuple[Callable[[], object], int]:
    """A call that makes a step, and how many of the values after the first steps are wrong."""
    stack.enter_context(closing(strategy))
    with strategy.scope():
        variables = [Variable(np.zeros(size, np.float32)) for _ in range(count)]
        optimizer = Adam()
    random = np.random.default_rng(0)
    replicas = strategy.num_replicas_in_sync
    gradients = [[random.standard_normal(size, np.float32) for _ in range(count)] for _ in range(replicas)]

    def update() -> None:
        mine = gradients[this_replica().replica_id_in_sync_group]
        optimizer.apply_gradients(zip(mine, variables, strict=True))

    def step() -> object:
        return strategy.run(update)

    for _ in range(STEPS_CHECKED):
        step()
    wrong = 0
    for index, variable in enumerate(variables):
        expected = plain_adam(np.sum([g[index].astype(np.float64) for g in gradients], axis=0), STEPS_CHECKED)
        wrong += int(np.count_nonzero(~np.isclose(np.asarray(variable), expected, rtol=1e-3, atol=1e-7)))
    return step, wrong


def plain_adam(gradient: np.ndarray, steps: int, rate: float = 1e-3) -> np.ndarray:
    """Where Adam has moved a variable from 0 after some steps with the same gradient, in plain NumPy."""
    value, first, second = np.zeros_like(gradient), np.zeros_like(gradient), np.zeros_like(gradient)
    for number in range(1, steps + 1):
        first += (gradient - first) * (1 - 0.9)
        second += (gradient**2 - second) * (1 - 0.999)
        corrected = rate * np.sqrt(1 - 0.999**number) / (1 - 0.9**number)
        value -= corrected * first / (np.sqrt(second) + 1e-7)
    return value
