"""Printing once, and not once for each replica."""

from __future__ import annotations

import sys
from typing import Any

from strategies.chief import rank, speaks_for_all


def print(
    *values: Any,
    sep: str = " ",
    end: str = "\n",
    file: Any = None,
    flush: bool = False,
    all_ranks: bool = False,
) -> None:
    """The built-in ``print``, in one place only: in a step replica 0 prints, outside of one the chief process.

    A call is written in one piece, so that lines of several replicas don't mix.

    Args:
        values: as of the built-in; a `PerReplica` shows all of its components.
        sep: likewise.
        end: likewise.
        file: likewise; None takes ``sys.stdout``.
        flush: likewise.
        all_ranks: print on every replica, with its number before each line: ``[rank 1] ...``.
    """
    if not all_ranks and not speaks_for_all():
        return
    text = sep.join(map(str, values))
    if all_ranks:
        prefix = f"[rank {rank()}] "
        text = prefix + text.replace("\n", f"\n{prefix}")
    out = sys.stdout if file is None else file
    if out is None:  # as pythonw.exe has it
        return
    out.write(text + end)
    if flush:
        out.flush()
