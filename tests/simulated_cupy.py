"""CuPy without a GPU, as far as our collectives use it: arrays that NumPy can't read, and streams that work later.

A device's memory is the host's here, but an array does not show it: as CuPy's, it refuses to become a NumPy array. Each thread has a
stream of its own on each device, and what was launched on it is done when it is waited for, not before. Copies don't wait for streams, as those of older CuPys.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import numpy as np


class Stream:
    """Does what is launched on it when it is waited for."""

    def __init__(self) -> None:
        self._launched: list[Callable[[], None]] = []

    def launch(self, kernel: Callable[[], None]) -> None:
        self._launched.append(kernel)

    def synchronize(self) -> None:
        launched, self._launched = self._launched, []
        for kernel in launched:
            kernel()


class Device:
    """One of several; the current one is that whose block was entered last."""

    current = 0

    def __init__(self, number: int) -> None:
        self.id = number
        self._before: list[int] = []

    def __enter__(self) -> Device:
        self._before.append(Device.current)
        Device.current = self.id
        return self

    def __exit__(self, *_: object) -> None:
        Device.current = self._before.pop()


_OF_THREAD = threading.local()


def stream(device: int | None = None) -> Stream:
    """The current one of a device, in this thread."""
    streams = _OF_THREAD.__dict__.setdefault("streams", {})
    return streams.setdefault(Device.current if device is None else device, Stream())  # type: ignore[no-any-return]


class ndarray:  # noqa: N801  # CuPy's name
    """An array on a device."""

    def __init__(self, memory: np.ndarray[Any, Any], device: int) -> None:
        self._memory = memory
        self.device = Device(device)

    dtype = property(lambda self: self._memory.dtype)
    shape = property(lambda self: self._memory.shape)
    ndim = property(lambda self: self._memory.ndim)
    size = property(lambda self: self._memory.size)
    nbytes = property(lambda self: self._memory.nbytes)

    def __len__(self) -> int:
        return len(self._memory)

    @property
    def flags(self) -> Any:
        class Flags:
            """CuPy's have no ``writeable``."""

            c_contiguous = self._memory.flags.c_contiguous

        return Flags

    @property
    def T(self) -> ndarray:  # noqa: N802  # NumPy's name
        return ndarray(self._memory.T, self.device.id)

    def __array__(self, *_: Any, **__: Any) -> Any:
        raise TypeError("Implicit conversion to a NumPy array is not allowed. Please use `.get()`")

    def get(self, *, out: np.ndarray[Any, Any] | None = None) -> np.ndarray[Any, Any]:
        if out is None:
            return self._memory.copy()
        if out.shape != self.shape or out.dtype != self.dtype or not out.flags.c_contiguous:
            raise ValueError("out does not fit")
        out[...] = self._memory
        return out

    def __setitem__(self, index: Any, value: Any) -> None:
        if not isinstance(value, ndarray) or value.device.id != self.device.id:
            raise TypeError(f"{type(value).__name__} is not on this device")
        stream(self.device.id).launch(lambda: self._memory.__setitem__(index, value._memory))


ndarray.__module__ = "cupy"


def asarray(value: Any) -> ndarray:
    """On the current device; the copy is launched on its stream."""
    if isinstance(value, ndarray):
        return value
    memory = np.full(np.shape(value), 77).astype(value.dtype)
    stream().launch(lambda: memory.__setitem__(..., value))
    return ndarray(memory, Device.current)


def on_device(value: Any, device: int = 0) -> Any:
    """An array whose content is still being computed."""
    value = np.asarray(value)
    memory = np.full(value.shape, 66).astype(value.dtype)
    stream(device).launch(lambda: memory.__setitem__(..., value))
    return ndarray(memory, device)


NUM_PINNED: list[int] = []


def empty_pinned(num: int, dtype: Any) -> np.ndarray[Any, Any]:
    """Counted: pinning takes long, so it is to be done once."""
    NUM_PINNED.append(num)
    return np.empty(num, dtype)


def install() -> None:
    """Be what ``import cupy`` finds in this process; for processes of a test's own."""
    cupy: Any = ModuleType("cupy")
    cupy.ndarray, cupy.asarray = ndarray, asarray
    cupy.cuda = ModuleType("cupy.cuda")
    cupy.cuda.Device = Device
    cupy.cuda.get_current_stream = lambda: stream()
    cupyx: Any = ModuleType("cupyx")
    cupyx.empty_pinned = empty_pinned
    cupy.__spec__ = ModuleSpec("cupy", None)
    sys.modules["cupy"], sys.modules["cupyx"] = cupy, cupyx
