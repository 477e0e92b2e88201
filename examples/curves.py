"""What a training run leaves behind: its numbers, and a picture of them."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path


@dataclass
class History:
    """The numbers of a training run, in the order in which they came."""

    losses: list[float] = field(default_factory=list)  # mean over each global batch, one a step
    train_accuracies: list[float] = field(default_factory=list)  # fractions, one an epoch
    test_accuracies: list[float] = field(default_factory=list)  # fractions, one an epoch
    num_examples: int = 0  # trained on, over all epochs
    seconds: float = 0.0  # spent on it, evaluation left out

    @property
    def examples_per_second(self) -> float:
        """Examples trained on in a second, 0 before the first step."""
        return self.num_examples / self.seconds if self.seconds else 0.0


def save_plot(history: History, path: Path, title: str) -> None:
    """Draw loss and accuracy over the epochs and save them as a PNG, complete or not at all.

    Args:
        history: of at least one whole epoch.
        path: of the file; what stood there is replaced.
        title: the final accuracy is added to it.
    """
    # With the figure class itself no window system is asked for and no global state is left behind.
    from matplotlib.figure import Figure  # noqa: PLC0415 - of the extra `demo`; training works without

    num_epochs = len(history.test_accuracies)
    epochs = range(1, num_epochs + 1)
    steps_per_epoch = len(history.losses) // num_epochs
    epoch_losses = [
        sum(history.losses[end - steps_per_epoch : end]) / steps_per_epoch
        for end in range(steps_per_epoch, len(history.losses) + 1, steps_per_epoch)
    ]

    figure = Figure(figsize=(11, 4.6), dpi=140)
    figure.set_layout_engine("constrained", w_pad=0.12, h_pad=0.1)
    figure.suptitle(f"{title}: test accuracy {history.test_accuracies[-1]:.1%}", fontsize=14)
    loss_axes, accuracy_axes = figure.subplots(1, 2)

    steps = [step / steps_per_epoch for step in range(1, len(history.losses) + 1)]
    loss_axes.plot(steps, history.losses, color="tab:blue", alpha=0.3, linewidth=1, label="each global batch")
    middles = [epoch - 0.5 for epoch in epochs]
    loss_axes.plot(middles, epoch_losses, "o-", color="tab:blue", markersize=4, label="mean of an epoch")
    loss_axes.set(title="Training loss", xlabel="epoch", ylabel="cross-entropy (nats)", yscale="log")

    for accuracies, color, label in (
        (history.train_accuracies, "tab:blue", "training set, while learning"),
        (history.test_accuracies, "tab:orange", "test set, after the epoch"),
    ):
        percent = [100 * accuracy for accuracy in accuracies]
        accuracy_axes.plot(epochs, percent, "o-", color=color, markersize=4, label=label)
    accuracy_axes.set(title="Accuracy", xlabel="epoch", ylabel="right answers (%)")

    for axes in (loss_axes, accuracy_axes):
        axes.set_xlim(0, num_epochs * 1.02)
        axes.locator_params(axis="x", integer=True)
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False)

    # A reader of the file sees the old picture or the new one, never half of one.
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        figure.savefig(partial, format="png")
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)
