"""A progress bar that is shown once."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeVar, final

from strategies.chief import speaks_for_all
from strategies.scalars import Reductions, as_scalars, require_outside_steps

if TYPE_CHECKING:
    from rich.console import Console

T = TypeVar("T")


@final
class Progress:
    """A bar with steps a second and the numbers of the last step, on the chief process only.

    Where the output is no terminal, one line at the end says the same.

    Args:
        total: how many steps there will be; None where that is not known.
        description: stands before the bar.
        console: where to; None takes the terminal.

    Raises:
        ValueError: a negative total.
    """

    def __init__(
        self, total: int | None = None, description: str = "", *, console: Console | None = None
    ) -> None:
        if total is not None and total < 0:
            raise ValueError(f"Progress: got total={total}; need a number of steps, or None")
        from rich import progress  # noqa: PLC0415 - only where something is shown
        from rich.console import Console  # noqa: PLC0415

        is_shown = speaks_for_all()
        self.completed = 0
        self._console = console or Console(highlight=False)
        self._is_quiet = not is_shown
        self._description = description
        self._numbers = ""
        self._started = time.perf_counter()
        self._bar = progress.Progress(
            progress.TextColumn("{task.description}"),
            progress.BarColumn(bar_width=None),
            progress.MofNCompleteColumn(),
            progress.TextColumn("{task.fields[numbers]}"),
            progress.TimeRemainingColumn(),
            console=self._console,
            expand=True,
            disable=not (is_shown and self._console.is_terminal),
        )
        self._task = self._bar.add_task(description, total=total, numbers="")

    def advance(self, steps: int = 1, *, reduce: Reductions = None, **scalars: Any) -> None:
        """Some steps further.

        Args:
            steps: how many.
            reduce: how a `PerReplica` among the scalars becomes one number, for all or by name.
            scalars: numbers to show beside the bar.

        Raises:
            ValueError: a `PerReplica` without a reduction.
            ReplicaContextError: called in a step.
        """
        require_outside_steps("Progress.advance")
        self.completed += steps
        if scalars:
            numbers = as_scalars(scalars, reduce, "Progress.advance")
            self._numbers = "  ".join(f"{name} {number:.4g}" for name, number in numbers.items())
        self._bar.update(self._task, advance=steps, numbers=f"{self._numbers}  {self.rate:.3g} steps/s")

    @property
    def rate(self) -> float:
        """Steps a second, so far."""
        return self.completed / max(time.perf_counter() - self._started, 1e-9)

    def over(self, steps: Iterable[T]) -> Iterator[T]:
        """The same items, one step for each."""
        for step in steps:
            yield step
            self.advance()

    def __enter__(self) -> Self:
        self._started = time.perf_counter()
        self._bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._bar.stop()
        if not self._is_quiet and not self._console.is_terminal:
            words = [self._description, f"{self.completed} steps", self._numbers, f"{self.rate:.3g} steps/s"]
            self._console.print("  ".join(word for word in words if word), soft_wrap=True)
