"""What goes into a checkpoint, brought together from all processes of a job.

Values of variables and slots are the same everywhere, or become one by the variables' own collectives. States are compared: of
plain values, such as a step, and of optimizers the chief's count; of what may differ, such as a random generator that each
process has seeded in its own way, all processes' states are in the file.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, final

import numpy as np

from collectives.arrays import Array
from collectives.calls import Call
from collectives.errors import CollectiveError
from strategies.checkpoints.entries import MemoryEntry
from strategies.checkpoints.file_format import SavedArray, as_bytes
from strategies.checkpoints.file_reading import ArrayFile
from strategies.checkpoints.file_writing import write_bytes
from strategies.checkpoints.object_tree import ObjectTree
from strategies.checkpoints.states import by_process, encode, references, renamed
from strategies.checkpoints.together import Together

ABOUT = "$about"
"""Among the states of a file: what was said about the checkpoint; no object can have this name."""

_STATES = Call("the states of a checkpoint")


@final
@dataclass(frozen=True)
class Content:
    """What is to be written.

    Attributes:
        arrays: as they lie in memory, by name.
        states: in JSON's terms, by name.
    """

    arrays: dict[str, SavedArray]
    states: dict[str, Any]

    def keep(self, name: str, array: Array) -> None:
        """Add an array that belongs to a state.

        Raises:
            ValueError: the name is taken.
        """
        if name in self.arrays:
            raise ValueError(f"save: got two arrays that are called {name}; need a name for each")
        self.arrays[name] = MemoryEntry(name, [array]).save()


def collect_own(tree: ObjectTree, *, for_newcomer: bool) -> Content:
    """The values of all objects, as this process has them: states are not compared with those of others.

    Args:
        tree: of the objects.
        for_newcomer: what a process that joins is to begin with, which is found without the others.
    """
    entries = {**tree.arrays, **tree.present_slots(require_all=True)}
    content = Content({}, {})
    # In one order in all processes, as some of them bring those together.
    for name in sorted(entries):
        entry = entries[name]
        content.arrays[name] = entry.save_for_newcomer() if for_newcomer else entry.save()
    for name in sorted(tree.states):
        state = tree.states[name]
        content.states[name] = encode(
            state.save_for_newcomer() if for_newcomer else state.save(), name, content.keep
        )
    return content


def collect(
    tree: ObjectTree,
    together: Together,
    settings: Mapping[str, Any],
    about: Mapping[str, Any] | None,
    error: Exception | None = None,
) -> Content:
    """The values of all objects, on the chief; a collective of all processes. The others' may lack what only the chief writes.

    Args:
        tree: of the objects; any if there is an error.
        together: the processes.
        settings: what must be equal in all of them, by what it is called.
        about: what is said about the checkpoint; None for nothing.
        error: what has gone wrong here already.

    Raises:
        Exception: what went wrong in any process; all raise it.
    """
    names: list[str] = []
    if error is None:
        try:
            names = sorted([*tree.arrays, *tree.states, *tree.present_slots(require_all=True)])
        except ValueError as wrong:
            error = wrong
    together.agree_on("save", {**settings, "about": about is not None}, error)
    together.require_same_names("save", names)
    content = Content({}, {})
    error = None
    try:
        content = collect_own(tree, for_newcomer=False)
        if about is not None and together.is_chief:
            content.states[ABOUT] = encode(about, ABOUT, content.keep)
    except CollectiveError:
        raise  # in all processes
    except Exception as wrong:
        if together.is_alone:
            raise
        error = wrong
    if not together.is_alone:
        _unite_states(tree, together, content, error)
    return content


def _unite_states(tree: ObjectTree, together: Together, content: Content, error: Exception | None) -> None:
    """Put the states of all processes in place of those that differ, and may."""
    names = sorted(tree.states)
    own = [] if error is not None else [_checksum(content, name) for name in names]
    told = together.agree("save: the states", own, error)
    differing = [
        name for name, sums in zip(names, zip(*told, strict=True), strict=True) if len(set(sums)) > 1
    ]
    for name in differing:
        if tree.states[name].is_common:
            together.say("save: %s differs between the processes; saved is what the chief has", name)
    own_names = [name for name in differing if not tree.states[name].is_common]
    if not own_names:
        return
    parts = Content({}, {name: content.states[name] for name in own_names})
    for state in parts.states.values():
        parts.arrays.update({name: content.arrays[name] for name in references(state)})
    blob = write_bytes(list(parts.arrays.values()), parts.states)

    def unite(blobs: Sequence[Array]) -> None:
        if not together.is_chief:
            return
        for name in parts.arrays:
            del content.arrays[name]
        files = [ArrayFile.of_bytes(one) for one in blobs]
        for process, file in enumerate(files):
            for name in file.arrays:
                content.keep(_of_process(name, process), file.read(name))
        for name in own_names:
            content.states[name] = by_process(
                renamed(file.states[name], partial(_of_process, process=process))
                for process, file in enumerate(files)
            )

    link = together.link()
    try:
        link.all_gather(_STATES, [blob], unite)
    finally:
        link.close()


def _of_process(name: str, process: int) -> str:
    return f"{name}/process_{process}"


def _checksum(content: Content, name: str) -> int:
    state = content.states[name]
    checksum = zlib.crc32(json.dumps(state, sort_keys=True).encode())
    for array in references(state):
        for piece in content.arrays[array].pieces:
            checksum = zlib.crc32(as_bytes(np.ascontiguousarray(piece)), checksum)
    return checksum
