"""The memory that gradients and slots lie in, and how a set of variables divides it."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Any, final

import numpy as np

from collectives.arrays import Array
from collectives.reduction import CHUNK_BYTES
from variables.flat_memory import Block, Place
from variables.sharded_variable import ShardedVariable
from variables.variable import Variable

_LARGE_BYTES = 1 << 15
"""From this size on, a gradient is read where it is; smaller ones are copied together, to be worked on as one array."""

_JOINED_BYTES = CHUNK_BYTES
"""Up to this size small ones are copied together: what is worked on at a time."""


@final
class BlockState:
    """What belongs to one block of parameters: each replica's gradients, and the slots, one for all.

    Args:
        block: the parameters.
        num_replicas: that have gradients.
        slots: names, and what they are filled with at first.
    """

    def __init__(self, block: Block, num_replicas: int, slots: Mapping[str, float]) -> None:
        self._fills = slots
        self._filled: set[int] = set()
        self.block = block
        # Memory that is never touched takes no room. What is handed out for gradients is read only: any variable's
        # gradient may lie there. What has no such layout, and sums, have memory of their own.
        self.gradients = [block.lendable() for _ in range(num_replicas)]
        self.packed = [block.lendable() for _ in range(num_replicas)]
        self.slots = {name: block.like() for name in slots}

    def begin(self, place: Place) -> None:
        """Fill the slots of a variable that is updated for the first time."""
        # One without elements starts where the next one does, which must be filled all the same.
        if place.start in self._filled or place.start == place.stop:
            return
        self._filled.add(place.start)
        for name, fill in self._fills.items():
            if fill:
                self.slots[name][place.start : place.stop] = fill


@final
class SideBySide:
    """Arrays that are copied side by side only when somebody is about to read them, so that they are in the cache then.

    Args:
        pieces: arrays of one dtype, and the bytes between them by turns.
        dtype: theirs.
    """

    __slots__ = ("_dtype", "_pieces")

    def __init__(self, pieces: list[Any], dtype: np.dtype[Any]) -> None:
        self._pieces = pieces
        self._dtype = dtype

    def joined(self) -> Array:
        """A new flat array, to be read only."""
        # `join` copies small arrays several times faster than NumPy's functions do, and doesn't let go of the GIL for each.
        try:
            return np.frombuffer(b"".join(self._pieces), self._dtype)
        except TypeError:  # some are not contiguous
            self._pieces[::2] = map(np.ascontiguousarray, self._pieces[::2])
            return np.frombuffer(b"".join(self._pieces), self._dtype)


@final
@dataclass(frozen=True, eq=False)
class Segment:
    """Variables that lie one after the other in one block, so that they are updated as one array; or one large one.

    Attributes:
        state: of their block.
        start: where the first one begins.
        stop: where the last one ends.
        order: their positions among the variables that were asked for, in the order in which they lie.
        shapes: theirs.
        gaps: zero bytes for what lies between them.
        dtypes: of each, all the same.
        is_large: whether it is one large variable, whose gradient is read where it is.
    """

    state: BlockState
    start: int
    stop: int
    order: tuple[int, ...]
    shapes: list[tuple[int, ...]]
    gaps: list[bytes]
    dtypes: list[np.dtype[Any]]
    is_large: bool

    def at(self, positions: Sequence[int]) -> Segment:
        """The same, where the variables asked for are some of a longer sequence, at these positions."""
        return replace(self, order=tuple(positions[index] for index in self.order))

    def flat(self, gradients: Sequence[Any]) -> Array | SideBySide | None:
        """These gradients as one flat array, to be read only, or what makes it; None unless all are plain arrays that fit.

        Args:
            gradients: one for each variable, in the order in which they lie.
        """
        if len(gradients) == 1:
            (gradient,) = gradients
            is_plain = type(gradient) is np.ndarray and gradient.dtype == self.dtypes[0]
            is_fitting = is_plain and gradient.shape == self.shapes[0] and gradient.flags.c_contiguous
            return gradient.reshape(-1) if is_fitting else None
        if (
            set(map(type, gradients)) != {np.ndarray}
            or list(map(_SHAPE, gradients)) != self.shapes
            or list(map(_DTYPE, gradients)) != self.dtypes
        ):
            return None
        pieces: list[Any] = [b""] * (2 * len(gradients) - 1)
        pieces[1::2] = self.gaps
        pieces[::2] = gradients
        return SideBySide(pieces, self.dtypes[0])

    def lendable(self, lent: Array | SideBySide, replica: int) -> Array:
        """What `flat` gave, in memory that may be changed and that other processes can read.

        Args:
            lent: of this segment.
            replica: whose.
        """
        if isinstance(lent, SideBySide):
            packed = self.packed(replica)
            np.copyto(packed, lent.joined())
            return packed
        if self.is_large and np.may_share_memory(lent, self.state.gradients[replica]):
            return lent
        packed = self.packed(replica)
        if not np.may_share_memory(lent, packed):
            np.copyto(packed, lent)
        return packed

    def parameters(self) -> list[Array]:
        """Every copy's parameters, flat."""
        return [copy[self.start : self.stop] for copy in self.state.block.copies]

    def packed(self, replica: int) -> Array:
        """Memory for one replica's gradients, flat."""
        return self.state.packed[replica][self.start : self.stop]

    def slots(self) -> dict[str, Array]:
        """The slots, flat, by name."""
        return {name: slot[self.start : self.stop] for name, slot in self.state.slots.items()}


