"""Scalars over the steps of a training, in memory or in a file: losses, accuracies, learning rates.

Logging is done outside of steps, by the chief process. A value that each replica has its own of needs the name of its
reduction, so that no replica's part passes for the whole.
"""

from __future__ import annotations

import csv
import io
import json
import logging
import math
import operator
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self, SupportsIndex, final

from collectives.whole_file import write_whole
from strategies.chief import speaks_for_all
from strategies.scalars import Reductions, Scalar, as_scalars, require_outside_steps

_log = logging.getLogger("xpdistribute")

Row = dict[str, Scalar]
"""Step, time (seconds since 1970) and the scalars by name."""

FORMATS = {"jsonl": (".jsonl", ".ndjson"), "csv": (".csv",), "tensorboard": ("",)}
"""The formats, and the suffixes of paths that choose them; TensorBoard's path is a folder."""
_OURS = ("step", "time")


class _Sink(Protocol):
    def write(self, row: Row) -> None:
        """Keep a row; it is in the file when this returns."""

    def close(self) -> None:
        """End."""


@final
class ScalarLogger:
    """Keeps scalars by step: a row for each call of `log`.

    A file that exists is appended to, so a resumed training goes on in it; what a killed process left of a line is removed
    first. Every row is handed to the system when `log` returns. Several threads may log. Only the chief process writes.

    Args:
        path: ``.jsonl`` (one JSON object a line), ``.csv``, or a folder for TensorBoard; None keeps the rows in memory only.
        format: ``"jsonl"``, ``"csv"`` or ``"tensorboard"``; None goes by the suffix.

    Raises:
        ValueError: an unknown format or suffix; a file that is not of that format.
        ModuleNotFoundError: TensorBoard's format without tensorboardX.
        OSError: the file can't be written.
    """

    def __init__(self, path: str | os.PathLike[str] | None = None, format: str | None = None) -> None:
        self.path = None if path is None else Path(path)
        self.rows: list[Row] = []
        """Where there is no path: all rows."""
        self._lock = threading.Lock()
        self._is_closed = False
        self._sink: _Sink | None = None
        if self.path is None:
            if format is not None:
                raise ValueError(f"ScalarLogger: got format={format!r} and no path; need a path to write to")
            return
        chosen = _format(self.path, format)
        if speaks_for_all():
            self.path.parent.mkdir(parents=True, exist_ok=True)
            makers: dict[str, Callable[[Path], _Sink]] = {
                "jsonl": _JsonLines,
                "csv": _Csv,
                "tensorboard": _TensorBoard,
            }
            self._sink = makers[chosen](self.path)

    def log(
        self,
        step: SupportsIndex,
        scalars: Mapping[str, Any] | None = None,
        *,
        reduce: Reductions = None,
        **named: Any,
    ) -> None:
        """Add a row.

        Args:
            step: which step the numbers are of; steps may come in any order.
            scalars: numbers by name, where names are no identifiers, such as ``"train/loss"``: numbers, arrays of one element,
                variables, metrics, or a `PerReplica` of these.
            reduce: how a `PerReplica` becomes one number: a `ReduceOp` or its name for all, or a mapping by name.
            named: more numbers.

        Raises:
            ValueError: a `PerReplica` without ``reduce``; an array of more than one element; a name given twice, or ``step`` or
                ``time``; no scalars; after `close`.
            TypeError: a step that is no integer; what is no number.
            ReplicaContextError: called in a step.
        """
        require_outside_steps("ScalarLogger.log")
        if self._is_closed:
            raise ValueError(
                "ScalarLogger.log: called after close(); make a new one, which appends to the file"
            )
        values = dict(scalars or {})
        for name in named:
            if name in values:
                raise ValueError(f"ScalarLogger.log: got {name!r} twice; need each name once")
        values |= named
        if not values:
            raise ValueError("ScalarLogger.log: got no scalars; need at least one — log(step, loss=...)")
        for name in values:
            if not name or name in _OURS:
                raise ValueError(
                    f"ScalarLogger.log: got the name {name!r}; need one other than {' and '.join(_OURS)}, which are ours"
                )
        try:
            number = operator.index(step)
        except TypeError:
            raise TypeError(f"ScalarLogger.log: got step={step!r}; need an integer") from None
        numbers = as_scalars(values, reduce, "ScalarLogger.log")
        row: Row = {"step": number, "time": time.time(), **numbers}
        with self._lock:
            if self.path is None:
                self.rows.append(row)
            elif self._sink is not None:
                self._sink.write(row)

    def close(self) -> None:
        """Close the file. The rows in memory stay."""
        with self._lock:
            self._is_closed = True
            if self._sink is not None:
                self._sink.close()
                self._sink = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


