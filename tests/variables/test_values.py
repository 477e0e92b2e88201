"""Distributed values in nested structures."""

from __future__ import annotations

from collections import OrderedDict, namedtuple
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import pytest

from variables import Mirrored, PerReplica
from variables.values import (
    DistributedValues,
    flatten,
    has_distributed,
    is_distributed,
    map_structure,
    regroup,
    select,
)


class Pair(NamedTuple):
    x: Any
    y: Any


Point = namedtuple("Point", "x y")  # the other way to make one

STRUCTURES: dict[str, Any] = {
    "leaf": 1,
    "none": None,
    "text": "abc",
    "list": [1, 2],
    "tuple": (1, 2),
    "empty list": [],
    "empty tuple": (),
    "empty dict": {},
    "dict": {"b": 1, "a": 2},
    "numbers as keys": {2: 1, 1: 2},
    "mixed keys": {"a": 1, 2: 3},
    "ordered dict": OrderedDict([("b", 1), ("a", 2)]),
    "named tuple": Pair(1, 2),
    "old named tuple": Point(1, 2),
    "nones": [None, {"a": None}],
    "nested": {"list": [1, (2, Pair(3, {"deep": [4]}))], "none": None},
}

every_structure = pytest.mark.parametrize("structure", STRUCTURES.values(), ids=STRUCTURES)


@every_structure
def test_mapping_keeps_the_structure_its_types_and_the_order_of_keys(structure: Any) -> None:
    same = map_structure(lambda leaf: leaf, structure)
    assert same == structure
    assert type(same) is type(structure)
    if isinstance(structure, dict):
        assert list(same) == list(structure)


@every_structure
def test_leaves_go_back_to_their_places(structure: Any) -> None:
    leaves, rebuild = flatten(structure)
    assert rebuild(leaves) == structure
    wrapped = rebuild([("leaf", leaf) for leaf in leaves])
    assert map_structure(lambda leaf: leaf, structure) == structure
    assert len(flatten(wrapped)[0]) == 2 * len(leaves)


def test_none_is_a_leaf() -> None:
    assert map_structure(lambda leaf: "nothing" if leaf is None else leaf, [None, (None, 1)]) == [
        "nothing",
        ("nothing", 1),
    ]


def test_several_structures_are_mapped_together_and_must_be_alike() -> None:
    assert map_structure(lambda a, b: a + b, {"x": [1, 2]}, {"x": [10, 20]}) == {"x": [11, 22]}
    with pytest.raises(ValueError, match=r"[Ee]xpected"):
        map_structure(lambda a, b: a, [1, 2], [1, 2, 3])


def test_arrays_are_leaves() -> None:
    array = np.ones((2, 2))
    assert flatten([array])[0][0] is array


# --------------------------------------------------------------------------------------------- select


def per_replica(structure: Any) -> Any:
    return map_structure(lambda leaf: PerReplica([leaf, ("other", leaf)]), structure)


@every_structure
def test_a_replica_sees_its_own_components(structure: Any) -> None:
    distributed = per_replica(structure)
    assert select(distributed, 0) == structure
    assert type(select(distributed, 0)) is type(structure)
    assert flatten(select(distributed, 1)) is not None
    assert len(flatten(select(distributed, 1))[0]) == 2 * len(flatten(structure)[0])


def test_what_is_not_distributed_is_passed_as_it_is() -> None:
    structure = [1, {"a": np.ones(2)}]
    assert select(structure, 1) is structure
    mixed = [PerReplica([1, 2]), structure[1], Mirrored([5, 5])]
    assert select(mixed, 1)[0] == 2
    assert select(mixed, 1)[1]["a"] is structure[1]["a"]
    assert select(mixed, 1)[2] == 5


def test_components_may_be_structures_themselves() -> None:
    assert select(PerReplica([[1, 2], {"a": 3}]), 1) == {"a": 3}


def test_distributed_values_are_found_at_any_depth() -> None:
    assert has_distributed(PerReplica([1]))
    assert has_distributed(([{"a": (Mirrored([1]),)}],))
    assert not has_distributed([1, {"a": None}])
    assert not has_distributed(None)
    assert is_distributed(PerReplica([1]))
    assert not is_distributed([PerReplica([1])])


# -------------------------------------------------------------------------------------------- regroup


@every_structure
def test_regrouping_undoes_selecting(structure: Any) -> None:
    by_replica = [map_structure(partial("{}:{}".format, replica), structure) for replica in range(2)]
    grouped = regroup(by_replica)
    assert type(grouped) is type(structure) or not isinstance(structure, (list, tuple, dict))
    assert select(grouped, 0) == by_replica[0]
    assert select(grouped, 1) == by_replica[1]
    assert all(isinstance(leaf, PerReplica) for leaf in flatten(grouped)[0])


def test_the_same_object_on_all_replicas_stands_for_itself() -> None:
    array = np.ones(2)
    assert regroup([array, array]) is array
    assert regroup([[array, 1], [array, 1]])[0] is array
    assert isinstance(regroup([array, array], always=True), PerReplica)


def test_equal_arrays_that_are_not_the_same_object_do_not() -> None:
    grouped = regroup([np.ones(2), np.ones(2)])
    assert isinstance(grouped, PerReplica)
    assert len(grouped.values) == 2


def test_nones_on_all_replicas_are_none() -> None:
    assert regroup([None, None]) is None
    grouped = regroup([None, 1])
    assert isinstance(grouped, PerReplica)
    assert grouped.values == (None, 1)


def test_leaves_are_wrapped_as_asked() -> None:
    assert isinstance(regroup([1, 2], Mirrored), Mirrored)
    assert regroup([1, 2], tuple) == (1, 2)


@pytest.mark.parametrize(
    "other",
    [[1], [1, 2, 3], (1, 2), {"a": 1}, 1, None, [1, [2]], Pair(1, 2)],
    ids=["shorter", "longer", "tuple", "dict", "leaf", "none", "deeper", "named_tuple"],
)
def test_structures_that_differ_are_refused_and_the_replica_is_named(other: Any) -> None:
    with pytest.raises(
        ValueError,
        match=r"the replicas' results differ in structure: replica 0 has .*, replica 2 has .*same containers",
    ):
        regroup([[1, 2], [1, 2], other])


def test_keys_that_differ_are_refused_and_their_order_does_not_matter() -> None:
    with pytest.raises(ValueError, match="differ in structure"):
        regroup([{"a": 1}, {"b": 1}])
    grouped = regroup([{"a": 1, "b": 2}, {"b": 20, "a": 10}])
    assert list(grouped) == ["a", "b"]
    assert select(grouped, 1) == {"a": 10, "b": 20}


def test_its_words_number_the_components() -> None:
    assert repr(PerReplica([1, "a"])) == "PerReplica(0: 1, 1: 'a')"
    assert isinstance(PerReplica([1]), DistributedValues)


def test_a_distributed_value_is_no_number_and_says_what_makes_one() -> None:
    with pytest.raises(ValueError, match="PerReplica: got no components"):
        PerReplica([])
    for convert in (float, int, np.asarray, np.sum):
        with pytest.raises(TypeError, match=r"holds one value for each of 2 replicas.*use strategy\.reduce"):
            convert(PerReplica([1, 2]))
