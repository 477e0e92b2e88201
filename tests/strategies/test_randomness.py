"""Random streams of replicas, all from one seed."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from collectives import Array
from strategies import (
    CentralStorageStrategy,
    Checkpoint,
    MirroredStrategy,
    OneDeviceStrategy,
    ReplicaGenerators,
    merge_call,
)
from variables import PerReplica, ReplicaContextError


def mirrored(size: int = 2) -> MirroredStrategy:
    return MirroredStrategy([f"cpu:{i}" for i in range(size)])


def make(strategy: Any, seed: Any = 42) -> ReplicaGenerators:
    with strategy.scope():
        return ReplicaGenerators(seed)


def draw(strategy: Any, generators: ReplicaGenerators, own: int = 3, common: int = 3) -> Any:
    """What each replica draws: a list of pairs, from its own and from the common stream."""

    def step() -> tuple[Array, Array]:
        return generators.replica().normal(size=own), generators.common.normal(size=common)

    return strategy.local_results(strategy.run(step))


def expected(*spawn_key: int, size: int = 3, seed: Any = 42) -> Array:
    sequence = np.random.SeedSequence(seed)
    for child in spawn_key:
        sequence = sequence.spawn(child + 1)[child]
    return np.random.Generator(np.random.PCG64DXSM(sequence)).normal(size=size)


@pytest.mark.parametrize("size", [1, 2, 5])
def test_streams_are_children_of_the_seed_whatever_the_number_of_replicas(size: int) -> None:
    with mirrored(size) as strategy:
        generators = make(strategy)
        for replica, (own, common) in enumerate(draw(strategy, generators)):
            np.testing.assert_array_equal(common, expected(0))
            np.testing.assert_array_equal(own, expected(1, replica))
        np.testing.assert_array_equal(generators.across.normal(size=3), expected(2))


def test_no_stream_moves_when_another_is_drawn_from() -> None:
    with mirrored() as strategy:
        generators = make(strategy)

        def step(draws: int) -> Array:
            own = generators.replica()
            own.normal(size=draws)
            return own.normal(size=3)

        generators.across.normal(size=100)
        first = strategy.run(step, (PerReplica([0, 1000]),))
        np.testing.assert_array_equal(first.values[0], expected(1, 0))
        np.testing.assert_array_equal(first.values[1], expected(1, 1, size=1003)[1000:])


def test_other_seeds_give_other_streams_and_several_numbers_make_a_seed() -> None:
    with OneDeviceStrategy() as strategy:
        ((own, _),) = draw(strategy, make(strategy, 43))
        assert not np.array_equal(own, expected(1, 0))
        ((own, _),) = draw(strategy, make(strategy, [42, 7]))
        np.testing.assert_array_equal(own, expected(1, 0, seed=[42, 7]))


def test_central_storage_and_plain_code_have_the_same_streams() -> None:
    with CentralStorageStrategy(["cpu:0", "cpu:1"]) as strategy:
        np.testing.assert_array_equal(draw(strategy, make(strategy))[1][0], expected(1, 1))
    plain = ReplicaGenerators(42)
    np.testing.assert_array_equal(plain.replica().normal(size=3), expected(1, 0))
    np.testing.assert_array_equal(plain.common.normal(size=3), expected(0))


def test_a_merge_function_is_outside_of_the_step() -> None:
    with mirrored() as strategy:
        generators = make(strategy)
        drawn = strategy.run(lambda: merge_call(lambda _: generators.across.normal(size=3)))
        np.testing.assert_array_equal(drawn, expected(2))


# --------------------------------------------------------------------- checkpoints


@pytest.mark.parametrize("by_way_of_json", [False, True])
def test_a_restored_state_continues_all_streams_with_the_same_bits(by_way_of_json: bool) -> None:
    with mirrored(3) as strategy:
        generators = make(strategy)
        draw(strategy, generators, own=5, common=4)
        generators.across.integers(10, size=3, dtype=np.int32)  # leaves half a word behind
        state = generators.state()
        after = draw(strategy, generators), generators.across.integers(10, size=5, dtype=np.int32)
        if by_way_of_json:
            state = json.loads(json.dumps(state))
        for restored in (generators, make(strategy, 0)):
            restored.restore(state)
            again = draw(strategy, restored), restored.across.integers(10, size=5, dtype=np.int32)
            np.testing.assert_array_equal(again[0], after[0])
            np.testing.assert_array_equal(again[1], after[1])


def test_a_checkpoint_continues_all_streams_and_warns_of_another_number_of_replicas(tmp_path: Path) -> None:
    with mirrored(2) as strategy, mirrored(1) as one:
        generators, restored, fewer = make(strategy), make(strategy, 0), make(one, 0)
        draw(strategy, generators)
        Checkpoint(random=generators).save(tmp_path / "last")
        after = draw(strategy, generators)
        Checkpoint(random=restored).restore(tmp_path / "last")
        np.testing.assert_array_equal(draw(strategy, restored), after)
        with pytest.warns(UserWarning, match="of 2 replicas, and there are 1 now"):
            Checkpoint(random=fewer).restore(tmp_path / "last")
        np.testing.assert_array_equal(draw(one, fewer)[0], after[0])


def test_generators_taken_before_continue_there_too() -> None:
    generators = ReplicaGenerators(1)
    own, state = generators.replica(), generators.state()
    first = own.normal()
    generators.restore(state)
    assert own.normal() == first


def test_fewer_replicas_continue_and_the_streams_of_the_others_are_kept_until_they_come_back() -> None:
    with mirrored(3) as three, mirrored(2) as two:
        generators, fewer, back = make(three), make(two, 0), make(three, 0)
        draw(three, generators)
        state = generators.state()
        with pytest.warns(
            UserWarning,
            match=r"of 3 replicas, and there are 2 now: the common stream continues, replicas 0 to 1 continue their streams, "
            r"those of replicas 2 to 2 are kept in state\(\)",
        ):
            fewer.restore(state)
        for replica, (own, common) in enumerate(draw(two, fewer)):
            np.testing.assert_array_equal(own, expected(1, replica, size=6)[3:])
            np.testing.assert_array_equal(common, expected(0, size=6)[3:])
        fewer.restore(fewer.state())  # of the same number now: nothing to say
        with pytest.warns(
            UserWarning, match="of 2 replicas, and there are 3 now: .* replicas 0 to 2 continue"
        ):
            back.restore(fewer.state())
        drawn = draw(three, back)
        np.testing.assert_array_equal(drawn[0][0], expected(1, 0, size=9)[6:])
        np.testing.assert_array_equal(drawn[2][0], expected(1, 2, size=6)[3:])


def test_more_replicas_start_fresh_streams_from_the_saved_seed() -> None:
    with mirrored(1) as one, mirrored(3) as three:
        generators, more = make(one), make(three, 0)
        draw(one, generators)
        with pytest.warns(
            UserWarning, match="replicas 0 to 0 continue their streams, replicas 1 to 2 start theirs afresh"
        ):
            more.restore(generators.state())
        drawn = draw(three, more)
        np.testing.assert_array_equal(drawn[0][0], expected(1, 0, size=6)[3:])
        np.testing.assert_array_equal(drawn[2][0], expected(1, 2))
        np.testing.assert_array_equal(drawn[2][1], expected(0, size=6)[3:])


def test_unequal_draws_from_the_common_stream_are_found_when_the_state_is_taken() -> None:
    with mirrored(3) as strategy:
        generators = make(strategy)
        strategy.run(lambda draws: generators.common.normal(size=draws), (PerReplica([1, 2, 1]),))
        with pytest.raises(RuntimeError, match="replica 1 has made other draws from the common stream"):
            generators.state()


SPOILT: dict[str, Callable[[dict[str, Any]], Any]] = {
    "nothing": lambda state: None,
    "no_replicas": lambda state: {**state, "replicas": []},
    "no_common": lambda state: {key: value for key, value in state.items() if key != "common"},
    "seed": lambda state: {**state, "seed": "42"},
    "another_kind": lambda state: {**state, "across": {**state["across"], "bit_generator": "MT19937"}},
    "negative": lambda state: {**state, "across": {**state["across"], "state": {"state": -1, "inc": 1}}},
    "empty": lambda state: {**state, "replicas": [{}]},
}


@pytest.mark.parametrize("spoilt", SPOILT)
def test_what_is_no_state_is_refused_and_changes_nothing(spoilt: str) -> None:
    generators = ReplicaGenerators(42)
    generators.common.normal()
    before = generators.state()
    with pytest.raises(
        ValueError, match=r"got what is no state of generators .* need what state\(\) returned"
    ):
        generators.restore(SPOILT[spoilt](generators.state()))
    assert generators.state() == before


# ------------------------------------------------------------------ where it is used


def test_each_stream_has_its_place_and_says_so() -> None:
    with mirrored() as strategy, mirrored() as other:
        generators, plain = make(strategy), ReplicaGenerators(0)
        inside: list[Callable[[], object]] = [lambda: generators.common, generators.replica]
        outside: list[Callable[[], object]] = [
            lambda: generators.across,
            generators.state,
            lambda: generators.restore({}),
        ]
        for use in inside:
            with pytest.raises(
                ReplicaContextError, match=r"outside of a step, but made under.*outside of them use across"
            ):
                use()
        for use in outside:
            with pytest.raises(
                ReplicaContextError, match=r"inside replica \d, in a step; it belongs outside strategy.run"
            ):
                strategy.run(use)
        with pytest.raises(ReplicaContextError, match=r"in a step of .* but made under"):
            other.run(generators.replica)
        with pytest.raises(ReplicaContextError, match="but made outside any scope"):
            strategy.run(plain.replica)
        with pytest.raises(ReplicaContextError, match=r"make it in strategy.scope\(\)"):
            strategy.run(lambda: ReplicaGenerators(0))


@pytest.mark.parametrize(
    ("seed", "error"),
    [
        (None, TypeError),
        (1.5, TypeError),
        ("a", TypeError),
        (True, TypeError),
        ([], TypeError),
        (-1, ValueError),
    ],
)
def test_a_seed_that_is_none_is_refused(seed: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match=r"ReplicaGenerators: got seed="):
        ReplicaGenerators(seed)
