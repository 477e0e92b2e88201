"""The numbers that optimizers and schedules are made with: checked where they are given, not where the first step fails."""

from __future__ import annotations

from typing import SupportsFloat

import numpy as np


def require_real(where: str, also: str = "", /, **numbers: object) -> None:
    """Check that hyperparameters are numbers, before they are compared with anything.

    Args:
        where: what they are for; "" if their names tell.
        also: what else would do, for the error message.
        numbers: by the names that the caller knows them by.

    Raises:
        TypeError: one is text, None, complex, an array of several numbers or the like.
    """
    for name, value in numbers.items():
        if not is_real(value):
            hint = " — leave it out for the default" if value is None else ""
            hint = " — convert it by float()" if isinstance(value, str) else hint
            got = f"{where}: got {name}={value!r}" if where else f"{name}: got {value!r}"
            raise TypeError(f"{got}, which is {type(value).__name__}; need a real number{also}{hint}")


def is_real(value: object) -> bool:
    """Whether NumPy multiplies by it as by a number: Python's or NumPy's, or an array without axes, but none that is complex."""
    if isinstance(value, (int, float, np.integer, np.floating)):
        return True
    if not isinstance(value, (np.generic, np.ndarray)) or value.ndim:
        return False
    return value.dtype.kind in "biuf" or (value.dtype.kind == "V" and isinstance(value, SupportsFloat))
