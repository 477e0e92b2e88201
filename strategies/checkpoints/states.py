"""States that are no variables: what objects that can be checkpointed have in common, and how it is written down."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol, TypeAlias, runtime_checkable

import numpy as np

from collectives.arrays import Array

State: TypeAlias = Any
"""Numbers, strings, booleans, None and arrays, in nested lists and dicts with strings for keys. Tuples become lists."""

_ARRAY, _FLOAT, _PROCESSES = "$array", "$float", "$processes"
_PLAIN = (bool, int, float, str, type(None))


@runtime_checkable
class Stateful(Protocol):
    """What a `Checkpoint` can hold beside variables: anything that tells its state and can be put into one.

    Iterators of datasets are such objects. A class of yours becomes one by having the two methods.
    """

    def state(self) -> State:
        """All that is needed to go on from here, as a new object or arrays that are not to be changed."""

    def restore(self, state: State, /) -> object:
        """Go to a state that `state` gave, here or in another process.

        Raises:
            ValueError: the state doesn't fit.
        """


@runtime_checkable
class StatefulTogether(Protocol):
    """A `Stateful` whose ``state`` is a collective of all processes of a job."""

    def state_for_newcomer(self) -> State:
        """What a process that joins the job is to begin with, found without the others."""


def is_plain(value: object) -> bool:
    """Whether this is a number, a string, a boolean or None, or NumPy's scalar of one."""
    return isinstance(value, (*_PLAIN, np.bool_, np.number)) and not isinstance(
        value, (complex, np.complexfloating)
    )


def is_data(value: object) -> bool:
    """Whether this is a plain value, or lists and dicts of nothing else."""
    if isinstance(value, Mapping):
        return all(isinstance(key, str) and is_data(item) for key, item in value.items())
    if isinstance(value, (list, tuple)):
        return all(map(is_data, value))
    return is_plain(value)


def encode(state: State, where: str, keep: Callable[[str, Array], None]) -> Any:
    """A state in JSON's terms, with a reference in place of each array.

    Args:
        state: numbers, strings, booleans, None and arrays, in nested lists and dicts.
        where: its name; arrays are named after it and their place.
        keep: called with the name and each array.

    Raises:
        TypeError: something else in it.
        ValueError: a key that starts with $, which marks references.
    """
    if isinstance(state, Mapping):
        for key in state:
            if not isinstance(key, str):
                raise TypeError(f"save: {where}: got the key {key!r}; need strings as keys of a state")
            if key.startswith("$"):
                raise ValueError(f"save: {where}: got the key {key!r}; need one that doesn't start with $")
        return {key: encode(item, f"{where}/{key}", keep) for key, item in state.items()}
    if isinstance(state, (list, tuple)):
        return [encode(item, f"{where}/{number}", keep) for number, item in enumerate(state)]
    if isinstance(state, np.ndarray):
        keep(where, state)
        return {_ARRAY: where}
    if is_plain(state):
        value = state.item() if isinstance(state, np.generic) else state
        # JSON has no word for these.
        return {_FLOAT: repr(value)} if isinstance(value, float) and not math.isfinite(value) else value
    raise TypeError(
        f"save: {where}: got {type(state).__name__}; need variables, optimizers, iterators, random generators, arrays, "
        "numbers, strings, or lists and dicts of them — or an object with the methods state() and restore(state)"
    )


def references(encoded: Any) -> list[str]:
    """The names of the arrays that belong to an encoded state."""
    if isinstance(encoded, dict):
        if set(encoded) == {_ARRAY}:
            return [encoded[_ARRAY]]
        return [name for item in encoded.values() for name in references(item)]
    return [name for item in encoded for name in references(item)] if isinstance(encoded, list) else []


def renamed(encoded: Any, rename: Callable[[str], str]) -> Any:
    """The encoded state with other names of the arrays that belong to it."""
    if isinstance(encoded, dict):
        if set(encoded) == {_ARRAY}:
            return {_ARRAY: rename(encoded[_ARRAY])}
        return {key: renamed(item, rename) for key, item in encoded.items()}
    return [renamed(item, rename) for item in encoded] if isinstance(encoded, list) else encoded


def by_process(encoded: Iterable[Any]) -> Any:
    """The encoded form of a state that every process has its own of."""
    return {_PROCESSES: list(encoded)}


def of_processes(encoded: Any) -> list[Any] | None:
    """The processes' encoded states, of what `by_process` made; None of another one, which is the same for all."""
    return encoded[_PROCESSES] if isinstance(encoded, dict) and set(encoded) == {_PROCESSES} else None


def decode(encoded: Any, read: Callable[[str], Array]) -> State:
    """The state, with the arrays in their places; of one that every process has its own of, a list of all of them."""
    if isinstance(encoded, dict):
        if set(encoded) == {_ARRAY}:
            return read(encoded[_ARRAY])
        if set(encoded) == {_FLOAT}:
            return float(encoded[_FLOAT])
        if set(encoded) == {_PROCESSES}:
            return [decode(item, read) for item in encoded[_PROCESSES]]
        return {key: decode(item, read) for key, item in encoded.items()}
    return [decode(item, read) for item in encoded] if isinstance(encoded, list) else encoded
