"""What the command line chose for the benchmarks between processes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import final

from benchmarks.harness import Effort


@final
@dataclass(frozen=True)
class ProcessOptions:
    """Who is measured, and which sizes.

    Args:
        backends: ours, of `BACKENDS`.
        rivals: the interpreter to run each with, by name.
        min_bytes: the smallest array of a sweep over sizes.
        max_bytes: the largest.
    """

    backends: Sequence[str]
    rivals: Mapping[str, str]
    min_bytes: int
    max_bytes: int

    def effort(self, *, quick: bool) -> Effort:
        """How long to measure a case: in many rounds, as a machine's load comes and goes."""
        if quick:
            return Effort(rounds=2, iterations=4, most_iterations=200, seconds=0.02, warm_up=2)
        return Effort(rounds=9, iterations=27, most_iterations=4000, seconds=1.0, warm_up=3)
