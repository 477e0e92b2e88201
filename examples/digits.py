"""Learns to read handwritten digits, on as many replicas as you like.

Run ``python -m examples.digits``, or ``xpdistribute run -n 2 -m examples.digits --strategy multi_worker`` for two
processes; ``--help`` lists what can be changed. The network (`examples.mlp`) is plain NumPy. What makes a program for any strategy of it stands in `train`: variables made in the
strategy's scope, a step that sees one replica's share of a batch, and a loop.

The number of replicas does not change the result: from the same seed and global batch, every strategy
follows the same loss curve, up to rounding. Nor does it bring speed to a network as small as this one,
where handing out the work takes longer than doing it.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, final

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from examples import mlp
from examples.curves import History, save_plot
from examples.digits_flags import parse
from strategies import (
    SGD,
    Adam,
    CentralStorageStrategy,
    Checkpoint,
    CheckpointError,
    CheckpointManager,
    MirroredStrategy,
    MultiWorkerMirroredStrategy,
    OneDeviceStrategy,
    Strategy,
    all_reduce,
    compute_average_loss,
    from_arrays,
    load_checkpoint,
)
from variables import Variable

HIDDEN_WIDTHS = (128, 64)
LEARNING_RATES = {"adam": 0.002, "sgd": 0.1}


class Digits(NamedTuple):
    """Images of shape ``(examples, 64)``, ink from 0 to 1, and labels from 0 to 9."""

    train_images: mlp.Floats
    train_labels: mlp.Labels
    test_images: mlp.Floats
    test_labels: mlp.Labels


def load(dtype: str = "float64") -> Digits:
    """The 1,797 digits that come with scikit-learn, always split alike: 1,437 to learn from, 360 to test."""
    from sklearn.datasets import load_digits  # noqa: PLC0415 - in the extra `demo`; `train` needs none

    images, labels = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(images))
    images, labels = (images[order] / 16).astype(dtype), labels[order].astype(np.int64)
    return Digits(images[360:], labels[360:], images[:360], labels[:360])


@final
class Accuracy:
    """The fraction of right answers: each replica counts its own, reading adds them up."""

    def __init__(self) -> None:
        self._right = Variable(np.zeros((), np.int64), synchronization="ON_READ", aggregation="SUM")
        self._seen = Variable(np.zeros((), np.int64), synchronization="ON_READ", aggregation="SUM")

    def update(self, logits: mlp.Floats, labels: mlp.Labels) -> None:
        """Count the answers to one replica's examples; call it in a step."""
        self._right.assign_add(np.sum(logits.argmax(axis=1) == labels))
        self._seen.assign_add(len(labels))

    def pop(self) -> tuple[float, int]:
        """The fraction, and of how many examples, over all replicas since the last `pop`; not for steps."""
        right, seen = int(self._right), int(self._seen)
        self._right.assign(0)
        self._seen.assign(0)
        return right / seen, seen


def train(
    strategy: Strategy,
    digits: Digits,
    *,
    epochs: int = 30,
    batch_size: int = 64,
    optimizer: str = "adam",
    learning_rate: float | None = None,
    seed: int = 0,
    report: Callable[[History], object] = lambda _: None,
    checkpoints: Path | None = None,
    resume: bool = False,
) -> History:
    """Train a network on a strategy and test it after each epoch.

    Args:
        strategy: runs the steps.
        digits: what to learn; the network computes in the type of the images.
        epochs: passes over the training set.
        batch_size: examples in a global batch, which the replicas share.
        optimizer: ``"adam"``, or ``"sgd"`` with Nesterov momentum.
        learning_rate: of the optimizer; None takes the one in `LEARNING_RATES`.
        seed: of the first weights and of the order of the examples.
        report: called with the history so far, after each step and each test.
        checkpoints: a folder to save to after each epoch: the last three stay, and the most accurate one.
        resume: go on from the latest of them, if there is one, with any strategy and number of replicas. The same
            numbers come as if there had been no interruption.

    Returns:
        The whole history, from the first step on.

    Raises:
        FloatingPointError: the loss is infinite or not a number.
        CheckpointError: the latest checkpoint is damaged, or of another network or other settings.
    """
    rate = LEARNING_RATES[optimizer] if learning_rate is None else learning_rate
    widths = (digits.train_images.shape[1], *HIDDEN_WIDTHS, 10)
    weights = mlp.initial_parameters(widths, np.random.default_rng(seed), digits.train_images.dtype)
    with strategy.scope():
        parameters = [Variable(weight) for weight in weights]
        rule = Adam(rate) if optimizer == "adam" else SGD(rate, momentum=0.9, nesterov=True)
        train_accuracy, test_accuracy = Accuracy(), Accuracy()

    def train_step(images: mlp.Floats, labels: mlp.Labels) -> Any:
        # The last batch of an epoch is short, and a replica's share of it may be empty. Divided by the
        # size of the whole, and then summed over replicas, every example weighs the same all the same.
        global_batch_size = int(all_reduce("SUM", len(labels)))
        logits, inputs = mlp.forward(parameters, images)
        losses, derivatives = mlp.cross_entropy(logits, labels)
        gradients = mlp.backward(parameters, inputs, derivatives / global_batch_size)
        rule.apply_gradients(zip(gradients, parameters, strict=True))
        train_accuracy.update(logits, labels)
        return compute_average_loss(losses, global_batch_size=global_batch_size)

    def test_step(images: mlp.Floats, labels: mlp.Labels) -> None:
        logits, _ = mlp.forward(parameters, images)
        test_accuracy.update(logits, labels)

    train_set = from_arrays((digits.train_images, digits.train_labels)).shuffle(seed=seed).batch(batch_size)
    test_set = from_arrays((digits.test_images, digits.test_labels)).batch(256)
    train_batches = strategy.distribute_dataset(train_set)
    test_batches = strategy.distribute_dataset(test_set)
    history = History()
    settings = {"optimizer": optimizer, "batch_size": batch_size, "seed": seed}
    batches = iter(train_batches)
    checkpoint = Checkpoint(
        settings=settings, parameters=parameters, optimizer=rule, batches=batches, history=vars(history)
    )
    manager = None if checkpoints is None else CheckpointManager(checkpoint, checkpoints, 3, best="max")
    if manager is not None and resume:
        go_on(manager, settings)
    while len(history.test_accuracies) < epochs:
        started = time.perf_counter()
        for batch in batches:
            losses = strategy.run(train_step, args=batch)
            history.losses.append(float(strategy.reduce("SUM", losses)))
            if not math.isfinite(history.losses[-1]):
                raise FloatingPointError(
                    f"train: the loss of step {len(history.losses)} is {history.losses[-1]} at learning rate "
                    f"{rate:g}; a finite loss is needed — lower the learning rate"
                )
            report(history)
        history.seconds += time.perf_counter() - started
        accuracy, num_examples = train_accuracy.pop()
        history.train_accuracies.append(accuracy)
        history.num_examples += num_examples
        for batch in test_batches:
            strategy.run(test_step, args=batch)
        history.test_accuracies.append(test_accuracy.pop()[0])
        report(history)
        checkpoint.batches = batches = iter(train_batches)
        if manager is not None:
            # Written while the next epoch is under way.
            manager.save(len(history.test_accuracies), metric=history.test_accuracies[-1], blocking=False)
    checkpoint.wait()
    return history


