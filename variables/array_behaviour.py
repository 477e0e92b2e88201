"""What makes an object act as the array it holds, in NumPy's arithmetic, functions and indexing."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
from numpy.lib.mixins import NDArrayOperatorsMixin

from collectives.arrays import Array, is_host

_METHODS = frozenset(
    [
        "T",
        "all",
        "any",
        "argmax",
        "argmin",
        "argpartition",
        "argsort",
        "astype",
        "choose",
        "clip",
        "compress",
        "conj",
        "conjugate",
        "copy",
        "cumprod",
        "cumsum",
        "diagonal",
        "dot",
        "flat",
        "flatten",
        "imag",
        "item",
        "itemsize",
        "mT",
        "max",
        "mean",
        "min",
        "nbytes",
        "nonzero",
        "prod",
        "ravel",
        "real",
        "repeat",
        "reshape",
        "round",
        "searchsorted",
        "size",
        "squeeze",
        "std",
        "strides",
        "sum",
        "swapaxes",
        "take",
        "tobytes",
        "tofile",
        "tolist",
        "trace",
        "transpose",
        "var",
        "view",
    ]
)
"""Of ndarray, those that do not change it. They are forwarded by name: a subclass of ndarray would own its memory."""


class ArrayBehaviour(NDArrayOperatorsMixin):
    """Operators, NumPy functions, indexing and conversion, all on `value`.

    Results are plain arrays. What would write into the array is refused, as writes have to reach all copies.
    """

    def value(self) -> Array:
        """The array that the object stands for now, read-only."""
        raise NotImplementedError  # not @abstractmethod, as type checkers must let users call Variable(...)

    # The mixin defines ``==`` elementwise; as keys, objects are told apart by identity all the same.
    def __hash__(self) -> int:
        return id(self)

    def __array__(self, dtype: npt.DTypeLike | None = None, copy: bool | None = None) -> Array:
        array = self.value()
        if not is_host(array):
            array = array.get()  # type: ignore[attr-defined]  # CuPy's way to the host
        if dtype is not None and array.dtype != dtype:
            if copy is False:
                raise ValueError(
                    f"{getattr(self, 'name', 'variable')}: got copy=False with dtype {np.dtype(dtype)}; {array.dtype} needs "
                    "a copy to become that — leave copy away"
                )
            return array.astype(dtype)
        return array.copy() if copy else array

    def __array_ufunc__(self, ufunc: np.ufunc, method: str, *inputs: Any, **kwargs: Any) -> Any:
        arrays = [x.value() if isinstance(x, ArrayBehaviour) else x for x in inputs]
        if not kwargs and method == "__call__":  # an operator
            return ufunc(*arrays)
        if any(isinstance(out, ArrayBehaviour) for out in kwargs.get("out", ())):
            self._refuse(f"{ufunc.__name__} with out=")
        if "where" in kwargs:
            kwargs["where"] = _unwrapped(kwargs["where"])
        return getattr(ufunc, method)(*arrays, **kwargs)

    def __array_function__(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        if isinstance(kwargs.get("out"), ArrayBehaviour) or (
            func is np.copyto and isinstance(args[0], ArrayBehaviour)
        ):
            self._refuse(f"{func.__name__} into it")
        return func(*_unwrapped(args), **_unwrapped(kwargs))

    def __dlpack__(self, **kwargs: Any) -> Any:
        return self.value().__dlpack__(**kwargs)

    def __dlpack_device__(self) -> Any:
        return self.value().__dlpack_device__()

    if TYPE_CHECKING:  # what is forwarded below

        def __getattr__(self, name: str) -> Any: ...

    def __getitem__(self, index: Any) -> Any:
        return self.value()[index.value() if isinstance(index, ArrayBehaviour) else index]

    def __setitem__(self, index: Any, value: Any) -> None:
        self._refuse("assignment to an item")

    def __len__(self) -> int:
        return len(self.value())

    def __iter__(self) -> Iterator[Any]:
        return iter(self.value())

    def __contains__(self, item: Any) -> bool:
        return item in self.value()

    def __bool__(self) -> bool:
        return bool(self.value())

    def __int__(self) -> int:
        return int(self.value())

    def __float__(self) -> float:
        return float(self.value())

    def __complex__(self) -> complex:
        return complex(self.value())

    def __index__(self) -> int:
        return self.value().__index__()

    def __format__(self, spec: str) -> str:
        return format(self.value(), spec) if spec else str(self)

    def _refuse(self, what: str) -> None:
        raise TypeError(
            f"{getattr(self, 'name', 'variable')}: {what} would change one copy only; "
            "use assign, assign_add, assign_sub or scatter_update, which reach all copies"
        )


def _forwarded(name: str) -> property:
    return property(lambda self: getattr(self.value(), name), doc=getattr(np.ndarray, name).__doc__)


# NumPy asks each object that it makes an array of for several attributes that variables lack; were there a __getattr__, which
# Python calls for those, that would take seven times as long as the rest.
for _name in _METHODS:
    setattr(ArrayBehaviour, _name, _forwarded(_name))


def _unwrapped(argument: Any) -> Any:
    if isinstance(argument, ArrayBehaviour):
        return argument.value()
    if isinstance(argument, (list, tuple)):
        return (
            type(argument)(_unwrapped(x) for x in argument) if type(argument) in (list, tuple) else argument
        )
    if isinstance(argument, dict):
        return {key: _unwrapped(x) for key, x in argument.items()}
    return argument