def _format(path: Path, format: str | None) -> str:
    if format is not None:
        if format not in FORMATS:
            raise ValueError(f"ScalarLogger: got format={format!r}; need one of {', '.join(FORMATS)}")
        return format
    if path.is_dir():
        return "tensorboard"
    for known, suffixes in FORMATS.items():
        if path.suffix.lower() in suffixes:
            return known
    raise ValueError(
        f"ScalarLogger: got the path {path}; need the suffix .jsonl or .csv, or a folder for TensorBoard — or say format="
    )


@final
class _JsonLines:
    """A JSON object a line. JSON has no NaN and no infinities: they are strings that ``float`` reads."""

    def __init__(self, path: Path) -> None:
        _drop_incomplete_line(path)
        # Unbuffered, and one write a row: appended as a whole, also beside another process.
        self._file = open(path, "ab", buffering=0)  # noqa: SIM115  # closed by close()

    def write(self, row: Row) -> None:
        portable = {
            name: value if not isinstance(value, float) or math.isfinite(value) else str(value)
            for name, value in row.items()
        }
        self._file.write(json.dumps(portable, ensure_ascii=False).encode() + b"\n")

    def close(self) -> None:
        self._file.close()


@final
class _Csv:
    """A column for each name. A name that comes up later gets a column too: the file is rewritten as a whole then."""

    def __init__(self, path: Path) -> None:
        self._path = path
        _drop_incomplete_line(path)
        self._columns: list[str] = []
        if path.exists() and path.stat().st_size:
            with open(path, newline="", encoding="utf-8") as file:
                self._columns = next(csv.reader(file))
            if self._columns[: len(_OURS)] != list(_OURS):
                raise ValueError(
                    f"ScalarLogger: {path} begins with {','.join(self._columns)[:80]!r}; need a file of ours, whose columns "
                    f"begin with {','.join(_OURS)} — choose another path"
                )
        self._file = open(path, "ab", buffering=0)  # noqa: SIM115  # closed by close()

    def write(self, row: Row) -> None:
        new = [name for name in row if name not in self._columns]
        if new:
            self._widen([*self._columns, *new])
        self._file.write(_csv_lines([[row.get(column, "") for column in self._columns]]))

    def close(self) -> None:
        self._file.close()

    def _widen(self, columns: list[str]) -> None:
        with open(self._path, newline="", encoding="utf-8") as file:
            old = list(csv.reader(file))[1:]
        padding = [""] * (len(columns) - len(self._columns))
        self._file.close()
        write_whole(self._path, _csv_lines([columns, *([*cells, *padding] for cells in old)]))
        self._columns = columns
        self._file = open(self._path, "ab", buffering=0)  # noqa: SIM115  # closed by close()


@final
class _TensorBoard:
    """Event files in a folder, which TensorBoard reads."""

    def __init__(self, path: Path) -> None:
        try:
            from tensorboardX import SummaryWriter  # noqa: PLC0415 - an extra
        except ModuleNotFoundError as error:
            raise ModuleNotFoundError(
                f"ScalarLogger: no module {error.name}; tensorboardX writes TensorBoard's files — pip install "
                "'xpdistribute[tensorboard]', or log to a .jsonl or .csv file"
            ) from error
        self._writer: Any = SummaryWriter(str(path))

    def write(self, row: Row) -> None:
        step, at = row["step"], row["time"]
        for name, value in row.items():
            if name not in _OURS:
                self._writer.add_scalar(name, value, step, walltime=at)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


def _csv_lines(rows: Sequence[Sequence[Any]]) -> bytes:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(rows)
    return text.getvalue().encode()


def _drop_incomplete_line(path: Path) -> None:
    """Cut off what a killed process left of its last line: half a number would pass for a whole one."""
    try:
        with open(path, "r+b") as file:
            size = file.seek(0, os.SEEK_END)
            length = 0
            tail = b""
            while length < size and b"\n" not in tail:
                length = min(size, max(4096, 2 * length))
                file.seek(size - length)
                tail = file.read()
            left = tail[tail.rfind(b"\n") + 1 :]
            if left:
                file.truncate(size - len(left))
                said = left[:80].decode(errors="replace")
                _log.warning("ScalarLogger: %s ended within a line; removed %r", path, said)
    except FileNotFoundError:
        return
