"""How long do checkpoints take, against a plain sequential write and read of the same bytes in one file?

The plain write makes a new file, ends with an fsync, and then takes the old file's name, as ours does: both are
on the disk, and both need pages of the system's cache while the old file still has its own. Two plain reads are measured: ``read`` into
new memory, as ``file.read()`` does, and ``readinto`` memory that is there already, which nothing that
checks what it reads before it changes a variable can equal: it reads twice. While an asynchronous save
begins, the step stands still for as long as the state is copied; that is compared with one copy of it by NumPy.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.harness import Case, Effort, Timing, by_turns, call
from benchmarks.report import Report
from benchmarks.setups import STRATEGIES, Settings
from strategies import SGD, Checkpoint, PendingSave
from variables import Variable

_NUM_VARIABLES = 32
_PIECE = 16 << 20


def run_checkpoint(settings: Settings, report: Report) -> None:
    """Print the table."""
    megabytes = 32 if settings.quick else 1024
    rows: list[list[object]] = []
    for name, replicas in (("OneDevice", 1), ("Mirrored", settings.ranks)):
        report.working(f"{name}, {megabytes} MiB")
        timings, wrong = _measure(name, replicas, megabytes, settings.quick)
        num_bytes = megabytes << 20
        plain = {"save": "write", "restore": "read", "step stands still": "copy"}
        for what, rival in [*plain.items(), ("restore", "readinto")]:
            # Not the medians: whether the system's cache gets pages that this machine never had before, which takes
            # a virtual one seconds a gigabyte, falls on one or the other by chance.
            mine, theirs = timings[what].minimum, timings[rival].minimum
            rows.append(
                [name, replicas, what, 1e3 * mine, num_bytes / mine / 1e6, rival, 1e3 * theirs, theirs / mine]
            )
        described = {key: timing.describe() for key, timing in timings.items()}
        about = {"strategy": name, "replicas": replicas, "bytes": num_bytes, "wrong": wrong}
        report.record("checkpoint", {**about, "timings": described})
    report.line(
        f"# {megabytes} MiB of parameters and momentum in {2 * _NUM_VARIABLES} arrays; MB are 1e6 bytes; the file lies in "
        "the system's cache when it is read"
    )
    report.line("# ratio: what the plain operation takes, by what ours takes; 1 is as fast")
    report.table(["strategy", "replicas", "measured", "min_ms", "MB/s", "plain", "min_ms", "ratio"], rows)


def _measure(name: str, replicas: int, megabytes: int, quick: bool) -> tuple[dict[str, Timing], int]:
    """The times by name, and how many elements of what was restored are wrong."""
    # Half of the bytes are parameters, half momentum.
    size = (megabytes << 20) // 8 // _NUM_VARIABLES
    rng = np.random.default_rng(0)
    with (
        closing(STRATEGIES[name](replicas)) as strategy,
        tempfile.TemporaryDirectory(prefix="checkpoint", dir=os.environ.get("BENCHMARK_DIR")) as folder,
    ):
        values = rng.standard_normal((_NUM_VARIABLES, size), np.float32)
        with strategy.scope():
            variables = [Variable(value) for value in values]
            optimizer = SGD(0.1, momentum=0.9)
        for variable, value in zip(variables, values, strict=True):
            optimizer.slot(variable, "momentum")[...] = value
        checkpoint = Checkpoint(variables=variables, optimizer=optimizer)
        path, plain = Path(folder, "ours"), Path(folder, "plain")
        state, memory = np.concatenate([values, values]), np.ones((2 * _NUM_VARIABLES, size), np.float32)

        content, room = _bytes(state), _bytes(memory)

        def restore() -> None:
            checkpoint.restore(path).assert_consumed()

        checkpoint.save(path)
        _write(plain, content)
        cases: dict[str, Case] = {
            "save": call(lambda: checkpoint.save(path)),
            "write": call(lambda: _write(plain, content)),
            "restore": call(restore),
            "read": call(lambda: plain.read_bytes()),
            "readinto": call(lambda: _read_into(plain, room)),
            "step stands still": _standing_still(lambda: checkpoint.save(path, blocking=False)),
            "copy": call(lambda: np.copyto(memory, state)),
        }
        effort = Effort(rounds=2 if quick else 5, iterations=1, most_iterations=1, seconds=0.1, warm_up=2)
        timings = by_turns(cases, effort)  # warm-up also makes the system touch memory that it never had
        checkpoint.wait()
        for variable in variables:
            variable.assign(np.zeros(size, np.float32))
            optimizer.slot(variable, "momentum")[...] = 0
        restore()
        wrong = 0
        for variable, value in zip(variables, values, strict=True):
            copies = [np.asarray(copy) for copy in strategy.experimental_local_results(variable)]
            for restored in [*copies, optimizer.slot(variable, "momentum")]:
                wrong += int(np.count_nonzero(restored != value))
    return timings, wrong


def _standing_still(save: Callable[[], str | PendingSave]) -> Case:
    """How long the call takes; the writing that goes on after it is waited for, and not counted."""

    def case(iterations: int) -> Sequence[float]:
        seconds = []
        for _ in range(iterations):
            begin = time.perf_counter_ns()
            saving = save()
            seconds.append((time.perf_counter_ns() - begin) * 1e-9)
            assert isinstance(saving, PendingSave)
            saving.wait()
        return seconds

    return case


def _bytes(array: Any) -> memoryview:
    return memoryview(array).cast("B")


def _write(path: Path, content: memoryview) -> None:
    """Write a new file, have it put on the disk, and let it replace the old one."""
    new = path.with_name("new")
    with new.open("wb", buffering=0) as file:
        for start in range(0, len(content), _PIECE):
            file.write(content[start : start + _PIECE])
        os.fsync(file.fileno())
    os.replace(new, path)


def _read_into(path: Path, memory: memoryview) -> None:
    with path.open("rb", buffering=0) as file:
        for start in range(0, len(memory), _PIECE):
            file.readinto(memory[start : start + _PIECE])
