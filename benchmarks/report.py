"""Where a benchmark's answer goes: text on stdout, rows for JSON and the plot, progress on stderr."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO, final

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
)

Row = dict[str, Any]


@final
class Report:
    """Takes text line by line and results row by row, and knows how many of them were wrong.

    Args:
        about: the machine and versions; goes into the JSON as it is.
        out: where the text goes; stdout if not given.
    """

    def __init__(self, about: Mapping[str, Any], out: TextIO | None = None) -> None:
        self._about = dict(about)
        self._out = out
        self._progress: Progress | None = None
        self.rows: dict[str, list[Row]] = {}

    @property
    def num_wrong(self) -> int:
        """The elements and results that differed from NumPy's."""
        return sum(int(row.get("wrong", 0)) for rows in self.rows.values() for row in rows)

    def line(self, text: str = "") -> None:
        """Print a line of text."""
        print(text, file=self._out or sys.stdout, flush=True)

    def table(self, titles: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
        """Print columns: words to the left, numbers to the right."""
        cells = [list(titles), *([_cell(value) for value in row] for row in rows)]
        widths = [max(len(row[column]) for row in cells) for column in range(len(titles))]
        words = [all(isinstance(row[column], str) for row in rows) for column in range(len(titles))]
        for row in cells:
            aligned = zip(row, widths, words, strict=True)
            self.line("  ".join(c.ljust(w) if word else c.rjust(w) for c, w, word in aligned).rstrip())

    def record(self, benchmark: str, row: Row) -> None:
        """Keep a result. ``row["wrong"]`` counts what differed from NumPy."""
        self.rows.setdefault(benchmark, []).append(row)

    def working(self, on: str) -> None:
        """Show what is being measured now."""
        if self._progress is not None:
            task = self._progress.tasks[0]
            self._progress.update(task.id, detail=on)
            self._progress.refresh()

    @contextmanager
    def progress(self, benchmarks: Sequence[str]) -> Iterator[Iterator[str]]:
        """Show a bar on stderr, if that is a terminal, while the benchmarks given are iterated over."""
        console = Console(stderr=True)
        if not console.is_terminal:
            yield iter(benchmarks)
            return
        self._progress = Progress(
            SpinnerColumn(),
            TextColumn("[bold]{task.description}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[detail]}"),
            console=console,
            transient=True,
            # A thread that redraws would take the interpreter's lock away from what is timed.
            auto_refresh=False,
            # stdout keeps its text, wherever it leads, unless both are one terminal.
            redirect_stdout=sys.stdout.isatty(),
        )
        with self._progress as bar:
            task = bar.add_task("", total=len(benchmarks), detail="")

            def each() -> Iterator[str]:
                for benchmark in benchmarks:
                    bar.update(task, description=benchmark, detail="")
                    bar.refresh()
                    yield benchmark
                    bar.advance(task)

            yield each()
        self._progress = None

    def write_json(self, path: Path, arguments: Mapping[str, Any]) -> None:
        """Write everything recorded; the file appears whole or not at all."""
        content = {
            "format": 1,
            "header": self._about,
            "arguments": dict(arguments),
            "results": self.rows,
            "wrong": self.num_wrong,
        }
        partial = path.with_name(f"{path.name}.partial")
        partial.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
        os.replace(partial, path)


def _cell(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.3g}" if abs(value) < 1 else f"{value:.4g}"
    return str(value)
