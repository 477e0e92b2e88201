"""How much memory does Mirrored training hold, against parameters + gradients + slots for each replica?

Each case is measured in a fresh process (``python -m benchmarks.memory REPLICAS MB OPTIMIZER``), which
prints one JSON object: the resident bytes that training added, and the most that it needed in between.
"""

from __future__ import annotations

import gc
import json
import resource
import subprocess
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.report import Report
from benchmarks.setups import STRATEGIES, Settings
from strategies import SGD, Adam, get_replica_context
from variables import Variable

OPTIMIZERS: dict[str, tuple[Callable[[], Any], int]] = {
    "SGD": (lambda: SGD(learning_rate=0.1), 0),
    "momentum": (lambda: SGD(learning_rate=0.1, momentum=0.9), 1),
    "Adam": (lambda: Adam(), 2),
}
"""How to make each, and its slots a parameter."""

_NUM_VARIABLES = 32
_STEPS = 4
_TIMEOUT = 300


def run_memory(settings: Settings, report: Report) -> None:
    """Print the table."""
    megabytes = 16 if settings.quick else 128
    cases = [("OneDevice", 1), ("Mirrored", settings.ranks)]
    rows: list[list[object]] = []
    for name, replicas in cases:
        for optimizer in ["Adam"] if settings.quick else OPTIMIZERS:
            report.working(f"{name}, {optimizer}")
            command = [sys.executable, "-m", "benchmarks.memory", str(replicas), str(megabytes), optimizer]
            ended = subprocess.run(
                command,
                cwd=Path(__file__).resolve().parents[1],
                capture_output=True,
                text=True,
                check=True,
                timeout=_TIMEOUT,
            )
            measured = json.loads(ended.stdout)
            needed, resident, peak = (measured[key] / 1e6 for key in ("needed", "resident", "peak"))
            excess = 100 * (resident / needed - 1)
            rows.append(
                [
                    name,
                    replicas,
                    optimizer,
                    needed,
                    resident,
                    f"{excess:+.1f}",
                    peak,
                    f"{100 * (peak / needed - 1):+.1f}",
                ]
            )
            report.record(
                "memory", {"strategy": name, "replicas": replicas, "optimizer": optimizer, **measured}
            )
    report.line(
        f"# MB (1e6 bytes) that {_STEPS} steps of training added to a fresh process; parameters: {megabytes} MiB"
    )
    report.line(
        "# needed: parameters, gradients and slots of each replica; resident: between steps; peak: at any time"
    )
    report.table(
        ["strategy", "replicas", "optimizer", "needed", "resident", "excess%", "peak", "excess%"], rows
    )


def measure_here(replicas: int, megabytes: int, optimizer_name: str) -> dict[str, int]:
    """Train in this process and give the bytes it took, ``resident`` and ``peak``, and those ``needed``."""
    make_optimizer, num_slots = OPTIMIZERS[optimizer_name]
    size = (megabytes << 20) // 4 // _NUM_VARIABLES
    with closing(STRATEGIES["OneDevice" if replicas == 1 else "Mirrored"](replicas)) as strategy:
        strategy.run(lambda: None)  # the threads' own memory is not the model's
        before = _resident_bytes()
        with strategy.scope():
            # full, not zeros: memory of zeros counts only once it is written to.
            variables = [Variable(np.full(size, 1, np.float32)) for _ in range(_NUM_VARIABLES)]
            optimizer = make_optimizer()
        gradients = _gradient_memory(optimizer, variables, replicas)

        def step() -> None:
            mine = gradients[get_replica_context().replica_id_in_sync_group]
            for gradient in mine:
                gradient.fill(1)
            optimizer.apply_gradients(zip(mine, variables, strict=True))

        for _ in range(_STEPS):
            strategy.run(step)
        gc.collect()
        resident = _resident_bytes() - before
        peak = (
            resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
            - before
        )
        # Every copy has moved the same way, and away from where it began.
        values = [np.asarray(value) for value in strategy.experimental_local_results(variables[-1])]
        wrong = sum(int(np.count_nonzero(value != values[0][0])) + (value[0] >= 1) for value in values)
    needed = replicas * (2 + num_slots) * size * _NUM_VARIABLES * 4
    return {"needed": needed, "resident": resident, "peak": peak, "wrong": int(wrong)}


def _gradient_memory(optimizer: Any, variables: list[Variable], replicas: int) -> list[list[Any]]:
    del optimizer
    return [[np.full(v.shape, 1, np.float32) for v in variables] for _ in range(replicas)]


def _resident_bytes() -> int:
    statm = Path("/proc/self/statm")
    if statm.exists():
        return int(statm.read_text(encoding="ascii").split()[1]) * resource.getpagesize()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


if __name__ == "__main__":
    print(json.dumps(measure_here(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])))
