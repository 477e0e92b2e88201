"""One BLAS thread for each replica, unless the user says otherwise.

Replicas are threads of their own: with more BLAS threads than cores / replicas they take one another's
core. Rivals get the environment back as it was, so that they run with defaults of their own.
"""

from __future__ import annotations

import os
from importlib.util import find_spec

VARIABLES = (
    "OPENBLAS_NUM_THREADS",
    "OMP_NUM_THREADS",
    "MKL_NUM_THREADS",
    "BLIS_NUM_THREADS",
    "VECLIB_MAXIMUM_THREADS",
)

_set_by_us: list[str] = []


def use_one_blas_thread() -> None:
    """Set what is not set. Has an effect only before NumPy is loaded."""
    for variable in VARIABLES:
        if variable not in os.environ:
            os.environ[variable] = "1"
            _set_by_us.append(variable)


def environment_for_rivals() -> dict[str, str]:
    """The environment without what `use_one_blas_thread` set."""
    return {name: value for name, value in os.environ.items() if name not in _set_by_us}


def describe_blas() -> str:
    """Which BLAS NumPy uses and with how many threads, in words."""
    chosen = "set by the suite" if _set_by_us else "from the environment or the library's default"
    if find_spec("threadpoolctl") is not None:
        import threadpoolctl  # noqa: PLC0415  optional

        pools = [pool for pool in threadpoolctl.threadpool_info() if pool["user_api"] == "blas"]
        if pools:
            told = ", ".join(
                f"{pool['internal_api']} {pool['version']}, {pool['num_threads']} thread(s), "
                f"{pool.get('architecture', 'unknown')} kernels"
                for pool in pools
            )
            return f"{told} ({chosen})"
    import numpy as np  # noqa: PLC0415  not before use_one_blas_thread

    blas = np.show_config(mode="dicts")["Build Dependencies"]["blas"]
    threads = next((os.environ[variable] for variable in VARIABLES if variable in os.environ), "default")
    return f"{blas['name']} {blas['version']}, {threads} thread(s) ({chosen}; install threadpoolctl to ask the library)"
