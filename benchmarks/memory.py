"""How much memory does Mirrored training hold, against parameters + gradients + slots for each replica?

Each case is measured in a fresh process (``python -m benchmarks.memory REPLICAS MB OPTIMIZER GRADIENTS``), which
prints one JSON object: the resident bytes that training added, and the most that it needed in between.
"""

from __future__ import annotations

import gc
import json
import re
import resource
import subprocess
import sys
from collections.abc import Callable
from contextlib import closing
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.report import Report
from benchmarks.setups import STRATEGIES, Settings, this_replica
from strategies import SGD, Adam
from variables import Variable

OPTIMIZERS: dict[str, tuple[Callable[[], Any], int]] = {
    "SGD": (lambda: SGD(learning_rate=0.1), 0),
    "momentum": (lambda: SGD(learning_rate=0.1, momentum=0.9), 1),
    "Adam": (lambda: Adam(), 2),
}
"""How to make each, and its slots a parameter."""

GRADIENTS = ("in place", "own arrays")
"""Written into the optimizer's memory, or into arrays of the user's that are copied there."""

_NUM_VARIABLES = 32
_STEPS = 4
_TIMEOUT = 300


def run_memory(settings: Settings, report: Report) -> None:
    """Print the table."""
    megabytes = 16 if settings.quick else 128
    cases = [("OneDevice", 1), ("Mirrored", settings.ranks)]
    rows: list[list[object]] = []
    variants = [("Adam", GRADIENTS[0])] if settings.quick else list(product(OPTIMIZERS, GRADIENTS))
    for name, replicas in cases:
        for optimizer, gradients in variants:
            report.working(f"{name}, {optimizer}, gradients {gradients}")
            module = [sys.executable, "-m", "benchmarks.memory"]
            command = [*module, str(replicas), str(megabytes), optimizer, gradients]
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
            peak_excess = 100 * (peak / needed - 1)
            cells = [needed, resident, f"{excess:+.1f}", peak, f"{peak_excess:+.1f}"]
            rows.append([name, replicas, optimizer, gradients, *cells])
            about = {"strategy": name, "replicas": replicas, "optimizer": optimizer, "gradients": gradients}
            report.record("memory", {**about, **measured})
    report.line(
        f"# MB (1e6 bytes) that {_STEPS} steps of training added to a fresh process; parameters: {megabytes} MiB"
    )
    report.line(
        "# needed: parameters, gradients and slots of each replica; resident: between steps; peak: at any time"
    )
    titles = "strategy,replicas,optimizer,gradients,needed,resident,excess%,peak,excess%"
    report.table(titles.split(","), rows)


def measure_here(replicas: int, megabytes: int, optimizer_name: str, gradients_lie: str) -> dict[str, int]:
    """Train in this process and give the bytes it took, ``resident`` and ``peak``, and those ``needed``."""
    make_optimizer, num_slots = OPTIMIZERS[optimizer_name]
    size = (megabytes << 20) // 4 // _NUM_VARIABLES
    with closing(STRATEGIES["OneDevice" if replicas == 1 else "Mirrored"](replicas)) as strategy:
        strategy.run(lambda: None)  # the threads' own memory is not the model's
        before, _ = _resident_and_peak()
        with strategy.scope():
            # full, not zeros: memory of zeros counts only once it is written to.
            variables = [Variable(np.full(size, 1, np.float32)) for _ in range(_NUM_VARIABLES)]
            optimizer = make_optimizer()
        own: dict[int, list[Any]] = {}

        def step() -> None:
            replica = this_replica().replica_id_in_sync_group
            if gradients_lie == GRADIENTS[0]:
                gradients = [optimizer.gradient(variable) for variable in variables]
            else:
                if replica not in own:
                    own[replica] = [np.full(size, 1, np.float32) for _ in variables]
                gradients = own[replica]
            for gradient in gradients:
                gradient.fill(1)
            optimizer.apply_gradients(zip(gradients, variables, strict=True))

        for _ in range(_STEPS):
            strategy.run(step)
        gc.collect()
        resident, peak = (num_bytes - before for num_bytes in _resident_and_peak())
        # Every copy has moved the same way, and away from where it began.
        values = [np.asarray(value) for value in strategy.experimental_local_results(variables[-1])]
        wrong = sum(int(np.count_nonzero(value != values[0][0])) + int(value[0] >= 1) for value in values)
    needed = replicas * (2 + num_slots) * size * _NUM_VARIABLES * 4
    return {"needed": needed, "resident": resident, "peak": peak, "wrong": wrong}


def _resident_and_peak() -> tuple[int, int]:
    """Bytes of this process that lie in memory now, and the most so far."""
    status = Path("/proc/self/status")
    if status.exists():
        # Not getrusage's peak: that begins with the peak of the process that started this one.
        kib = dict(re.findall(r"(VmRSS|VmHWM):\s+(\d+) kB", status.read_text(encoding="utf-8")))
        return int(kib["VmRSS"]) * 1024, int(kib["VmHWM"]) * 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    return peak, peak


if __name__ == "__main__":
    print(json.dumps(measure_here(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4])))
