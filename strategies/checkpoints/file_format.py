"""How a checkpoint lies in a file.

It is one safetensors file, so that it appears, and replaces the one before, by a single rename, and other programs can read
its arrays: 8 bytes that tell the length of the header, the header in JSON, then the arrays' bytes one after the
other. The header's ``__metadata__`` holds our index, JSON too: checksums of every array, states that are no arrays, and
what the arrays of a dtype that safetensors lacks are. Nothing in it is ever executed or unpickled.
"""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

import numpy as np

from collectives.arrays import Array

INDEX_KEY = "xpdistribute"
"""Our index in the ``__metadata__`` of safetensors."""
INDEX_CHECKSUM_KEY = "xpdistribute.crc32"
FORMAT = 1
"""The version of the index."""
CHUNK_BYTES = 16 << 20
"""Each piece of an array of this length has a checksum of its own, so that threads can share the work."""
LARGEST_HEADER_BYTES = 100_000_000
"""The limit of the safetensors format."""
_ALIGNMENT = 64

_NAMES = {
    "bool": "BOOL",
    "int8": "I8",
    "int16": "I16",
    "int32": "I32",
    "int64": "I64",
    "uint8": "U8",
    "uint16": "U16",
    "uint32": "U32",
    "uint64": "U64",
    "float16": "F16",
    "bfloat16": "BF16",
    "float32": "F32",
    "float64": "F64",
    "complex64": "C64",
    "complex128": "F64",  # of which safetensors has none: real and imaginary parts side by side
}
"""From our dtypes to those of safetensors."""


@final
@dataclass(frozen=True)
class SavedArray:
    """An array that is to be written.

    Attributes:
        name: in the file.
        shape: of the whole.
        dtype: of the whole.
        pieces: arrays in host memory that make up the whole, one after the other in C order. They may change as
            training goes on.
    """

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    pieces: Sequence[Array]

    @property
    def num_bytes(self) -> int:
        """Of the whole."""
        return math.prod(self.shape) * self.dtype.itemsize


@final
@dataclass(frozen=True)
class StoredArray:
    """An array that lies in a file.

    Attributes:
        name: in the file.
        shape: of the whole.
        dtype: of the whole.
        start: its first byte, from the start of the file.
        checksums: crc32 of each piece of `CHUNK_BYTES`.
    """

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    start: int
    checksums: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        """Of the whole."""
        return math.prod(self.shape) * self.dtype.itemsize


def require_storable(dtype: np.dtype[Any], where: str) -> None:
    """Refuse a dtype that the file format has no place for.

    Raises:
        TypeError: it is none of numbers, or wider than 128 bits.
    """
    if dtype.name not in _NAMES:
        raise TypeError(
            f"{where}: got dtype {dtype}, which checkpoints can't hold; need one of {', '.join(_NAMES)}"
        )


def dtype_named(name: str) -> np.dtype[Any]:
    """The dtype of that name.

    Raises:
        ModuleNotFoundError: bfloat16 without ml_dtypes.
        KeyError: none that checkpoints hold.
    """
    if name not in _NAMES:
        raise KeyError(name)
    if name == "bfloat16":
        try:
            # Of the extra `checkpoint`; nobody else needs it.
            import ml_dtypes  # noqa: PLC0415
        except ModuleNotFoundError as error:
            raise ModuleNotFoundError(
                "checkpoint: got bfloat16, which needs ml_dtypes; pip install 'xpdistribute[checkpoint]'"
            ) from error
        dtype: np.dtype[Any] = np.dtype(ml_dtypes.bfloat16)
        return dtype
    return np.dtype(name)


def stored_as(name: str, shape: Sequence[int]) -> tuple[str, list[int]]:
    """The dtype and shape that safetensors sees, of an array of our dtype of that name."""
    return _NAMES[name], [*shape, 2] if name == "complex128" else list(shape)


def num_chunks(num_bytes: int) -> int:
    """How many checksums an array of that size has."""
    return -(-num_bytes // CHUNK_BYTES)


def in_file_order(arrays: Sequence[SavedArray]) -> list[SavedArray]:
    """Wide dtypes first, so that each array starts on a multiple of its element's size."""
    return sorted(arrays, key=lambda array: -array.dtype.itemsize)


def header(
    arrays: Sequence[SavedArray], checksums: Mapping[str, Sequence[int]] | None, states: Mapping[str, Any]
) -> bytes:
    """Everything before the arrays' bytes; its length doesn't depend on the checksums.

    Args:
        arrays: in the order of the file.
        checksums: by name; None for a header that only has the right length.
        states: what is saved beside the arrays, in JSON's terms.

    Raises:
        ValueError: more names and states than safetensors allows.
    """
    described = {
        array.name: {
            "dtype": array.dtype.name,
            "shape": list(array.shape),
            # Of one length, whatever the numbers.
            "crc32": [
                f"{checksum:08x}"
                for checksum in (
                    [0] * num_chunks(array.num_bytes) if checksums is None else checksums[array.name]
                )
            ],
        }
        for array in arrays
    }
    index = json.dumps({"format": FORMAT, "arrays": described, "states": states}, allow_nan=False)
    entries: dict[str, Any] = {
        "__metadata__": {
            "format": "np",
            INDEX_KEY: index,
            INDEX_CHECKSUM_KEY: f"{zlib.crc32(index.encode()):08x}",
        }
    }
    start = 0
    for array in arrays:
        dtype, shape = stored_as(array.dtype.name, array.shape)
        entries[array.name] = {
            "dtype": dtype,
            "shape": shape,
            "data_offsets": [start, start + array.num_bytes],
        }
        start += array.num_bytes
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % _ALIGNMENT)
    if len(text) > LARGEST_HEADER_BYTES:
        raise ValueError(
            f"checkpoint: got {len(text)} bytes of names and states; need at most {LARGEST_HEADER_BYTES} — "
            "keep large states in arrays"
        )
    return len(text).to_bytes(8, "little") + text


def as_bytes(array: Array) -> memoryview:
    """The memory of a C-contiguous array."""
    # Through uint8, as Python's buffers know no bfloat16.
    flat: Any = array.reshape(-1).view(np.uint8)
    return memoryview(flat)
