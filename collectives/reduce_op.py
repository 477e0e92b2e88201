"""The reductions that every communicator offers, and the dtypes their results have."""

from __future__ import annotations

from enum import Enum
from functools import lru_cache
from typing import Any, TypeVar

import numpy as np

from collectives.arrays import is_narrow_float, require_numbers

E = TypeVar("E", bound=Enum)


class ReduceOp(Enum):
    """How the ranks' arrays become one."""

    SUM = "sum"
    MEAN = "mean"
    MAX = "max"
    MIN = "min"
    PROD = "prod"

    # Enum hashes the name, in Python; as keys of the caches below, members are told apart by identity.
    __hash__ = object.__hash__

    @classmethod
    def parse(cls, op: ReduceOp | str) -> ReduceOp:
        """The member, or the member of that name in any case.

        Raises:
            ValueError: no such reduction.
        """
        return op if type(op) is cls else parse_member(cls, op, "reduce_op")

    @property
    def ufunc(self) -> np.ufunc:
        """The NumPy function that folds two arrays; for MEAN the sum, to be divided afterwards."""
        return _UFUNCS[self]

    @lru_cache(maxsize=256)  # members live for ever
    def accumulator_dtype(self, dtype: np.dtype[Any]) -> np.dtype[Any]:
        """What the fold is computed in: wide enough that what fits the result does not overflow on the way."""
        if self in (ReduceOp.MAX, ReduceOp.MIN):
            return dtype
        if is_narrow_float(dtype):
            return np.dtype(np.float32)
        if dtype.kind in "biu":
            if self is ReduceOp.MEAN:
                return np.dtype(np.float64)
            if dtype.itemsize <= 2:
                return np.dtype(np.uint64 if dtype.kind == "u" else np.int64)
        return dtype

    @lru_cache(maxsize=256)  # members live for ever
    def result_dtype(self, dtype: np.dtype[Any]) -> np.dtype[Any]:
        """What a reduction of this dtype gives.

        Floats and complex numbers keep their dtype, and so do 32- and 64-bit integers; narrower ones and
        booleans come back from SUM and PROD as int64 or uint64, as from ``numpy.sum``; MEAN of integers is
        float64, as from ``numpy.mean``.
        """
        return dtype if is_narrow_float(dtype) else self.accumulator_dtype(dtype)

    @lru_cache(maxsize=256)  # members live for ever
    def require(self, dtype: np.dtype[Any], where: str) -> None:
        """Refuse what this reduction has no meaning for.

        Raises:
            TypeError: not numbers, or MAX and MIN of complex numbers.
        """
        require_numbers(dtype, where)
        if dtype.kind == "c" and self in (ReduceOp.MAX, ReduceOp.MIN):
            raise TypeError(
                f"{where}: got {dtype}, and {self.name} needs an order, which complex numbers lack"
            )


_UFUNCS: dict[ReduceOp, np.ufunc] = {
    ReduceOp.SUM: np.add,
    ReduceOp.MEAN: np.add,
    ReduceOp.MAX: np.maximum,
    ReduceOp.MIN: np.minimum,
    ReduceOp.PROD: np.multiply,
}


def parse_member(enum: type[E], member: E | str, name: str) -> E:
    """The member of an enum, given itself or its name in any case.

    Raises:
        ValueError: there is none of that name.
    """
    if type(member) is enum:
        return member
    if isinstance(member, str):
        found = enum._member_map_.get(member.upper())
        if isinstance(found, enum):
            return found
    raise ValueError(f"{name}: got {member!r}; need one of {', '.join(enum.__members__)}")
