"""What users may say about how replicas communicate."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest

from collectives import (
    CommunicationImplementation,
    CommunicationOptions,
    Device,
    HierarchicalCopyAllReduce,
    InProcessCommunicator,
    NcclAllReduce,
    ReductionToOneDevice,
)
from collectives.communication_options import DEFAULT_TIMEOUT
from collectives.rendezvous import Rendezvous
from collectives.selection import local_communicators, require_available

CPUS = [Device("cpu", 0), Device("cpu", 1)]


def test_without_a_timeout_the_default_counts() -> None:
    assert CommunicationOptions().timeout == DEFAULT_TIMEOUT
    assert CommunicationOptions(timeout_seconds=0.5).timeout == 0.5


@pytest.mark.parametrize("timeout", [0, -1, math.inf, math.nan, 1e300])
def test_a_timeout_is_a_time_that_the_system_can_wait(timeout: float) -> None:
    with pytest.raises(
        ValueError, match=f"timeout_seconds: got {timeout}; need seconds above 0".replace("+", r"\+")
    ):
        CommunicationOptions(timeout_seconds=timeout)


def test_a_time_that_is_no_number_is_refused() -> None:
    with pytest.raises(ValueError, match="timeout_seconds: got '3'; need seconds above 0"):
        CommunicationOptions(timeout_seconds="3")  # type: ignore[arg-type]


@pytest.mark.parametrize("size", [-1, 0.5, "1MB", None])
def test_a_size_that_is_none_is_refused(size: Any) -> None:
    with pytest.raises(ValueError, match=f"bytes_per_pack: got {size!r}; need bytes >= 0, 0 to choose"):
        CommunicationOptions(bytes_per_pack=size)


@pytest.mark.parametrize("name", ["NCCL", "nccl", CommunicationImplementation.NCCL])
def test_an_implementation_is_a_member_or_its_name(name: Any) -> None:
    assert CommunicationOptions(implementation=name).implementation is CommunicationImplementation.NCCL


def test_an_unknown_implementation_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match="implementation: got 'MAGIC'; need one of AUTO, RING, NCCL"):
        CommunicationOptions(implementation="MAGIC")


def test_options_do_not_change() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        CommunicationOptions().bytes_per_pack = 1  # type: ignore[misc]  # the point of the test


def test_merging_takes_what_was_said_in_the_other() -> None:
    mine = CommunicationOptions(bytes_per_pack=100, timeout_seconds=5)
    other = CommunicationOptions(timeout_seconds=7, implementation="RING")
    assert mine.merge(other) == CommunicationOptions(
        bytes_per_pack=100, timeout_seconds=7, implementation="RING"
    )
    assert mine.merge(None) is mine
    assert mine.merge(CommunicationOptions()) == mine


@pytest.mark.parametrize("kind", [HierarchicalCopyAllReduce, NcclAllReduce])
def test_packs_are_counted_from_0(kind: type[HierarchicalCopyAllReduce]) -> None:
    assert kind().num_packs == 1
    assert kind(num_packs=0).num_packs == 0
    with pytest.raises(ValueError, match=f"{kind.__name__}: got num_packs=-1; need 0 or more"):
        kind(num_packs=-1)


# -------------------------------------------------------------------------------- choosing a backend


@pytest.mark.parametrize(
    "ops", [None, ReductionToOneDevice(), ReductionToOneDevice("cpu:0"), HierarchicalCopyAllReduce(2)]
)
def test_cpus_have_every_way_but_nccl(ops: Any) -> None:
    require_available(CPUS, CommunicationOptions(), ops, "MirroredStrategy")
    ends = local_communicators(Rendezvous(2, 1), CommunicationOptions(), ops)
    assert [end.rank for end in ends] == [0, 1]
    assert all(isinstance(end, InProcessCommunicator) for end in ends)


@pytest.mark.parametrize(
    ("options", "ops"),
    [(CommunicationOptions(), NcclAllReduce()), (CommunicationOptions(implementation="NCCL"), None)],
    ids=["ops", "implementation"],
)
def test_nccl_says_what_it_needs(options: CommunicationOptions, ops: NcclAllReduce | None) -> None:
    with pytest.raises(
        RuntimeError, match="devices are cpu:0, cpu:1; NCCL needs NVIDIA GPUs, CuPy and nvidia-nccl — use"
    ):
        require_available(CPUS, options, ops, "MirroredStrategy")


def test_what_is_no_way_to_communicate_is_refused_with_the_known_ones() -> None:
    wrong: Any = "nccl"
    with pytest.raises(
        TypeError, match="got cross_device_ops='nccl'; need one of ReductionToOneDevice, Hierarchical"
    ):
        require_available(CPUS, CommunicationOptions(), wrong, "MirroredStrategy")
