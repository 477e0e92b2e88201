"""The memory that gradients and slots lie in, and which of it a set of variables takes up."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, final

import numpy as np

from collectives.arrays import Array
from variables.flat_memory import Block, Place
from variables.variable import Variable


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
        self.gradients = [block.like() for _ in range(num_replicas)]
        self.slots = {name: block.like() for name in slots}

    def begin(self, place: Place) -> None:
        """Fill the slots of a variable that is updated for the first time."""
        if place.start in self._filled:
            return
        self._filled.add(place.start)
        for name, fill in self._fills.items():
            if fill:
                self.slots[name][place.start : place.stop] = fill


@final
@dataclass(frozen=True, eq=False)
class Run:
    """Variables that lie one after the other in one block, so that they are updated as one array.

    Attributes:
        state: of their block.
        start: where the first one begins.
        stop: where the last one ends.
        order: their positions among the variables that were asked for, in the order in which they lie.
        is_all_in_order: whether these are all that were asked for, in the order asked for.
        shapes: theirs, in the order in which they lie.
        padding: zeros for the gap after each of them.
    """

    state: BlockState
    start: int
    stop: int
    order: tuple[int, ...]
    is_all_in_order: bool
    shapes: list[tuple[int, ...]]
    padding: list[Array]

    def expects(self, gradients: Sequence[Any]) -> bool:
        """Whether these are plain arrays of the shapes and the dtype of the variables."""
        return (
            set(map(type, gradients)) == {np.ndarray}
            and list(map(_SHAPE, gradients)) == self.shapes
            and set(map(_DTYPE, gradients)) == {self.state.block.dtype}
        )

    def parameters(self) -> list[Array]:
        """Every copy's parameters, flat."""
        return [copy[self.start : self.stop] for copy in self.state.block.copies]

    def gradients(self) -> list[Array]:
        """Every replica's gradients, flat."""
        return [gradients[self.start : self.stop] for gradients in self.state.gradients]

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
        self._num_replicas: dict[int, int] = {}

    def state_of(self, variable: Variable, num_replicas: int) -> BlockState:
        """The gradients and slots of the block that a variable lies in."""
        place = place_of(variable)
        state = self._states.get(id(place.block))
        if state is None:
            state = self._states[id(place.block)] = BlockState(place.block, num_replicas, self._slots)
        state.begin(place)
        return state

    def runs(self, variables: Sequence[Variable], num_replicas: int) -> list[Run]:
        """The fewest runs that hold these variables, each once."""
        placed = [
            (self.state_of(variable, num_replicas), place_of(variable), i)
            for i, variable in enumerate(variables)
        ]
        placed.sort(key=lambda entry: (id(entry[0]), entry[1].start))
        runs: list[list[tuple[BlockState, Place, int]]] = []
        for entry in placed:
            state, place, _ = entry
            if runs and runs[-1][-1][0] is state and state.block.follows(runs[-1][-1][1], place):
                runs[-1].append(entry)
            else:
                runs.append([entry])
        # The order must not depend on addresses: all replicas reduce the runs in it.
        runs.sort(key=lambda run: min(entry[2] for entry in run))
        return [_run(entries, len(variables)) for entries in runs]


def place_of(variable: Variable) -> Place:
    """Where a variable lies in flat memory."""
    place: Any = getattr(variable, "place")  # noqa: B009  # every kind that optimizers can update has it
    assert isinstance(place, Place)
    return place


def _run(entries: Sequence[tuple[BlockState, Place, int]], num_asked_for: int) -> Run:
    state = entries[0][0]
    places = [place for _, place, _ in entries]
    order = tuple(index for *_, index in entries)
    gaps = [after.start - before.stop for before, after in itertools.pairwise(places)]
    return Run(
        state,
        places[0].start,
        places[-1].stop,
        order,
        order == tuple(range(num_asked_for)),
        [place.shape for place in places],
        [np.zeros(gap, state.block.dtype) for gap in (*gaps, 0)],
    )


_SHAPE, _DTYPE = attrgetter("shape"), attrgetter("dtype")
