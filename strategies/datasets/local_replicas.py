"""The replicas that a dataset feeds: where they stand among all, and how their arrays reach them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias, final

from strategies.datasets.input_options import InputOptions
from variables.replica_context import current_replica
from variables.values import PerReplica

Place: TypeAlias = Callable[[Any, int], Any]
"""Moves an array to the device of a local replica, by its index in this process."""


def keep(array: Any, local_replica: int) -> Any:  # noqa: ARG001 - a Place
    """Leaves an array where it is: the `Place` of replicas on the host."""
    return array


@final
@dataclass(frozen=True)
class LocalReplicas:
    """The replicas of this process.

    Attributes:
        num_local: how many they are.
        first_id: the global id of the first one; the others follow.
        num_total: replicas of all workers.
        worker_id: which worker this process is.
        num_workers: workers in all.
        place: moves arrays to devices.
        wrap: whether values are PerReplica rather than bare.
        numbers: gives first_id, num_total, worker_id and num_workers as they are now, where they may change; None where
            they stay.

    Raises:
        ValueError: numbers that don't fit together.
    """

    num_local: int
    first_id: int
    num_total: int
    worker_id: int
    num_workers: int
    place: Place
    wrap: bool
    numbers: Callable[[], tuple[int, int, int, int]] | None = None

    def __post_init__(self) -> None:
        last = self.first_id + self.num_local - 1
        fits = self.num_local >= 1 and 0 <= self.worker_id < self.num_workers and self.first_id >= 0
        alone = self.num_workers > 1 or self.num_local == self.num_total
        if not (fits and last < self.num_total and alone):
            raise ValueError(
                f"distribute: got replicas {self.first_id} to {last} of {self.num_total} on worker {self.worker_id} of "
                f"{self.num_workers}; need at least one replica here, and all of them on the workers together"
            )
        if self.num_local > 1 and not self.wrap:
            raise ValueError(f"distribute: got wrap=False for {self.num_local} replicas; need one to be bare")

    @classmethod
    def of_worker(
        cls,
        num_local: int,
        *,
        num_workers: int = 1,
        worker_id: int = 0,
        num_total: int | None = None,
        first_id: int | None = None,
        place: Place = keep,
        wrap: bool | None = None,
        options: InputOptions,
        numbers: Callable[[], tuple[int, int, int, int]] | None = None,
    ) -> LocalReplicas:
        """By default all workers have as many replicas as this one, and values are wrapped if there are several."""
        total = num_local * num_workers if num_total is None else num_total
        return cls(
            num_local,
            num_local * worker_id if first_id is None else first_id,
            total,
            worker_id,
            num_workers,
            place if options.experimental_fetch_to_device else keep,
            total > 1 if wrap is None else wrap,
            numbers,
        )

    @property
    def now(self) -> LocalReplicas:
        """These replicas, with the numbers that they have at this time."""
        if self.numbers is None:
            return self
        numbers = self.numbers()
        known: tuple[tuple[int, int, int, int], LocalReplicas] | None = self.__dict__.get("_now")
        if known is None or known[0] != numbers:
            first_id, num_total, worker_id, num_workers = numbers
            known = (
                numbers,
                replace(
                    self, first_id=first_id, num_total=num_total, worker_id=worker_id, num_workers=num_workers
                ),
            )
            self.__dict__["_now"] = known  # asked for several times in each step, and changes seldom
        return known[1]

    def joined(self, arrays: Sequence[Any], whole: Any = None) -> Any:
        """One leaf of a step, from the arrays of the replicas, which are shares of ``whole`` if that is given."""
        if self.place is not keep:
            arrays = [self.place(array, replica) for replica, array in enumerate(arrays)]
        return PerReplica(arrays, whole) if self.wrap else arrays[0]


def refuse_in_replica(iterator: object = None) -> None:  # noqa: ARG001  # what is called before each element gets it
    """Checks that the caller is not in a step.

    Raises:
        ValueError: he is.
    """
    replica = current_replica()
    if replica is not None:
        raise ValueError(
            f"next: got a call in replica {replica.replica_id_in_sync_group}, and a step feeds all replicas at once; need "
            "a call outside strategy.run — pass the element to run() in args"
        )
