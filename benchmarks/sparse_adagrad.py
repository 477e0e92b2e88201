"""What does a sparse step of Adagrad cost? A table of embeddings, popular rows and rare ones, against PyTorch's.

The gradient has 26 x 4,096 rows of 64 numbers, as of 26 categorical features in a batch of 4,096. Which row of the table each belongs
to follows Zipf's law, so that many come more than once. PyTorch takes part where it is installed, with one
thread, as NumPy's own code has one; its ``torch.optim.Adagrad`` gets the same gradients as sparse tensors.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from importlib import import_module
from typing import Any, final

import numpy as np

from benchmarks.harness import Timing, by_turns, call
from benchmarks.report import Report
from benchmarks.setups import STRATEGIES, Settings, this_replica
from strategies import Adagrad, IndexedSlices, Strategy
from variables import Variable

FEATURES, WIDTH = 26, 64
ZIPF_EXPONENT = 1.05
BATCHES = 3
"""With different keys; steps take them by turns."""

_RATE, _START, _EPSILON = 0.05, 0.1, 1e-10  # an epsilon so small that it doesn't matter where it stands

Gradient = tuple[np.ndarray[Any, np.dtype[np.float32]], np.ndarray[Any, np.dtype[np.int64]]]
"""Values of shape ``(num_keys, WIDTH)``, and keys of shape ``(num_keys,)``."""


@final
@dataclass(frozen=True)
class _Case:
    """Someone's table: a call that makes the step of a batch, and the values now."""

    step: Callable[[int], object]
    table: Callable[[], np.ndarray[Any, Any]]


def run_sparse_adagrad(settings: Settings, report: Report) -> None:
    """Print the time of a step for each, and how many times longer PyTorch takes."""
    rows, batch = (100_000, 256) if settings.quick else (1_000_000, 4096)
    gradients = [_gradient(np.random.default_rng(seed), rows, FEATURES * batch) for seed in range(BATCHES)]
    has_torch = importlib.util.find_spec("torch") is not None
    with ExitStack() as stack:
        names = {"OneDevice": 1, "Mirrored": settings.ranks}
        cases = {}
        for name, replicas in names.items():
            strategy = stack.enter_context(closing(STRATEGIES[name](replicas)))
            cases[name] = _ours(strategy, gradients, rows)
        version = ""
        if has_torch:
            torch = import_module("torch")
            stack.callback(torch.set_num_threads, torch.get_num_threads())
            torch.set_num_threads(1)
            cases["torch"] = _torchs(torch, gradients, rows)
            version = f" {torch.__version__}"
        for number in range(BATCHES):
            for case in cases.values():
                case.step(number)
        wrong = {name: _num_wrong(case.table(), gradients) for name, case in cases.items()}
        calls = {name: call(_taking_turns(case.step)) for name, case in cases.items()}
        timings = by_turns(calls, settings.effort, report.working)
    different = [len(np.unique(keys)) for _, keys in gradients]
    report.line(
        f"# one step of sparse Adagrad, ms: a table of {rows} x {WIDTH} float32, {FEATURES} x {batch} keys, "
        f"{np.mean(different):.0f} of them different"
    )
    _report(report, timings, {**names, "torch": 1}, wrong, version)


def _report(
    report: Report, timings: dict[str, Timing], replicas: dict[str, int], wrong: dict[str, int], version: str
) -> None:
    theirs = timings.get("torch")
    cells: list[list[object]] = []
    for name, timing in timings.items():
        ratio = None if theirs is None else theirs.median / timing.median
        label = f"{name}{version}" if name == "torch" else name
        times = [t * 1e3 for t in (timing.minimum, timing.median, timing.p95)]
        cells.append([label, replicas[name], *times, "" if ratio is None else f"{ratio:.2f}", wrong[name]])
        report.record(
            "sparse_adagrad",
            {
                "who": name,
                "replicas": replicas[name],
                **timing.describe(),
                "torch_to_this": ratio,
                "wrong": wrong[name],
            },
        )
    report.table(["who", "replicas", "min", "p50", "p95", "torch / this", "wrong"], cells)
    if theirs is None:
        report.line("# PyTorch is not installed beside this Python: pip install 'xpdistribute[torch]'")


def _gradient(random: np.random.Generator, rows: int, num_keys: int) -> Gradient:
    weights = np.arange(1, rows + 1) ** -ZIPF_EXPONENT
    ranks = np.searchsorted(np.cumsum(weights / weights.sum()), random.random(num_keys))
    # Popular rows lie anywhere in the table.
    keys = np.minimum(ranks, rows - 1).astype(np.int64) * 7_919 % rows
    return random.standard_normal((num_keys, WIDTH), np.float32), keys


def _ours(strategy: Strategy, gradients: Sequence[Gradient], rows: int) -> _Case:
    replicas = strategy.num_replicas_in_sync
    with strategy.scope():
        table = Variable(np.zeros((rows, WIDTH), np.float32), name="table")
        optimizer = Adagrad(_RATE, _START, _EPSILON)
    shares = [
        list(zip(np.array_split(values, replicas), np.array_split(keys, replicas), strict=True))
        for values, keys in gradients
    ]

    def update(number: int) -> None:
        values, keys = shares[number][this_replica().replica_id_in_sync_group]
        optimizer.apply_gradients([(IndexedSlices(values, keys, (rows, WIDTH)), table)])

    return _Case(lambda number: strategy.run(update, (number,)), lambda: np.asarray(table))


def _torchs(torch: Any, gradients: Sequence[Gradient], rows: int) -> _Case:
    torch.sparse.check_sparse_tensor_invariants.disable()  # the default, but it warns unless asked for
    table = torch.zeros((rows, WIDTH), requires_grad=True)
    optimizer = torch.optim.Adagrad([table], lr=_RATE, initial_accumulator_value=_START, eps=_EPSILON)

    def step(number: int) -> None:
        values, keys = gradients[number]
        table.grad = torch.sparse_coo_tensor(
            torch.from_numpy(keys)[None], torch.from_numpy(values), (rows, WIDTH)
        )
        optimizer.step()

    return _Case(step, lambda: table.detach().numpy())


def _taking_turns(step: Callable[[int], object]) -> Callable[[], object]:
    number = 0

    def next_one() -> object:
        nonlocal number
        number = (number + 1) % BATCHES
        return step(number)

    return next_one


def _num_wrong(table: np.ndarray[Any, Any], gradients: Sequence[Gradient]) -> int:
    """How many numbers differ, after a step for each batch, from what plain NumPy gives in double precision."""
    expected = np.zeros(table.shape)
    accumulator = np.full(table.shape, _START)
    for values, keys in gradients:
        # Sorted, a row's gradients are next to one another.
        order = np.argsort(keys, kind="stable")
        rows, starts = np.unique(keys[order], return_index=True)
        total = np.add.reduceat(values[order].astype(np.float64), starts, axis=0)
        accumulator[rows] += total**2
        expected[rows] -= _RATE * total / (np.sqrt(accumulator[rows]) + _EPSILON)
    return int(np.count_nonzero(~np.isclose(table, expected, rtol=1e-3, atol=1e-5)))
