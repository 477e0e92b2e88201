"""What does it cost to train a PyTorch module under a strategy? One step, against the same module in plain PyTorch.

The network of ``examples/torch_cnn.py`` on made-up images of 8 x 8, 64 a replica: forward, backward, and SGD with
Nesterov momentum, ours or PyTorch's. It needs PyTorch, and is left out where that is not installed.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from contextlib import ExitStack, closing
from importlib import import_module
from typing import Any

import numpy as np

from benchmarks.harness import by_turns, call
from benchmarks.report import Report
from benchmarks.setups import STRATEGIES, Settings
from strategies import SGD, ReplicatedModule, Strategy

REPLICA_BATCH = 64
LEARNING_RATE = 0.05
STEPS_CHECKED = 3


def run_torch_step(settings: Settings, report: Report) -> None:
    """Print the time of a step under strategies and alone, and the ratios."""
    if importlib.util.find_spec("torch") is None:
        report.line(
            "# left out: PyTorch is not installed beside this Python; pip install 'xpdistribute[torch]'"
        )
        return
    torch = import_module("torch")
    threads = torch.get_num_threads()
    with ExitStack() as stack:
        stack.callback(torch.set_num_threads, threads)
        alone, alone_losses = _alone(torch, REPLICA_BATCH)
        cases, wrong = {"alone": call(alone)}, {}
        for name, replicas in (("OneDevice", 1), ("Mirrored", settings.ranks)):
            strategy = stack.enter_context(closing(STRATEGIES[name](replicas)))
            step, losses = _replicated(torch, strategy)
            expected = alone_losses if replicas == 1 else _alone(torch, replicas * REPLICA_BATCH)[1]
            wrong[name] = int(np.count_nonzero(~np.isclose(losses, expected, rtol=1e-4)))
            cases[name] = call(step)
        timings = by_turns(cases, settings.effort, report.working)
    rows: list[list[object]] = []
    for name, replicas in (("alone", 1), ("OneDevice", 1), ("Mirrored", settings.ranks)):
        timing = timings[name]
        ratio = timing.median / timings["alone"].median
        rows.append(
            [name, replicas, *(t * 1e6 for t in (timing.minimum, timing.median, timing.p95)), f"{ratio:.3f}"]
        )
        report.record(
            "torch_step",
            {
                "strategy": name,
                "replicas": replicas,
                **timing.describe(),
                "ratio_to_alone": ratio,
                "wrong": wrong.get(name, 0),
            },
        )
    report.line(
        f"# one step of a CNN in torch {torch.__version__}, {threads} thread(s), {REPLICA_BATCH} examples a replica, us"
    )
    report.table(["who", "replicas", "min", "p50", "p95", "to alone"], rows)


def _net_and_batch(torch: Any, examples: int) -> tuple[Any, Any, Any]:
    """Always the same ones."""
    nn = torch.nn
    torch.manual_seed(1)
    net = nn.Sequential(
        nn.Conv2d(1, 16, kernel_size=3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 32, kernel_size=3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(128, 64),
        nn.ReLU(),
        nn.Linear(64, 10),
    )
    random = np.random.default_rng(1)
    images = torch.from_numpy(random.random((examples, 1, 8, 8), np.float32))
    return net, images, torch.from_numpy(random.integers(0, 10, examples))


def _alone(torch: Any, examples: int) -> tuple[Callable[[], object], list[float]]:
    """A call that makes a step in plain PyTorch, and the losses of the first steps."""
    net, images, labels = _net_and_batch(torch, examples)
    optimizer = torch.optim.SGD(net.parameters(), LEARNING_RATE, momentum=0.9, nesterov=True)
    cross_entropy = torch.nn.functional.cross_entropy

    def step() -> Any:
        optimizer.zero_grad()
        loss = cross_entropy(net(images), labels, reduction="sum") / examples
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step, [float(step()) for _ in range(STEPS_CHECKED)]


def _replicated(torch: Any, strategy: Strategy) -> tuple[Callable[[], object], list[float]]:
    """The same under a strategy."""
    replicas = strategy.num_replicas_in_sync
    examples = replicas * REPLICA_BATCH
    net, images, labels = _net_and_batch(torch, examples)
    with strategy.scope():
        optimizer = SGD(LEARNING_RATE, momentum=0.9, nesterov=True)
        model = ReplicatedModule(net, optimizer)
    cross_entropy = torch.nn.functional.cross_entropy

    def share(tensor: Any) -> Any:
        parts = tensor.split(REPLICA_BATCH)
        return strategy.distribute_values_from_function(lambda of: parts[of.replica_id_in_sync_group])

    def update(images: Any, labels: Any) -> Any:
        model.zero_grad()
        loss = cross_entropy(model(images), labels, reduction="sum") / examples
        loss.backward()
        optimizer.apply_gradients(model.gradients())
        return loss.detach()

    batch = (share(images), share(labels))

    def step() -> Any:
        return strategy.run(update, args=batch)

    return step, [float(strategy.reduce("SUM", step())) for _ in range(STEPS_CHECKED)]
