"""What one package says of itself: run as a script of its own, ``python -P probes.py NAME FOLDER``.

A package may crash when it is imported, hang, print, or end the process. So each is imported here, in a process that nothing
else depends on, which writes one line of JSON. Knows the standard library only, and imports nothing of this package.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import sys
from collections.abc import Callable
from importlib import import_module, metadata
from typing import Any

Facts = dict[str, Any]


def probe_numpy() -> Facts:
    """NumPy, with the BLAS that it computes with and its threads."""
    np = import_module("numpy")
    np.ones((2, 2)) @ np.ones((2, 2))
    facts: Facts = {"version": np.__version__}
    with contextlib.suppress(Exception):  # a build may not say
        blas = np.show_config(mode="dicts")["Build Dependencies"]["blas"]
        facts["blas"] = {"name": blas.get("name"), "version": blas.get("version")}
    with contextlib.suppress(Exception):  # it has a probe of its own, which says what is wrong with it
        pools = import_module("threadpoolctl").threadpool_info()
        facts["pools"] = [
            {
                "name": pool["internal_api"],
                "version": pool["version"],
                "threads": pool["num_threads"],
                "kernels": pool.get("architecture"),
            }
            for pool in pools
            if pool["user_api"] == "blas"
        ]
    return facts


def probe_strategies() -> Facts:
    """Our own packages, and where they are."""
    strategies = import_module("strategies")
    return {"version": None, "file": strategies.__file__}


def probe_cupy() -> Facts:
    """CuPy, the CUDA that it found, its GPUs and NCCL."""
    cp = import_module("cupy")
    runtime = cp.cuda.runtime
    facts: Facts = {"version": cp.__version__, "cuda_runtime": _cuda_version(runtime.runtimeGetVersion())}
    try:
        facts["cuda_driver"] = _cuda_version(runtime.driverGetVersion())
        facts["gpus"] = [
            _gpu(runtime.getDeviceProperties(index)) for index in range(runtime.getDeviceCount())
        ]
    except Exception as error:  # noqa: BLE001  # no driver, or one that is too old for this CuPy
        facts["gpu_problem"] = _in_words(error)
    try:
        facts["nccl"] = _nccl_version(import_module("cupy.cuda.nccl").get_version())
    except Exception as error:  # noqa: BLE001  # CuPy without it
        facts["nccl_problem"] = _in_words(error)
    return facts


def probe_mpi4py() -> Facts:
    """The package mpi4py, and the MPI library that it loads, which is not initialized."""
    mpi4py = import_module("mpi4py")
    mpi4py.rc.initialize = False
    mpi4py.rc.finalize = False
    facts: Facts = {"version": mpi4py.__version__}
    try:
        library = import_module("mpi4py.MPI").Get_library_version()
        facts["library"] = library.strip("\0 \n").splitlines()[0].partition(",")[0]
    except Exception as error:  # noqa: BLE001  # no library, or another one than it was built for
        facts["library_problem"] = _in_words(error)
    return facts


def probe_torch() -> Facts:
    """PyTorch, its CUDA and its threads."""
    torch = import_module("torch")
    return {"version": torch.__version__, "cuda": torch.version.cuda, "threads": torch.get_num_threads()}


def probe_jax() -> Facts:
    """JAX; its backend is left alone, as it would take most of a GPU's memory."""
    jax = import_module("jax")
    return {"version": jax.__version__, "jaxlib": import_module("jaxlib").__version__}


def probe_cuda() -> Facts:
    """NVIDIA's driver, asked without any package, and the GPUs that it shows to this process."""
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError:
        raise ModuleNotFoundError("there is no NVIDIA driver", name="cuda") from None
    version, count = ctypes.c_int(), ctypes.c_int()
    cuda.cuDriverGetVersion(ctypes.byref(version))
    facts: Facts = {"version": _cuda_version(version.value), "gpus": []}
    status = cuda.cuInit(0) or cuda.cuDeviceGetCount(ctypes.byref(count))
    if status:
        # 100: no GPU that this process may see; it is no fault of the driver's.
        facts["gpu_problem"] = "no GPU is visible" if status == 100 else f"the driver says error {status}"
        return facts
    for index in range(count.value):
        device, name, size = ctypes.c_int(), ctypes.create_string_buffer(256), ctypes.c_size_t()
        cuda.cuDeviceGet(ctypes.byref(device), index)
        cuda.cuDeviceGetName(name, len(name), device)
        cuda.cuDeviceTotalMem_v2(ctypes.byref(size), device)
        facts["gpus"].append({"name": name.value.decode(errors="replace"), "bytes": size.value})
    return facts


def probe_any(import_name: str) -> Facts:
    """A package of which only its version counts."""
    module = import_module(import_name)
    version = getattr(module, "__version__", None)
    with contextlib.suppress(metadata.PackageNotFoundError):
        version = version or metadata.version(import_name)
    return {"version": None if version is None else str(version)}


PROBES: dict[str, Callable[[], Facts]] = {
    "numpy": probe_numpy,
    "strategies": probe_strategies,
    "cupy": probe_cupy,
    "mpi4py": probe_mpi4py,
    "torch": probe_torch,
    "jax": probe_jax,
    "cuda": probe_cuda,
}


def examine(name: str) -> Facts:
    """All that is found out about one package, with its ``state``: ``ok``, ``missing`` or ``broken``."""
    try:
        facts = PROBES[name]() if name in PROBES else probe_any(name)
    except ModuleNotFoundError as error:
        # What it fails to import itself is a fault of its own.
        return {"state": "missing" if error.name == name else "broken", "problem": _in_words(error)}
    except BaseException as error:  # noqa: BLE001  # SystemExit too: whatever happens becomes a line in the report
        return {"state": "broken", "problem": _in_words(error)}
    return {"state": "ok", **facts}


def main() -> None:
    """Examine the package that the command line names; our own are in the folder that it names too."""
    sys.path.append(sys.argv[2])
    # What it prints goes elsewhere: the line of JSON stands alone.
    answers = os.dup(1)
    os.dup2(2, 1)
    answer = json.dumps(examine(sys.argv[1])) + "\n"
    os.write(answers, answer.encode())
    # At once: what a package does at the end of the process may hang or crash too.
    os._exit(0)


def _gpu(properties: dict[str, Any]) -> Facts:
    return {"name": properties["name"].decode(errors="replace"), "bytes": int(properties["totalGlobalMem"])}


def _cuda_version(number: int) -> str:
    return f"{number // 1000}.{number % 1000 // 10}"


def _nccl_version(number: int) -> str:
    # 2.9 and later count thousands and hundreds differently from those before.
    major, rest = divmod(number, 10000 if number >= 10000 else 1000)
    return f"{major}.{rest // 100}.{rest % 100}"


def _in_words(error: BaseException) -> str:
    try:
        text = str(error).strip().splitlines()
    except BaseException:  # noqa: BLE001  # an error that can't even say what it is
        text = []
    return f"{type(error).__name__}: {text[0][:300]}" if text else type(error).__name__


if __name__ == "__main__":
    main()
