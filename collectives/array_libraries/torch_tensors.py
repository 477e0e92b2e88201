"""PyTorch's tensors."""

from __future__ import annotations

from importlib import import_module
from typing import Any, final

import numpy as np
import numpy.typing as npt

from collectives.array_libraries.array_library import ArrayLibrary, unlocked


@final
class TorchTensors(ArrayLibrary):
    """PyTorch, imported when the first one is made."""

    def __init__(self) -> None:
        self._torch: Any = import_module("torch")

    def owns(self, value: Any) -> bool:
        return isinstance(value, self._torch.Tensor)

    def to_array(self, value: Any, where: str) -> npt.NDArray[Any]:
        torch = self._torch
        if value.layout is not torch.strided:
            raise TypeError(
                f"{where}: got {_describe(value)}, which is sparse; need a dense tensor or IndexedSlices — "
                "call to_dense(), or pass IndexedSlices(tensor.values(), tensor.indices()[0])"
            )
        if value.is_conj() or value.is_neg():
            raise TypeError(
                f"{where}: got {_describe(value)}, a lazy conjugate or negative of other memory; need a tensor of its own — "
                "call resolve_conj() or resolve_neg()"
            )
        tensor = value.detach()
        if tensor.device.type == "cuda":
            return _on_gpu(tensor, where)
        if tensor.device.type != "cpu":
            raise TypeError(
                f"{where}: got {_describe(value)} on {tensor.device}; need host memory or CUDA's — call cpu()"
            )
        try:
            if tensor.dtype is torch.bfloat16:
                array: npt.NDArray[Any] = tensor.view(torch.int16).numpy().view(_bfloat16(where))
            else:
                array = tensor.numpy()
        except (RuntimeError, TypeError) as error:
            raise TypeError(
                f"{where}: got {_describe(value)}, which NumPy cannot see ({error}); need integers, "
                "floats of 16 to 64 bits or complex numbers — convert it with to(torch.float32)"
            ) from error
        return array

    def from_array(self, array: Any, like: Any) -> Any:
        if isinstance(array, (np.ndarray, np.generic)):
            return self._from_host(np.asarray(array)).to(like.device)
        return self._torch.from_dlpack(array).to(like.device)

    def _from_host(self, array: npt.NDArray[Any]) -> Any:
        torch = self._torch
        if any(stride < 0 for stride in array.strides):  # which tensors cannot have
            array = array.copy()
        array = unlocked(array)
        if array.dtype.name == "bfloat16":
            return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
        try:
            return torch.from_numpy(array)
        except TypeError as error:
            raise TypeError(
                f"asarray: got {array.dtype} of shape {array.shape}, which torch does not have ({error}); "
                "need another dtype — convert it with astype"
            ) from error


def _on_gpu(tensor: Any, where: str) -> npt.NDArray[Any]:
    try:
        cupy: Any = import_module("cupy")
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"{where}: got {_describe(tensor)} on {tensor.device}; CuPy is needed to use it there — "
            "pip install 'xpdistribute[cuda12]' (or [cuda13]), or call cpu()"
        ) from error
    try:
        array: npt.NDArray[Any] = cupy.from_dlpack(tensor)  # it passes CuPy's current stream to torch
    except (RuntimeError, TypeError, ValueError, BufferError) as error:
        raise TypeError(
            f"{where}: got {_describe(tensor)} on {tensor.device}, which CuPy cannot see ({error}); "
            "need another dtype — convert it with to(torch.float32)"
        ) from error
    return array


def _bfloat16(where: str) -> npt.DTypeLike:
    try:
        dtype: npt.DTypeLike = import_module("ml_dtypes").bfloat16
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"{where}: got a bfloat16 tensor; NumPy has bfloat16 through ml_dtypes, which is not installed — "
            "pip install 'xpdistribute[torch]'"
        ) from error
    return dtype


def _describe(tensor: Any) -> str:
    return f"a {tensor.dtype} tensor of shape {tuple(tensor.shape)}"
