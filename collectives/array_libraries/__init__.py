"""Arrays of other libraries: whose a value is, and the way to NumPy or CuPy and back.

Each library is known to one module, which is loaded when the program itself has loaded that library: a
value of a library that nobody has imported cannot be there.
"""

from __future__ import annotations

import sys
from functools import cache
from importlib import import_module
from typing import Any

from collectives.array_libraries.array_library import ArrayLibrary as ArrayLibrary

_MODULES = {
    "torch": ("torch_tensors", "TorchTensors"),
    "jax": ("jax_arrays", "JaxArrays"),
}
"""By import name: our module that knows it, and the class in there."""


def library_of(value: Any) -> ArrayLibrary | None:
    """The library that the value is an array of; None for NumPy, CuPy, and what is no array."""
    for name in _MODULES:
        if name in sys.modules:
            library = _library(name)
            if library.owns(value):
                return library
    return None


@cache
def _library(name: str) -> ArrayLibrary:
    module, kind = _MODULES[name]
    library = getattr(import_module(f"{__name__}.{module}"), kind)()
    assert isinstance(library, ArrayLibrary)
    return library
