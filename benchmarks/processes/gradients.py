"""How long do processes take to sum up a model's gradients, as views of our buffers, against one raw reduction of as many bytes?"""

from __future__ import annotations

from benchmarks.gradient_lists import MODELS, num_elements
from benchmarks.processes.contenders import C, Contenders, Turn, describe, report_medians
from benchmarks.report import Report
from benchmarks.setups import Settings

NAME = "processes_gradients"


def run_gradients(settings: Settings, report: Report) -> None:
    """Print the times of all gradients together."""
    model = "DLRM-dense" if settings.quick else "ResNet-50"
    shapes = MODELS[model]()
    num_bytes = 4 * num_elements(shapes)
    with Contenders(settings, report, settings.ranks, ("mpi4py", "gloo"), limit=True) as contenders:
        turns = [
            Turn(backend, group, "gradients", {"model": model, "memory": "link"})
            for backend, group in contenders.ours.items()
        ]
        raw = dict(contenders.rivals)
        if contenders.limit is not None:
            raw[C] = contenders.limit
        turns += [Turn(name, group, "all_reduce", {"num_bytes": num_bytes}) for name, group in raw.items()]
        timings = contenders.measure(turns)
        ours = settings.processes.backends
        what = f"{model}, {len(shapes)} arrays, {num_bytes * 1e-6:.0f} MB"
        row = {
            "what": what,
            "ranks": settings.ranks,
            **describe(timings, ours[0]),
            "wrong": contenders.num_wrong,
        }
        report.record(NAME, row)
    report.line(
        f"# {settings.ranks} processes; ours: gradients that are views; the others: one array of as many bytes"
    )
    report_medians(report, "gradients", {what: timings}, ours)
