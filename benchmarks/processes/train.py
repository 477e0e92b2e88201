"""How fast do processes train the MLP together, each with one BLAS thread, against one process alone and against TensorFlow's workers?"""

from __future__ import annotations

from contextlib import ExitStack

from benchmarks.processes.contenders import Contenders, Turn, describe, report_medians
from benchmarks.processes.process_groups import ours
from benchmarks.report import Report
from benchmarks.setups import Settings
from benchmarks.train import REPLICA_BATCH

NAME = "processes_train"

_ALONE = "one process"


def run_train(settings: Settings, report: Report) -> None:
    """Print the times of a step, and examples a second as multiples of those of one process."""
    ranks, backends = settings.ranks, settings.processes.backends
    batch = {"batch": REPLICA_BATCH}
    with ExitStack() as stack:
        contenders = stack.enter_context(Contenders(settings, report, ranks, ("tensorflow",), limit=False))
        alone = stack.enter_context(ours(backends[0], 1, settings.timeout))
        turns = [
            *(Turn(backend, group, "mlp", batch) for backend, group in contenders.ours.items()),
            Turn(_ALONE, alone, "mlp", batch),
            *(
                Turn(name, group, "mlp", {**batch, "replicas": ranks, "mode": "function"})
                for name, group in contenders.rivals.items()
            ),
        ]
        timings = contenders.measure(turns)
        wrong = contenders.num_wrong + alone.num_wrong
    scaling = {
        backend: ranks * timings[_ALONE].median / timings[backend].median
        for backend in (*backends, *contenders.rivals)
    }
    what = f"MLP step, {ranks} x {REPLICA_BATCH}"
    row = {"what": what, "ranks": ranks, "examples_a_second_against_one_process": scaling, "wrong": wrong}
    report.record(NAME, {**row, **describe(timings, backends[0])})
    report.line(
        f"# {ranks} processes of {REPLICA_BATCH} examples each; {_ALONE}: OneDevice, {REPLICA_BATCH} examples"
    )
    report_medians(report, "trained", {what: timings}, backends)
    report.line()
    report.table(
        ["trained", "steps/s", "examples/s", f"against {_ALONE}"],
        [
            [
                name,
                f"{1 / timing.median:.0f}",
                f"{(1 if name == _ALONE else ranks) * REPLICA_BATCH / timing.median:.0f}",
                f"{scaling[name]:.2f}x" if name in scaling else "1x",
            ]
            for name, timing in timings.items()
        ],
    )
