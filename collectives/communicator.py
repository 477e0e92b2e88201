"""The interface of every backend."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import numpy as np

from collectives.arrays import (
    Array,
    as_array,
    describe,
    describe_kind,
    given_back,
    is_writable,
    writable,
    write_into,
)
from collectives.reduce_op import ReduceOp


class Communicator(ABC):
    """One rank's end of a group.

    Every rank calls the same collectives in the same order, each with arrays of one shape and dtype. A
    collective leaves the array passed in as it was, unless it is passed as ``out`` too. Every operation may raise
    `CollectiveMismatchError` (the ranks' calls differ), `CollectiveTimeoutError` (a rank did not come) and
    `CollectiveAbortedError` (a rank failed), on every rank; the group is broken then, and raises the same
    again until it is made anew. The public methods check their arguments; a backend writes the underscored
    ones and overrides nothing else.

    Numbers: results are equal to the last bit on all ranks and from run to run. float16 and bfloat16
    accumulate in float32. SUM and PROD of booleans and 8- and 16-bit integers come back as int64 or uint64, MEAN of
    integers as float64; all else keeps its dtype. Results are in C order.

    PyTorch tensors and JAX arrays go in without a copy, as ``array`` and as ``out``, and what comes out is of the
    library of ``array``, or of ``like``.
    """

    @property
    @abstractmethod
    def rank(self) -> int:
        """This rank, in ``range(world_size)``."""

    @property
    @abstractmethod
    def world_size(self) -> int:
        """How many ranks the group has."""

    # ------------------------------------------------------------- reductions

    def all_reduce(
        self,
        array: Array,
        op: ReduceOp | str = ReduceOp.SUM,
        *,
        out: Array | None = None,
        name: str | None = None,
        like: Any = None,
    ) -> Array:
        """Reduce over all ranks; every rank gets the whole result.

        Args:
            array: any shape, the same on every rank; it may be read-only and in any memory layout.
            op: how to reduce.
            out: where the result goes, of the shape of ``array``; ``array`` itself to reduce in place. Its dtype is
                the result's, or the array's own for integers: what does not fit raises then.
            name: must be the same on every rank; stands in error messages.
            like: an array of the library that the result is to be of; None means that of ``array``.

        Returns:
            ``out``, or a new array of the shape of ``array``.

        Raises:
            TypeError: a dtype that ``op`` has no meaning for, or ``out`` of another dtype.
            ValueError: ``out`` of another shape, or read-only.
            OverflowError: an integer ``out`` is too narrow for the result.
        """
        if type(op) is not ReduceOp:
            op = ReduceOp.parse(op)
        _require_name(name)
        given, array = array, as_array(array, "all_reduce")
        op.require(array.dtype, "all_reduce")
        if out is None:
            return given_back(self._all_reduce([array], op, None, name)[0], given, like)
        into = writable(out, "all_reduce")
        _require_reduced(into, array, op)
        self._all_reduce([array], op, [into], name)
        return out

    def all_reduce_coalesced(
        self,
        arrays: Sequence[Array],
        op: ReduceOp | str = ReduceOp.SUM,
        *,
        outs: Sequence[Array] | None = None,
        name: str | None = None,
        like: Any = None,
    ) -> list[Array]:
        """`all_reduce` of several arrays, of any shapes and dtypes, for the price of one meeting. Each has an ``out`` of its own."""
        op = ReduceOp.parse(op)
        _require_name(name)
        given = list(arrays)
        arrays = [as_array(array, "all_reduce") for array in given]
        for array in arrays:
            op.require(array.dtype, "all_reduce")
        if outs is None:
            results = self._all_reduce(arrays, op, None, name)
            return [given_back(result, one, like) for result, one in zip(results, given, strict=True)]
        outs = list(outs)
        if len(outs) != len(arrays):
            raise ValueError(f"all_reduce: got {len(outs)} outs for {len(arrays)} arrays; need one each")
        if len({id(out) for out in outs}) != len(outs):
            # The later result would stand in both places.
            raise ValueError("all_reduce: got the same array twice in outs; need one each")
        into = []
        for array, out in zip(arrays, outs, strict=True):
            into.append(writable(out, "all_reduce"))
            _require_reduced(into[-1], array, op)
        self._all_reduce(arrays, op, into, name)
        return outs

    def reduce(
        self,
        array: Array,
        op: ReduceOp | str = ReduceOp.SUM,
        root: int = 0,
        *,
        out: Array | None = None,
        like: Any = None,
    ) -> Array | None:
        """Reduce over all ranks; ``root`` gets the result.

        Args:
            array: as in `all_reduce`.
            op: how to reduce.
            root: the rank that gets the result.
            out: as in `all_reduce`, read on ``root`` only.
            like: as in `all_reduce`.

        Returns:
            On ``root`` as `all_reduce`, elsewhere None.

        Raises:
            TypeError: as in `all_reduce`.
            ValueError: ``root`` is no rank; as in `all_reduce`.
        """
        op, given, array = ReduceOp.parse(op), array, as_array(array, "reduce")
        op.require(array.dtype, "reduce")
        self._require_rank(root, "reduce: root")
        if self.rank != root:
            return self._reduce(array, op, root, None)
        if out is None:
            return given_back(self._reduce(array, op, root, None), given, like)
        into = writable(out, "reduce")
        _require_out(into, array.shape, op, array.dtype, "reduce")
        self._reduce(array, op, root, into)
        return out

    def reduce_scatter(
        self, array: Array, op: ReduceOp | str = ReduceOp.SUM, *, out: Array | None = None, like: Any = None
    ) -> Array:
        """Reduce over all ranks; rank r gets the r-th block of the result.

        Args:
            array: shape ``(world_size * block, ...)``.
            op: as in `all_reduce`.
            out: shape ``(block, ...)``, otherwise as in `all_reduce`; it does not overlap ``array``.
            like: as in `all_reduce`.

        Returns:
            ``out``, or a new array of shape ``(block, ...)``.

        Raises:
            ValueError: the first axis does not split evenly over the ranks.
            TypeError: as in `all_reduce`.
        """
        op, given, array = ReduceOp.parse(op), array, as_array(array, "reduce_scatter")
        op.require(array.dtype, "reduce_scatter")
        block = self._require_blocks(array, "reduce_scatter")
        if out is None:
            return given_back(self._reduce_scatter(array, op, None), given, like)
        into = writable(out, "reduce_scatter")
        _require_out(into, block, op, array.dtype, "reduce_scatter")
        self._reduce_scatter(array, op, into)
        return out

    # ----------------------------------------------------------------- copies

    def broadcast(self, array: Array, root: int = 0, *, out: Array | None = None, like: Any = None) -> Array:
        """Every rank gets ``root``'s array.

        Args:
            array: of one shape and dtype on all ranks; only ``root``'s content counts.
            root: the rank whose array it is.
            out: where it goes, of that shape and dtype.
            like: as in `all_reduce`.

        Returns:
            ``out``, or a new array.

        Raises:
            TypeError: an array of objects.
            ValueError: ``root`` is no rank; ``out`` does not fit.
        """
        given, array = array, _movable(array, "broadcast")
        self._require_rank(root, "broadcast: root")
        if out is None:
            return given_back(self._broadcast(array, root, None), given, like)
        into = writable(out, "broadcast")
        _require_like(into, array.shape, array.dtype, "broadcast")
        self._broadcast(array, root, into)
        return out

    def all_gather(self, array: Array, axis: int = 0, *, out: Array | None = None, like: Any = None) -> Array:
        """The ranks' arrays one after the other, by rank; every rank gets the whole.

        Args:
            array: at least one axis. The lengths along ``axis`` may differ between the ranks, also be 0; the
                other axes and the dtype agree.
            axis: the axis that they are joined along; negative ones count from the end.
            out: where it goes, of the joined shape.
            like: as in `all_reduce`.

        Returns:
            ``out``, or a new array.

        Raises:
            TypeError: an array of objects.
            ValueError: a scalar, or no such axis; ``out`` does not fit.
        """
        given, array = array, _movable(array, "all_gather")
        axis = require_axis(array, axis, "all_gather")
        if out is None:
            return given_back(self._all_gather(array, axis, None), given, like)
        self._all_gather(array, axis, writable(out, "all_gather"))
        return out

    def all_to_all(self, array: Array, *, out: Array | None = None, like: Any = None) -> Array:
        """Rank r gets the r-th block of every rank's array, by rank.

        Args:
            array: shape ``(world_size * block, ...)``, the same on all ranks.
            out: of that shape and dtype; it does not overlap ``array``.
            like: as in `all_reduce`.

        Returns:
            ``out``, or a new array of the shape of ``array``.

        Raises:
            TypeError: an array of objects.
            ValueError: the first axis does not split evenly over the ranks; ``out`` does not fit.
        """
        given, array = array, _movable(array, "all_to_all")
        self._require_blocks(array, "all_to_all")
        if out is None:
            return given_back(self._all_to_all(array, None), given, like)
        into = writable(out, "all_to_all")
        _require_like(into, array.shape, array.dtype, "all_to_all")
        self._all_to_all(array, into)
        return out

    # --------------------------------------------------------- point to point

    def send(self, array: Array, peer: int, tag: int = 0) -> None:
        """Send an array to one rank. Afterwards the array may be changed.

        Args:
            array: any shape, and any dtype but objects.
            peer: the rank that calls `recv`.
            tag: tells messages to one peer apart; those of one tag come in order.

        Raises:
            TypeError: an array of objects.
            ValueError: ``peer`` is no other rank.
        """
        self._require_peer(peer, "send")
        self._send(_movable(array, "send"), peer, tag)

    def recv(self, peer: int, tag: int = 0, *, out: Array | None = None, like: Any = None) -> Array:
        """The next array that ``peer`` sends with this tag.

        Args:
            peer: the rank that calls `send`.
            tag: as in `send`.
            out: where it goes, of the sent shape and dtype.
            like: an array of the library that the result is to be of; None means NumPy or CuPy.

        Returns:
            ``out``, or a new array.

        Raises:
            ValueError: ``peer`` is no other rank; ``out`` does not fit.
        """
        self._require_peer(peer, "recv")
        array = self._recv(peer, tag)
        if out is None:
            return given_back(array, None, like)
        into = writable(out, "recv")
        _require_like(into, array.shape, array.dtype, "recv")
        write_into(into, array)
        return out

    # ------------------------------------------------------------------ others

    @abstractmethod
    def barrier(self) -> None:
        """Go on when every rank has come."""

    @abstractmethod
    def all_gather_object(self, value: object) -> list[object]:
        """Every rank's value, by rank. For small things: it may be pickled."""

    # ---------------------------------------------------------- for a backend

    @abstractmethod
    def _all_reduce(
        self, arrays: list[Array], op: ReduceOp, outs: Sequence[Array] | None, name: str | None
    ) -> list[Array]: ...

    @abstractmethod
    def _reduce(self, array: Array, op: ReduceOp, root: int, out: Array | None) -> Array | None: ...

    @abstractmethod
    def _reduce_scatter(self, array: Array, op: ReduceOp, out: Array | None) -> Array: ...

    @abstractmethod
    def _broadcast(self, array: Array, root: int, out: Array | None) -> Array: ...

    @abstractmethod
    def _all_gather(self, array: Array, axis: int, out: Array | None) -> Array: ...

    @abstractmethod
    def _all_to_all(self, array: Array, out: Array | None) -> Array: ...

    @abstractmethod
    def _send(self, array: Array, peer: int, tag: int) -> None: ...

    @abstractmethod
    def _recv(self, peer: int, tag: int) -> Array: ...

    # ------------------------------------------------------------------ checks

    def _require_rank(self, rank: Any, where: str) -> None:
        if (
            isinstance(rank, bool)
            or not isinstance(rank, (int, np.integer))
            or not 0 <= rank < self.world_size
        ):
            raise ValueError(f"{where}: got {rank}; need a rank from 0 to {self.world_size - 1}")

    def _require_peer(self, peer: int, where: str) -> None:
        self._require_rank(peer, f"{where}: peer")
        if peer == self.rank:
            raise ValueError(f"{where}: got this rank itself, {peer}, as peer; need another rank")

    def _require_blocks(self, array: Array, where: str) -> tuple[int, ...]:
        if array.ndim == 0:
            raise ValueError(f"{where}: got a scalar; need an array whose first axis splits over the ranks")
        block, rest = divmod(len(array), self.world_size)
        if rest:
            raise ValueError(
                f"{where}: {describe(array)} does not split over {self.world_size} ranks; "
                f"pad the first axis to {(block + 1) * self.world_size}"
            )
        return (block, *array.shape[1:])


def require_axis(array: Array, axis: int, where: str) -> int:
    """The axis counted from the start.

    Raises:
        ValueError: the array is a scalar, or has no such axis.
    """
    if array.ndim == 0:
        raise ValueError(f"{where}: got a scalar; need at least one axis — reshape(1) makes one")
    if not -array.ndim <= axis < array.ndim:
        raise ValueError(
            f"{where}: got axis {axis} of {describe(array)}; need one from 0 to {array.ndim - 1}"
        )
    return axis % array.ndim


def require_axis_from_start(array: Array, axis: Any, where: str) -> int:
    """The axis, which must not count from the end, as tf.distribute's must not.

    Raises:
        ValueError: the array is a scalar, or has no such axis, or ``axis`` is negative or no integer.
    """
    if isinstance(axis, bool) or not isinstance(axis, (int, np.integer)) or axis < 0:
        raise ValueError(f"{where}: got axis={axis!r}; need an integer from 0")
    return require_axis(array, int(axis), where)


def _require_name(name: Any) -> None:
    if name is not None and not isinstance(name, str):
        raise TypeError(f"all_reduce: got name={name!r}; need a str, or None")


def _require_like(out: Array, shape: tuple[int, ...], dtype: np.dtype[Any], where: str) -> None:
    if out.shape != shape or out.dtype != dtype:
        raise ValueError(f"{where}: got out={describe(out)}; need {describe_kind(dtype, shape)}")
    if not is_writable(out):
        raise ValueError(f"{where}: out is read-only; need an array to write into")


def _require_reduced(out: Array, array: Array, op: ReduceOp) -> None:
    if out is not array or op.result_dtype(array.dtype) != array.dtype:
        _require_out(out, array.shape, op, array.dtype, "all_reduce")
    elif not is_writable(out):
        raise ValueError("all_reduce: out is read-only; need an array to write into")


def _movable(array: Any, where: str) -> Array:
    # Between processes an object could only be pickled, and between threads it would be one object in two replicas.
    moved: Array = as_array(array, where)
    if moved.dtype.hasobject:
        raise TypeError(
            f"{where}: got an array of dtype {moved.dtype}; need numbers, text of fixed length or records of them — "
            "all_gather_object takes objects"
        )
    return moved


def _require_out(out: Array, shape: tuple[int, ...], op: ReduceOp, dtype: np.dtype[Any], where: str) -> None:
    result = op.result_dtype(dtype)
    keeps_integers = out.dtype == dtype and dtype.kind in "iu" and op is not ReduceOp.MEAN
    if out.dtype != result and not keeps_integers:
        raise TypeError(f"{where}: got out={describe(out)}; {op.name} of {dtype} gives {result}")
    _require_like(out, shape, out.dtype, where)
