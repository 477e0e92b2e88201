"""The interface of the libraries whose arrays are taken and given back."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import numpy as np
import numpy.typing as npt


class ArrayLibrary(ABC):
    """One library, whose arrays share memory with NumPy's on the host and with CuPy's on a GPU."""

    @abstractmethod
    def owns(self, value: Any) -> bool:
        """Whether the value is an array of this library."""

    @abstractmethod
    def to_array(self, value: Any, where: str) -> npt.NDArray[Any]:
        """The memory of one of its arrays as a NumPy array, or on a GPU a CuPy one. Nothing is copied.

        Args:
            value: one that it `owns`.
            where: the caller's name, for the error message.

        Raises:
            TypeError: an array whose memory cannot be seen as an array of numbers.
            ModuleNotFoundError: on a GPU without CuPy; bfloat16 without ml_dtypes.
        """

    @abstractmethod
    def from_array(self, array: Any, like: Any) -> Any:
        """An array of this library that shares the memory of a NumPy or CuPy one, where the library can.

        Args:
            array: a NumPy or CuPy array, or a NumPy number; nobody may write to it as long as the library believes that its arrays don't change.
            like: one that it `owns`: the result lies on its device, copied there if need be.

        Raises:
            TypeError: a dtype that the library does not have.
            OverflowError: integers that are too large for the library's.
        """


def unlocked(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """The same memory without its read-only flag, which other libraries have none of, and warn or refuse."""
    return array if array.flags.writeable else np.asarray(_Unlocked(array))


class _Unlocked:
    def __init__(self, array: npt.NDArray[Any]) -> None:
        self._array = array  # keeps the memory alive
        interface = dict(array.__array_interface__)
        interface["data"] = (interface["data"][0], False)
        self.__array_interface__ = interface
