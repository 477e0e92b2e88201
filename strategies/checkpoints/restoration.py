"""Puts what a file holds into objects: everything that fits, or, if something doesn't, nothing at all."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import Any, final

from strategies.checkpoints.entries import ArrayEntry, Filled, StateEntry
from strategies.checkpoints.errors import CheckpointMismatchError
from strategies.checkpoints.file_reading import ArrayFile
from strategies.checkpoints.object_tree import ObjectTree
from strategies.checkpoints.states import decode, references


@final
class Restoration:
    """One checkpoint on its way into objects, some of which may be attached later.

    Args:
        file: the checkpoint, verified.
    """

    def __init__(self, file: ArrayFile) -> None:
        self._file = file
        self._known = ObjectTree()
        in_states = {name for state in self._file.states.values() for name in references(state)}
        self._values = set(self._file.states) | (set(self._file.arrays) - in_states)
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

    def apply(self, tree: ObjectTree) -> None:
        """Give objects their values.

        Args:
            tree: of objects that have not been given to this restoration before.

        Raises:
            CheckpointMismatchError: values don't fit. No object has been changed.
            ValueError: an object refuses its state. The others are as they were before.
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
        states = {name: entry for name, entry in tree.states.items() if name in self._unused}
        filled = Filled()
        for name, entry in arrays.items():
            if name in self._unused:
                entry.fill(filled)
        _restore_states(states, {name: decode(self._file.states[name], self._file.read) for name in states})
        self._file.read_into((filling.name, filling.skip, filling.targets) for filling in filled.fillings)
        filled.finish()
        self._known = known
        self._unused -= {*states, *arrays}
        self._missing |= present - self._values

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


def _restore_states(entries: Mapping[str, StateEntry], states: Mapping[str, Any]) -> None:
    """Restore all states; if one fails, put back those before it."""
    done: list[tuple[StateEntry, Any]] = []
    for name, entry in entries.items():
        before = entry.save()
        try:
            entry.restore(states[name])
        except Exception as error:
            error.add_note(f"restore: {name} refused its state from the checkpoint; nothing was restored")
            for other, old in reversed([*done, (entry, before)]):
                _put_back(other, old)
            raise
        done.append((entry, before))


def _put_back(entry: StateEntry, state: Any) -> None:
    with suppress(Exception):  # the error that led here is the one to tell
        entry.restore(state)
