"""The command ``xpdistribute``: what it finds on a machine, and how fast the library is there.

The library itself is in the packages `strategies`, `variables` and `collectives`. The command stands beside them and not in one of
them, so that it starts without loading NumPy: ``doctor`` has to work where NumPy doesn't, and ``bench`` settles NumPy's threads
before it is loaded.
"""

from __future__ import annotations

from typing import Any


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    raise AttributeError(
        f"xpdistribute: got the name {name!r}; the library's names are in the package strategies — "
        f"write from strategies import {name}"
    )
