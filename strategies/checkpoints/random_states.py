"""The states of NumPy's and Python's random generators, so that resumed runs draw the numbers that would have come."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any, TypeAlias, TypeGuard

import numpy as np

from strategies.checkpoints.states import State

RandomSource: TypeAlias = (
    np.random.Generator
    | np.random.BitGenerator
    | np.random.RandomState
    | np.random.SeedSequence
    | random.Random
)
_TYPES = (
    np.random.Generator,
    np.random.BitGenerator,
    np.random.RandomState,
    np.random.SeedSequence,
    random.Random,
)


def is_random_source(value: object) -> TypeGuard[RandomSource]:
    """Whether this is a random generator, or a sequence of seeds."""
    return isinstance(value, _TYPES)


def random_state(source: RandomSource) -> State:
    """All that is needed to draw the same numbers, and to spawn the same children, from here on."""
    if isinstance(source, random.Random):
        version, words, gauss = source.getstate()
        return {"kind": "random.Random", "version": version, "words": list(words), "gauss": gauss}
    if isinstance(source, np.random.SeedSequence):
        return {"kind": "SeedSequence", **_seeds(source)}
    if isinstance(source, np.random.RandomState):
        return dict(source.get_state(legacy=False))
    bits = source.bit_generator if isinstance(source, np.random.Generator) else source
    seeds = bits.seed_seq
    spawned = {"seeds": _seeds(seeds)} if isinstance(seeds, np.random.SeedSequence) else {}
    return {**bits.state, **spawned}


def restore_random_state(source: RandomSource, state: State) -> None:
    """Put a generator into a state that `random_state` gave.

    Raises:
        ValueError: of another kind of generator; of a sequence of other seeds, or that has spawned less than this one.
    """
    here = _kind(source)
    saved = state.get("kind", state.get("bit_generator")) if isinstance(state, Mapping) else None
    if saved != here:
        raise ValueError(f"restore: got the state of {saved}; this generator is {here} — make the same kind")
    if isinstance(source, random.Random):
        source.setstate((state["version"], tuple(state["words"]), state["gauss"]))
    elif isinstance(source, np.random.SeedSequence):
        _spawn_up_to(source, state, required=True)
    elif isinstance(source, np.random.RandomState):
        source.set_state(dict(state))
    else:
        bits = source.bit_generator if isinstance(source, np.random.Generator) else source
        inner = dict(state)
        seeds = inner.pop("seeds", None)
        if seeds is not None and isinstance(bits.seed_seq, np.random.SeedSequence):
            # Who has never spawned draws the same from any seeds, once the state is his.
            _spawn_up_to(bits.seed_seq, seeds, required=bool(seeds["spawned"]))
        bits.state = inner


def _kind(source: RandomSource) -> str:
    if isinstance(source, random.Random):
        return "random.Random"
    if isinstance(source, np.random.SeedSequence):
        return "SeedSequence"
    if isinstance(source, np.random.RandomState):
        return str(source.get_state(legacy=False)["bit_generator"])
    bits = source.bit_generator if isinstance(source, np.random.Generator) else source
    return str(bits.state["bit_generator"])


def _seeds(sequence: np.random.SeedSequence) -> dict[str, Any]:
    entropy: Any = sequence.entropy
    return {
        "entropy": entropy
        if entropy is None or isinstance(entropy, int)
        else [int(word) for word in entropy],
        "spawn_key": [int(word) for word in sequence.spawn_key],
        "spawned": sequence.n_children_spawned,
    }


def _spawn_up_to(sequence: np.random.SeedSequence, saved: Mapping[str, Any], *, required: bool) -> None:
    """Let a sequence spawn until the next child is the one that would have come: its count can't be set."""
    here = _seeds(sequence)
    same = here["entropy"] == saved["entropy"] and here["spawn_key"] == saved["spawn_key"]
    if same and here["spawned"] <= saved["spawned"]:
        sequence.spawn(saved["spawned"] - here["spawned"])
    elif required:
        raise ValueError(
            f"restore: {saved['spawned']} children were spawned from seed {saved['entropy']}; this sequence has seed "
            f"{here['entropy']} and {here['spawned']} children — make it from the same seed, and restore before spawning"
        )
