"""JAX's arrays."""

from __future__ import annotations

from importlib import import_module
from typing import Any, final

import numpy as np
import numpy.typing as npt

from collectives.array_libraries.array_library import ArrayLibrary, unlocked


@final
class JaxArrays(ArrayLibrary):
    """JAX, imported when the first one is made. Its arrays don't change, so what is made of them is read-only."""

    def __init__(self) -> None:
        self._jax: Any = import_module("jax")

    def owns(self, value: Any) -> bool:
        return isinstance(value, self._jax.Array)

    def to_array(self, value: Any, where: str) -> npt.NDArray[Any]:
        if isinstance(value, self._jax.core.Tracer):
            raise TypeError(
                f"{where}: got {value.aval.str_short()} that JAX is tracing, which has no values yet; need a computed array — "
                "return it from the function under jit, grad or vmap, and pass what that returns"
            )
        if not value.is_fully_addressable:
            raise TypeError(
                f"{where}: got {value.aval.str_short()} that lies partly on other hosts; need an array of this process"
            )
        if all(device.platform in ("gpu", "cuda") for device in value.devices()):
            return self._on_gpu(value, where)
        try:
            # Waits until JAX has computed it. Only what lies on several devices is put together in new memory.
            return np.asarray(value)
        except TypeError as error:
            raise TypeError(
                f"{where}: got {value.aval.str_short()}, which NumPy cannot see ({error}); need an array of numbers"
            ) from error

    def from_array(self, array: Any, like: Any) -> Any:
        jax = self._jax
        if not isinstance(array, (np.ndarray, np.generic)):
            result = jax.dlpack.from_dlpack(array)
        elif (array := np.asarray(array)).dtype.kind == "V":  # bfloat16, which NumPy's DLPack has no code for
            result = jax.numpy.array(array)
        else:
            # What starts on an odd address, or is no block of memory, is copied.
            plain = unlocked(np.ascontiguousarray(array).reshape(array.shape))
            result = jax.dlpack.from_dlpack(plain, copy=None)
        if array.dtype.kind in "iu" and result.dtype.itemsize < array.dtype.itemsize and array.size:
            _require_fits(array, np.iinfo(result.dtype))
        if isinstance(like, jax.core.Tracer) or result.devices() == like.devices():
            return result
        return jax.device_put(result, like.sharding)

    def _on_gpu(self, value: Any, where: str) -> npt.NDArray[Any]:
        try:
            cupy: Any = import_module("cupy")
        except ModuleNotFoundError as error:
            raise ModuleNotFoundError(
                f"{where}: got {value.aval.str_short()} on a GPU; CuPy is needed to use it there — "
                "pip install 'xpdistribute[cuda12]' (or [cuda13]), or call jax.device_get"
            ) from error
        array: npt.NDArray[Any] = cupy.from_dlpack(value)
        return array


def _require_fits(array: npt.NDArray[Any], limits: np.iinfo[Any]) -> None:
    least, most = array.min(), array.max()
    if least < limits.min or most > limits.max:
        raise OverflowError(
            f"asarray: got {array.dtype} from {least} to {most}; JAX holds integers as {limits.dtype} now — "
            'call jax.config.update("jax_enable_x64", True)'
        )
