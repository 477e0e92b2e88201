"""What a member of a group calls, in a form that can be compared, counted and put into words."""

from __future__ import annotations

import math
from enum import Enum
from types import CodeType
from typing import Any, NamedTuple

import numpy as np

from collectives.arrays import describe_kind


class Call(NamedTuple):
    """What a member calls. Members meet only if their calls are equal."""

    kind: str
    """The collective, such as ``all_reduce``."""
    detail: tuple[Any, ...] = ()
    """What must agree: a reduction, a root, pairs of dtype and shape. Put into words only when it does not."""
    name: str | None = None
    """What the user calls it."""

    def __str__(self) -> str:
        named = f" {self.name!r}" if self.name is not None else ""
        return " ".join([f"{self.kind}{named}", *self.words])

    @property
    def words(self) -> list[str]:
        """The detail, each part as a person reads it."""
        return [word for word in map(_word, self.detail) if word]

    @property
    def arrays(self) -> list[tuple[np.dtype[Any], tuple[int, ...]]]:
        """Dtype and shape of each array in it; a length that differs between members is -1."""
        return [part for part in self.detail if isinstance(part, tuple)]

    @property
    def num_bytes(self) -> int | None:
        """What a member's arrays take up; None where lengths differ or there are no arrays."""
        arrays = self.arrays
        if not arrays or any(length < 0 for _, shape in arrays for length in shape):
            return None
        return sum(math.prod(shape) * dtype.itemsize for dtype, shape in arrays)

    @property
    def is_continuation(self) -> bool:
        """Whether it is another meeting of the call before it, such as the last one, when all have done their part."""
        return self.kind.startswith("the ")


def _word(part: Any) -> str:
    if isinstance(part, Enum):
        return part.name
    if isinstance(part, tuple):
        return describe_kind(*part)
    if isinstance(part, CodeType):
        return f"of {part.co_qualname} (line {part.co_firstlineno} of {part.co_filename})"
    return str(part)