def go_on(manager: CheckpointManager, settings: dict[str, Any]) -> None:
    """Restore the latest checkpoint, if there is one.

    Args:
        manager: of the folder.
        settings: of this run; the checkpoint's must be the same.
    """
    latest = manager.latest_checkpoint
    if latest is None:
        return
    saved = load_checkpoint(latest).get("settings")
    if saved != settings:
        raise CheckpointError(
            f"resume: {latest} is of a run with {saved}, this one has {settings}; the same are needed"
        )
    manager.checkpoint.restore(latest).assert_consumed()


def make_strategy(name: str, num_replicas: int) -> Strategy:
    """The strategy by its name: the only place where programs for one replica and for many differ.

    Args:
        name: as on the command line.
        num_replicas: of it; of each process, if there are several.
    """
    devices = [f"cpu:{index}" for index in range(num_replicas)]
    match name:
        case "one_device":
            return OneDeviceStrategy(devices[0])
        case "central_storage":
            return CentralStorageStrategy(compute_devices=devices, parameter_device="cpu:0")
        case "multi_worker":
            return MultiWorkerMirroredStrategy(devices=devices)
        case _:
            return MirroredStrategy(devices)


def main(arguments: Sequence[str] | None = None) -> None:
    """Train as the command line says, show how it goes, and leave a plot."""
    options = parse(arguments)
    try:
        import matplotlib.figure  # noqa: F401, PLC0415 - asked for now, not missed after the training

        digits = load(options.dtype)
    except ModuleNotFoundError as missing:
        sys.exit(
            f"digits: no module {missing.name}; scikit-learn (the data) and matplotlib (the plot) are needed"
            " — pip install 'xpdistribute[demo]'"
        )

    strategy = make_strategy(options.strategy, options.replicas)
    # Every process trains, and comes to the same figures; the chief shows them.
    console = Console(highlight=False, quiet=options.quiet or not strategy.is_chief)
    steps_per_epoch = math.ceil(len(digits.train_labels) / options.batch_size)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(bar_width=None),
        TextColumn("{task.fields[numbers]}"),
    )
    with strategy, Progress(*columns, console=console, expand=True) as progress:
        console.print(f"{len(digits.train_labels):,} digits to learn from, {strategy}")
        bar = progress.add_task("", total=options.epochs * steps_per_epoch, numbers="")

        def show(history: History) -> None:
            epoch = math.ceil(len(history.losses) / steps_per_epoch)
            numbers = f"loss {history.losses[-1]:.4g}"
            if history.test_accuracies:
                numbers += f", accuracy {history.test_accuracies[-1]:.1%}, {history.examples_per_second:,.0f} examples/s"
            progress.update(
                bar,
                completed=len(history.losses),
                description=f"epoch {epoch}/{options.epochs}",
                numbers=numbers,
            )

        try:
            history = train(
                strategy,
                digits,
                epochs=options.epochs,
                batch_size=options.batch_size,
                optimizer=options.optimizer,
                learning_rate=options.learning_rate,
                seed=options.seed,
                report=show,
                checkpoints=options.checkpoint_dir,
                resume=options.resume,
            )
        except (FloatingPointError, CheckpointError, OSError) as error:
            sys.exit(f"digits: {error}")
        except KeyboardInterrupt:
            hint = "" if options.checkpoint_dir is None else " — go on with --resume"
            sys.exit(f"digits: stopped by Ctrl-C; curves are saved after the last epoch only{hint}")

    if not strategy.is_chief:
        return
    count = strategy.num_replicas_in_sync
    replicas = "1 replica" if count == 1 else f"{count} replicas"
    save_plot(history, options.plot, f"Handwritten digits, {options.strategy}, {replicas}")
    print(
        f"test accuracy {history.test_accuracies[-1]:.1%}, "
        f"{history.examples_per_second:,.0f} examples/s, curves in {options.plot}"
    )


if __name__ == "__main__":
    main()
