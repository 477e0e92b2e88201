"""Puts what a file holds into objects: everything that fits, or, if something doesn't, nothing at all."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, final

from strategies.checkpoints.entries import ArrayEntry, Filled, StateEntry
from strategies.checkpoints.errors import CheckpointMismatchError
from strategies.checkpoints.file_reading import ArrayFile
from strategies.checkpoints.object_tree import ObjectTree
from strategies.checkpoints.states import decode, of_processes, references


def raise_own(error: Exception | None) -> None:
    """What a process agrees on that has nobody to agree with."""
    if error is not None:
        raise error


@final
class Restoration:
    """One checkpoint on its way into objects, some of which may be attached later.

    Attributes:
        states_by_process: the names of the states that each process had its own of, and how many processes there were.

    Args:
        file: the checkpoint, verified.
        process: the number of this process, for states that each has its own of.
    """

    def __init__(self, file: ArrayFile, process: int = 0) -> None:
        self._file = file
        self._known = ObjectTree()
        in_states = {name for state in file.states.values() for name in references(state)}
        self.states_by_process: dict[str, int] = {}
        self._states: dict[str, Any] = {}
        for name, state in file.states.items():
            each = of_processes(state)
            if each is None:
                self._states[name] = state
                continue
            self.states_by_process[name] = len(each)
            if process < len(each):
                self._states[name] = each[process]
        self._values = set(self._states) | (set(file.arrays) - in_states)
        self._values = {name for name in self._values if not name.startswith("$")}
        self._unused = set(self._values)
        self._missing: set[str] = set()

    @property
    def source(self) -> str:
        """Where the checkpoint came from, in words."""
        return self._file.source

    @property
    def missing(self) -> list[str]:
        """Names of objects that the checkpoint has no value for; they keep theirs."""
        return sorted(self._missing)

    @property
    def unused(self) -> list[str]:
        """Names of values that no object has taken yet."""
        return sorted(self._unused)

    def apply(self, tree: ObjectTree, agree: Callable[[Exception | None], object] = raise_own) -> None:
        """Give objects their values.

        Args:
            tree: of objects that have not been given to this restoration before.
            agree: called with what went wrong here, or None, before objects change and after; it raises if anything
                went wrong anywhere.

        Raises:
            CheckpointMismatchError: values don't fit. No object has been changed.
            ValueError: an object refuses its state. The others are as they were before.
        """
        plan = None
        error: Exception | None = None
        try:
            plan = self._plan(tree)
        except Exception as wrong:  # noqa: BLE001  # told to all
            error = wrong
        agree(error)
        assert plan is not None  # else there was an error
        before = plan.states_now()
        try:
            plan.restore_states()
        except Exception as wrong:  # noqa: BLE001  # likewise
            error = wrong
        try:
            agree(error)
        except BaseException:
            for entry, state in reversed(before):
                with suppress(Exception):  # the error that led here is the one to tell
                    entry.restore(state)
            raise
        try:
            plan.fill(self._file)
        except Exception as wrong:  # noqa: BLE001  # likewise
            error = wrong
        agree(error)
        self._known = plan.known
        self._unused -= {*plan.states, *plan.arrays}
        self._missing |= plan.present - self._values

    def _plan(self, tree: ObjectTree) -> _Plan:
        """What is to be done, after it has been checked.

        Raises:
            CheckpointMismatchError: values don't fit.
        """
        known = self._known.joined_with(tree)
        # A slot can be given its value once both its optimizer and its variable are there.
        arrays = {**tree.arrays, **known.slots_among(self._unused)}
        arrays = {
            name: entry for name, entry in arrays.items() if name in self._unused or name in tree.arrays
        }
        present = {*tree.arrays, *tree.states, *known.present_slots(require_all=False)}
        mismatches = [*self._wrong_kinds(tree), *self._wrong_arrays(arrays)]
        if mismatches:
            raise CheckpointMismatchError(
                f"restore: {self.source!r} doesn't fit, and nothing was restored:\n  "
                + "\n  ".join(mismatches)
                + "\nneed the same shapes and dtypes — make the variables as they were saved, or leave them out of the checkpoint",
                mismatches,
            )
        states = {
            name: (entry, decode(self._states[name], self._file.read))
            for name, entry in tree.states.items()
            if name in self._unused
        }
        return _Plan(known, present, arrays, states, self._unused)

    def _wrong_kinds(self, tree: ObjectTree) -> list[str]:
        states, arrays = self._file.states, self._file.arrays
        wrong = [name for name in tree.arrays if name in states]
        wrong += [name for name in tree.states if name in arrays and name not in states]
        kinds = {True: "a state", False: "an array"}
        return [
            f"{name}: the checkpoint has {kinds[name in states]}, here is {kinds[name not in states]}"
            for name in wrong
        ]

    def _wrong_arrays(self, entries: Mapping[str, ArrayEntry]) -> list[str]:
        stored = self._file.arrays
        found = [entry.mismatch(stored[name]) for name, entry in entries.items() if name in stored]
        return [mismatch for mismatch in found if mismatch is not None]


@final
@dataclass(frozen=True)
class _Plan:
    """What a restoration is about to do.

    Attributes:
        known: all objects, those of earlier plans too.
        present: the names of the new objects.
        arrays: the entries that arrays go to.
        states: the entries that states go to, and those.
        unused: the names of all values that no object has taken.
    """

    known: ObjectTree
    present: set[str]
    arrays: dict[str, ArrayEntry]
    states: dict[str, tuple[StateEntry, Any]]
    unused: set[str]

    def states_now(self) -> list[tuple[StateEntry, Any]]:
        """The states that are about to change; a collective where theirs are, so in one order in all processes."""
        return [(entry, entry.save()) for _, (entry, _) in sorted(self.states.items())]

    def restore_states(self) -> None:
        """Give the states to their objects, until one refuses."""
        for name, (entry, state) in sorted(self.states.items()):
            try:
                entry.restore(state)
            except Exception as error:
                error.add_note(f"restore: {name} refused its state from the checkpoint; nothing was restored")
                raise

    def fill(self, file: ArrayFile) -> None:
        """Give the arrays their values."""
        filled = Filled()
        for name, entry in self.arrays.items():
            if name in self.unused:
                entry.fill(filled)
        file.read_into((filling.name, filling.skip, filling.targets) for filling in filled.fillings)
        filled.finish()
