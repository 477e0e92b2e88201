"""NumPy and CuPy arrays behind one name."""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

# CuPy arrays have NumPy's interface, and CuPy may not be installed: one static type stands for both.
Array: TypeAlias = npt.NDArray[Any]

ALIGNMENT = 64
"""Bytes. A cache line, a full AVX-512 register, and what JAX needs to take an array without a copy."""


def describe(array: Array) -> str:
    """Dtype and shape for an error message, as in ``float32 of shape (4, 3)``."""
    return describe_kind(array.dtype, array.shape)


def describe_kind(dtype: np.dtype[Any], shape: tuple[int, ...]) -> str:
    """As `describe`, where there is no array yet."""
    return f"{dtype} of shape {shape}"


def is_host(array: object) -> bool:
    """Whether the array lies in host memory."""
    return isinstance(array, np.ndarray)


def is_scalar(value: object) -> bool:
    """Whether this is a number outside an array: a Python one or NumPy's."""
    return isinstance(value, (bool, int, float, complex, np.generic))


def as_array(value: Any, where: str = "as_array") -> Array:
    """The value as an array: itself if it is one already, so nothing is copied.

    Args:
        value: an array, a number, nested lists of numbers, a variable, or anything else with ``__array__``.
        where: the caller's name, for the error message.

    Raises:
        TypeError: it does not hold numbers.
    """
    if type(value) is np.ndarray or isinstance(value, np.ndarray) or type(value).__module__.partition(".")[0] == "cupy":
        return value  # type: ignore[no-any-return]  # a CuPy array, see Array
    try:
        array = np.asarray(value)
    except ValueError as error:
        raise TypeError(
            f"{where}: got {type(value).__name__}, which is no array ({error}); need an array or a number"
        ) from error
    require_numbers(array.dtype, where, type(value).__name__)
    return array


def require_numbers(dtype: np.dtype[Any], where: str, kind: str = "array") -> None:
    """Refuse what cannot be added up.

    Raises:
        TypeError: objects, strings, dates, records.
    """
    if dtype.kind in "biufc" or is_narrow_float(dtype):
        return
    raise TypeError(
        f"{where}: got {kind} of dtype {dtype}; need booleans, integers, floats or complex numbers"
        + (" — pass the fields one by one" if dtype.names else "")
    )


def is_narrow_float(dtype: np.dtype[Any]) -> bool:
    """Whether this is float16 or bfloat16, which accumulate in float32."""
    # bfloat16 comes from ml_dtypes, where NumPy only knows it as some bytes with a name.
    return (dtype.kind == "f" and dtype.itemsize == 2) or (dtype.kind == "V" and dtype.name == "bfloat16")
