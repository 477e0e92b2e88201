"""NumPy and CuPy arrays behind one name."""

from __future__ import annotations

from importlib import import_module
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from collectives.array_libraries import library_of

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


def is_cupy(value: object) -> bool:
    """Whether this is a CuPy array or number; asking does not import CuPy."""
    return type(value).__module__.partition(".")[0] == "cupy"


def is_scalar(value: object) -> bool:
    """Whether this is a number outside an array: a Python one or NumPy's."""
    return isinstance(value, (bool, int, float, complex, np.generic))


def as_array(value: Any, where: str = "as_array") -> Array:
    """The value as a NumPy or CuPy array: itself if it is one already; arrays of other libraries are not copied either.

    Args:
        value: an array, a number, nested lists of numbers, a variable, a PyTorch tensor, a JAX array, or anything else with
            ``__dlpack__`` or ``__array__``.
        where: the caller's name, for the error message.

    Raises:
        TypeError: it does not hold numbers, or not in memory of its own.
        ModuleNotFoundError: it lies on a GPU and CuPy is not installed.
    """
    if type(value) is np.ndarray or isinstance(value, np.ndarray) or is_cupy(value):
        if type(value) is not np.ndarray:
            refuse_mask(value, where)
        return value  # type: ignore[no-any-return]  # a CuPy array, see Array
    library = library_of(value)
    if library is not None:
        array = library.to_array(value, where)
        require_numbers(array.dtype, where, type(value).__name__)
        return array
    try:
        array = _from_dlpack(value) if hasattr(value, "__dlpack__") else np.asarray(value)
    except ValueError as error:
        raise TypeError(
            f"{where}: got {type(value).__name__}, which is no array ({error}); need an array or a number"
        ) from error
    require_numbers(array.dtype, where, type(value).__name__)
    return array


def asarray(value: Any, *, like: Any = None) -> Any:
    """The value as an array of NumPy or CuPy, or of another library. On the same device nothing is copied.

    Args:
        value: as in `as_array`. A variable gives its live array, which changes with it.
        like: an array of the library that the result is to be of: a PyTorch tensor, a JAX array, a NumPy or a CuPy array.
            None gives a NumPy array, or a CuPy one of what lies on a GPU.

    Returns:
        An array that shares the value's memory where both libraries can. What is made of a JAX array, or of a variable, is
        not to be written to; and what is made for JAX must not change while JAX uses it.

    Raises:
        TypeError: it does not hold numbers; a dtype that one of the libraries does not have.
        OverflowError: integers too large for JAX's, which have 32 bits unless ``jax_enable_x64`` is set.
        ModuleNotFoundError: it lies on a GPU and CuPy is not installed.
    """
    array = as_array(value, "asarray")
    return array if like is None else array_like(array, like)


def array_like(array: Array, like: Any) -> Any:
    """A NumPy or CuPy array as one of the library that ``like`` is of, as in `asarray`."""
    library = library_of(like)
    if library is not None:
        return library.from_array(array, like)
    if is_cupy(like):
        return import_module("cupy").asarray(array)
    if isinstance(like, type) or not hasattr(like, "__array__"):
        raise TypeError(
            f"like: got {like!r:.80}; need an array of the library that the result is to be of, as torch.empty(0)"
        )
    return array if is_host(array) else array.get()  # type: ignore[attr-defined]  # CuPy's way to the host


def given_back(result: Any, given: Any, like: Any = None) -> Array:
    """A result in the library of what was given, or of ``like`` if that is not None."""
    if like is None and type(given) is not np.ndarray and library_of(given) is not None:
        like = given
    back: Array = result if like is None else array_like(result, like)
    return back


def writable(out: Any, where: str) -> Array:
    """Where a result goes, as an array that shares the memory of ``out``.

    Raises:
        TypeError: no array, so that nobody would ever see the result.
    """
    if type(out) is np.ndarray or isinstance(out, np.ndarray) or is_cupy(out) or library_of(out) is not None:
        return as_array(out, where)
    raise TypeError(f"{where}: got out={type(out).__name__}; need an array to write into")


def write_into(out: Any, array: Array) -> None:
    """Write an array into one of the same shape on another device, or the same; done when this returns."""
    if is_host(out):
        out[...] = array if is_host(array) else array.get()  # type: ignore[attr-defined]  # CuPy's way to the host
        return
    cupy = import_module("cupy")
    with out.device:
        out[...] = cupy.asarray(array)
        cupy.cuda.get_current_stream().synchronize()


def settle(value: Any) -> None:
    """Wait until a CuPy array holds what this thread's stream was given to fill it; another thread has another stream."""
    if is_cupy(value):
        with value.device:
            import_module("cupy").cuda.get_current_stream().synchronize()


def is_writable(out: Any) -> bool:
    """Whether an array may be written to; CuPy has no read-only ones."""
    return not is_host(out) or bool(out.flags.writeable)


def refuse_mask(value: object, where: str) -> None:
    """Refuse a masked array, whose mask nothing here looks at.

    Raises:
        TypeError: it is one.
    """
    if isinstance(value, np.ma.MaskedArray):
        raise TypeError(
            f"{where}: got a masked array, and masks are not looked at; need a plain one — value.filled(0) makes it"
        )


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


_DLPACK_GPUS = (2, 10, 13)
"""DLPack's numbers for memory of CUDA, of ROCm, and of both CUDA and the host."""


def _from_dlpack(value: Any) -> Array:
    if value.__dlpack_device__()[0] in _DLPACK_GPUS:
        array: Array = import_module("cupy").from_dlpack(value)
        return array
    return np.asarray(value) if hasattr(value, "__array__") else np.from_dlpack(value)