@final
class GradientMemory:
    """Gradients and slots for the variables of one optimizer, made when first needed.

    Args:
        slots: names of the slots, and what they are filled with at first.
    """

    def __init__(self, slots: Mapping[str, float]) -> None:
        self._slots = slots
        self._states: dict[int, BlockState] = {}
        self.variables: dict[int, Variable] = {}

    def state_of(self, variable: Variable, num_replicas: int) -> BlockState:
        """The gradients and slots of the block that a variable lies in."""
        place = place_of(variable)
        state = self._states.get(id(place.block))
        if state is None:
            state = self._states[id(place.block)] = BlockState(place.block, num_replicas, self._slots)
        state.begin(place)
        self.variables.setdefault(id(variable), variable)
        return state

    def segments(self, variables: Sequence[Variable], num_replicas: int, *, whole: bool) -> list[Segment]:
        """The fewest segments that hold these variables, each once.

        Args:
            variables: in the caller's order.
            num_replicas: that have gradients.
            whole: whether each variable is to have a segment of its own.
        """
        placed = [(self.state_of(v, num_replicas), place_of(v), i) for i, v in enumerate(variables)]
        placed.sort(key=lambda entry: (id(entry[0]), entry[1].start))
        groups: list[list[_Entry]] = []
        for entry in placed:
            if not whole and groups and _continues(groups[-1], entry):
                groups[-1].append(entry)
            else:
                groups.append([entry])
        # The order must not depend on addresses, which differ from run to run.
        groups.sort(key=lambda group: min(entry[2] for entry in group))
        return [_segment(group) for group in groups]


_Entry = tuple[BlockState, Place, int]


def place_of(variable: Variable) -> Place:
    """Where a variable lies in flat memory.

    Raises:
        TypeError: a sharded variable, which lies in several places.
    """
    if isinstance(variable, ShardedVariable):
        raise TypeError(
            f"optimizer: got {variable.name}, which lies in {len(variable.shards)} pieces; need one of its shards: "
            f"for shard in {variable.name}.shards"
        )
    place: Any = getattr(variable, "place")  # noqa: B009  # every kind that optimizers can update has it
    assert isinstance(place, Place)
    return place


def _is_large(state: BlockState, place: Place) -> bool:
    return (place.stop - place.start) * state.block.dtype.itemsize >= _LARGE_BYTES


def _continues(group: Sequence[_Entry], entry: _Entry) -> bool:
    state, last, _ = group[-1]
    follows = entry[0] is state and state.block.follows(last, entry[1])
    num_bytes = (entry[1].stop - group[0][1].start) * state.block.dtype.itemsize
    return (
        follows
        and num_bytes <= _JOINED_BYTES
        and not _is_large(state, last)
        and not _is_large(state, entry[1])
    )


def _segment(entries: Sequence[_Entry]) -> Segment:
    state = entries[0][0]
    places = [place for _, place, _ in entries]
    gaps = [after.start - before.stop for before, after in itertools.pairwise(places)]
    return Segment(
        state,
        places[0].start,
        places[-1].stop,
        tuple(index for *_, index in entries),
        [place.shape for place in places],
        [bytes(gap * state.block.dtype.itemsize) for gap in gaps],
        [state.block.dtype] * len(places),
        _is_large(state, places[0]),
    )


_SHAPE, _DTYPE = attrgetter("shape"), attrgetter("dtype")
