"""The collectives as the sweep needs them: buffers, call, and what NumPy says the result is."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, final

import numpy as np

from collectives import InProcessCommunicator, ReduceOp

Array = np.ndarray[Any, np.dtype[Any]]

REDOPS = {
    "sum": ReduceOp.SUM,
    "prod": ReduceOp.PROD,
    "min": ReduceOp.MIN,
    "max": ReduceOp.MAX,
    "avg": ReduceOp.MEAN,
}
"""nccl-tests' names of the reductions."""

DTYPES = {
    "int8": "int8",
    "uint8": "uint8",
    "int32": "int32",
    "uint32": "uint32",
    "int64": "int64",
    "uint64": "uint64",
    "half": "float16",
    "float": "float32",
    "double": "float64",
    "bfloat16": "bfloat16",
}
"""nccl-tests' names of the dtypes, with NumPy's (and ml_dtypes' one)."""


@final
@dataclass(frozen=True)
class Kind:
    """One collective.

    Args:
        name: as the method is called.
        bus_factor: from the number of ranks to what algbw is multiplied by; see nccl-tests' PERFORMANCE.md.
        reduces: whether it has a reduction.
        root: the rank that is special, or -1.
        splits_input: the input is one block for each rank, and counts are those of a block.
        splits_output: the same of the output.
        call: ``call(end, array, out, op)``, on every rank.
        expected: ``expected(arrays, rank, op)``: the result on a rank by NumPy alone, None where it gets none.
        in_place: ``in_place(out, rank, ranks)``: the part of ``out`` that is the input too; None if it has no such way.
    """

    name: str
    bus_factor: Callable[[int], float]
    reduces: bool
    root: int
    splits_input: bool
    splits_output: bool
    call: Callable[[InProcessCommunicator, Array, Array, ReduceOp], object]
    expected: Callable[[Sequence[Array], int, ReduceOp], Array | None]
    in_place: Callable[[Array, int, int], Array] | None


def fold(arrays: Sequence[Array], op: ReduceOp) -> Array:
    """The reduction by NumPy, in rank order; narrow floats in float32, integers in 64 bits."""
    dtype = arrays[0].dtype
    wide = np.dtype(np.float32) if dtype.itemsize == 2 and dtype.kind not in "iu" else dtype
    if dtype.kind in "iu":
        wide = np.dtype(np.int64 if dtype.kind == "i" else np.uint64)
    total = arrays[0].astype(wide)
    for array in arrays[1:]:
        total = op.ufunc(total, array.astype(wide))
    if op is ReduceOp.MEAN:
        total = total / len(arrays)
    return total.astype(dtype)


def _block(array: Array, rank: int, ranks: int) -> Array:
    length = len(array) // ranks
    return array[rank * length : (rank + 1) * length]


def _whole(out: Array, rank: int, ranks: int) -> Array:
    del rank, ranks
    return out


def _same_bytes(ranks: int) -> float:
    del ranks
    return 1.0


def _others_share(ranks: int) -> float:
    return (ranks - 1) / ranks


KINDS = {
    kind.name: kind
    for kind in (
        Kind(
            name="all_reduce",
            bus_factor=lambda ranks: 2 * (ranks - 1) / ranks,
            reduces=True,
            root=-1,
            splits_input=False,
            splits_output=False,
            call=lambda end, array, out, op: end.all_reduce(array, op, out=out),
            expected=lambda arrays, _rank, op: fold(arrays, op),
            in_place=_whole,
        ),
        Kind(
            name="all_gather",
            bus_factor=_others_share,
            reduces=False,
            root=-1,
            splits_input=False,
            splits_output=True,
            call=lambda end, array, out, _op: end.all_gather(array, out=out),
            expected=lambda arrays, _rank, _op: np.concatenate(arrays),
            in_place=_block,
        ),
        Kind(
            name="reduce_scatter",
            bus_factor=_others_share,
            reduces=True,
            root=-1,
            splits_input=True,
            splits_output=False,
            call=lambda end, array, out, op: end.reduce_scatter(array, op, out=out),
            expected=lambda arrays, rank, op: fold([_block(a, rank, len(arrays)) for a in arrays], op),
            in_place=None,
        ),
        Kind(
            name="broadcast",
            bus_factor=_same_bytes,
            reduces=False,
            root=0,
            splits_input=False,
            splits_output=False,
            call=lambda end, array, out, _op: end.broadcast(array, 0, out=out),
            expected=lambda arrays, _rank, _op: arrays[0],
            in_place=_whole,
        ),
        Kind(
            name="reduce",
            bus_factor=_same_bytes,
            reduces=True,
            root=0,
            splits_input=False,
            splits_output=False,
            call=lambda end, array, out, op: end.reduce(array, op, 0, out=out),
            expected=lambda arrays, rank, op: fold(arrays, op) if rank == 0 else None,
            in_place=_whole,
        ),
        Kind(
            name="all_to_all",
            bus_factor=_others_share,
            reduces=False,
            root=-1,
            splits_input=True,
            splits_output=True,
            call=lambda end, array, out, _op: end.all_to_all(array, out=out),
            expected=lambda arrays, rank, _op: np.concatenate([_block(a, rank, len(arrays)) for a in arrays]),
            in_place=None,
        ),
    )
}


def numpy_dtype(name: str) -> np.dtype[Any]:
    """The dtype of nccl-tests' name.

    Raises:
        ValueError: bfloat16, and ml_dtypes is not installed.
    """
    if name != "bfloat16":
        return np.dtype(DTYPES[name])
    try:
        import ml_dtypes  # noqa: PLC0415  optional
    except ModuleNotFoundError:
        raise ValueError("-d bfloat16: needs ml_dtypes; pip install 'xpdistribute[checkpoint]'") from None
    dtype: np.dtype[Any] = np.dtype(ml_dtypes.bfloat16)
    return dtype


def test_data(count: int, dtype: np.dtype[Any], op: ReduceOp, rank: int) -> Array:
    """A rank's input for the check: other numbers on each rank, whose reduction fits the dtype."""
    random = np.random.default_rng((count, rank))
    if dtype.kind in "iu":
        # The integers that a product or sum of a few dozen ranks keeps within 8 bits.
        return random.integers(0, 2 if op is ReduceOp.PROD else 4, count).astype(dtype)
    return (random.random(count, np.float32) + 0.5).astype(dtype)


def steady_data(count: int, dtype: np.dtype[Any], op: ReduceOp) -> Array:
    """An input that repeated in-place reductions leave as it is, so that nothing overflows while timed."""
    # full, not zeros: zeros shares one page of memory until it is written to.
    return np.full(count, 0 if op is ReduceOp.SUM else 1, dtype)


def num_wrong(got: Array, expected: Array) -> int:
    """How many elements differ: integers at all, floats by more than the rounding of a sum of a few numbers."""
    if got.shape != expected.shape:
        return max(got.size, expected.size)
    if got.dtype.kind in "iu":
        return int(np.count_nonzero(got != expected))
    tolerance = {2: 1e-2, 4: 1e-5}.get(got.dtype.itemsize, 1e-12)
    wide = np.float64
    return int(np.count_nonzero(~np.isclose(got.astype(wide), expected.astype(wide), rtol=tolerance, atol=0)))
