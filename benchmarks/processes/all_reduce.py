"""How fast do the processes of a machine sum up arrays, over size, each in place?

Ours on arrays in memory that the link hands out, as gradients are, and on arrays in ordinary memory; beside the limit, a
C loop over shared memory.
"""

from __future__ import annotations

from benchmarks.processes.contenders import C, Contenders, Turn, describe, report_medians
from benchmarks.report import Report
from benchmarks.setups import Settings

SIZES = [4, 64, 1 << 10, 4 << 10, 16 << 10, 256 << 10, 1 << 20, 4 << 20, 16 << 20, 64 << 20]
_QUICK_SIZES = [4, 16 << 10, 1 << 20]

NAME = "processes_all_reduce"


def run_all_reduce(settings: Settings, report: Report) -> None:
    """Print times over size, and the others' as multiples of ours."""
    ranks, chosen = settings.ranks, settings.processes
    sizes = [
        size
        for size in (_QUICK_SIZES if settings.quick else SIZES)
        if chosen.min_bytes <= size <= chosen.max_bytes
    ]
    rows = {}
    with Contenders(settings, report, ranks, ("mpi4py", "gloo", "tensorflow"), limit=True) as contenders:
        for size in sizes:
            report.working(f"{size} B")
            before = contenders.num_wrong
            timings = contenders.measure(_turns(contenders, size, ranks))
            rows[_size(size)] = timings
            row = {"size": size, "ranks": ranks, **describe(timings, chosen.backends[0])}
            report.record(NAME, {**row, "wrong": contenders.num_wrong - before})
    report.line(f"# all_reduce of float32 in place, {ranks} processes")
    report_medians(report, "size", rows, chosen.backends)


def _turns(contenders: Contenders, size: int, ranks: int) -> list[Turn]:
    turns = []
    for backend, group in contenders.ours.items():
        for column, memory in ((backend, "link"), (f"{backend}, ordinary", "ordinary")):
            turns.append(Turn(column, group, "all_reduce", {"num_bytes": size, "memory": memory}))
    if contenders.limit is not None:
        turns.append(Turn(C, contenders.limit, "all_reduce", {"num_bytes": size}))
    for name, group in contenders.rivals.items():
        details: dict[str, object] = {"num_bytes": size}
        if name == "tensorflow":
            details.update(replicas=ranks, mode="function", cross_device_ops="default")
        turns.append(Turn(name, group, "all_reduce", details))
    return turns


def _size(num_bytes: int) -> str:
    for unit, factor in (("MB", 1 << 20), ("KB", 1 << 10)):
        if num_bytes >= factor:
            return f"{num_bytes // factor} {unit}"
    return f"{num_bytes} B"
