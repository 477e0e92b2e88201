"""Datasets of global batches, split over replicas."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import NoReturn, final

from collectives.link import Link
from strategies.datasets.dataset import Dataset, from_generator, length
from strategies.datasets.dataset_iterator import DatasetIterator, Epochs
from strategies.datasets.elements import Element, count_rows, flatten, unflatten
from strategies.datasets.input_options import AutoShardPolicy, InputOptions, InputReplicationMode, OnUneven
from strategies.datasets.local_replicas import LocalReplicas, Place, keep, refuse_in_replica
from strategies.datasets.splitting import share_bounds, share_sizes
from strategies.datasets.stage import UNKNOWN_CARDINALITY, Stage, Traits
from strategies.datasets.workers_in_step import Again, in_step


@final
class DistributedDataset:
    """A dataset of global batches, split over replicas.

    Every batch is split along the first axis of all its arrays, by its own size: as evenly as can be, the
    first replicas one row more. A replica without rows gets arrays of length 0. Each step is an element
    with a PerReplica for every leaf; shares on the host are views of the batch. With one replica in all,
    elements come as they are, batches or not.

    Every iteration is a new epoch of the source, counted by this object: make it once, before the loop over
    epochs. Nothing is read ahead unless the source says so with `Dataset.prefetch`.
    """

    def __init__(
        self,
        source: Dataset | Iterable[Element],
        num_replicas: int,
        *,
        place: Place = keep,
        wrap: bool | None = None,
        options: InputOptions | None = None,
        auto_shard_policy: AutoShardPolicy | str | None = None,
        num_input_pipelines: int = 1,
        input_pipeline_id: int = 0,
        num_replicas_in_sync: int | None = None,
        first_replica_id: int | None = None,
        numbers: Callable[[], tuple[int, int, int, int]] | None = None,
        before_next: Callable[[object], None] = refuse_in_replica,
        link: Link | None = None,
        again: Again | None = None,
    ) -> None:
        """Describes the distribution; nothing is iterated yet.

        Args:
            source: a dataset, or any iterable of nested arrays. One that is an iterator gives one epoch.
            num_replicas: replicas of this process.
            place: moves a share to its replica's device.
            wrap: whether leaves are PerReplica; by default if there is more than one replica in all.
            options: how shares reach the devices, and what happens when only some replicas have data left.
            auto_shard_policy: which part of the data this worker sees; by default as the dataset says.
            num_input_pipelines: workers, each with this dataset.
            input_pipeline_id: which worker this is.
            num_replicas_in_sync: replicas of all workers; by default as many on each as here.
            first_replica_id: the global id of this process's first replica, by default likewise.
            numbers: these numbers as they are now, where they may change; as `LocalReplicas` has them.
            before_next: called before each element, with the iterator.
            link: to the other workers, which then all call this; by it they make equally many steps.
            again: in an elastic job, as `in_step` has it.

        Raises:
            NotImplementedError: replication mode PER_REPLICA, which only a dataset function can have.
            TypeError: ``source`` is a single array or mapping, or cannot be iterated.
            ValueError: replica numbers that don't fit together, a policy that can't be kept.
        """
        options = InputOptions() if options is None else options
        if options.replication_mode is InputReplicationMode.PER_REPLICA:
            raise NotImplementedError(
                "distribute_dataset: got replication mode PER_REPLICA; need PER_WORKER, as one dataset is split over "
                "all replicas — use distribute_datasets_from_function"
            )
        replicas = LocalReplicas.of_worker(
            num_replicas,
            num_workers=num_input_pipelines,
            worker_id=input_pipeline_id,
            num_total=num_replicas_in_sync,
            first_id=first_replica_id,
            place=place,
            wrap=wrap,
            options=options,
            numbers=numbers,
        )
        self._before_next = before_next
        dataset = source if isinstance(source, Dataset) else from_generator(source)
        known = dataset.stage.traits
        policy = known.auto_shard_policy if auto_shard_policy is None else auto_shard_policy
        policy = AutoShardPolicy.parse(policy)
        if num_input_pipelines > 1:
            _require_shardable(policy, known, replicas)
        sees_all = num_input_pipelines > 1 and policy is AutoShardPolicy.OFF
        self._split = _Split(dataset.stage, replicas, sees_all, options.uneven)
        self._stage = in_step(
            self._split, link, replicas, options.uneven, policy, "distribute_dataset", again
        )
        self._epochs = Epochs()

    @property
    def stage(self) -> Stage:
        """The description of the steps, for what is built upon datasets."""
        return self._stage

    @property
    def cardinality(self) -> int:
        """How many steps, or `INFINITE_CARDINALITY` (-1), or `UNKNOWN_CARDINALITY` (-2)."""
        return self._stage.traits.cardinality

    @property
    def global_batch_size(self) -> int | None:
        """Rows of a full batch of the dataset, over all replicas; None if its description doesn't tell."""
        return self._stage.traits.batch_size

    @property
    def per_replica_batch_sizes(self) -> tuple[int, ...] | None:
        """Rows that each local replica gets of a full batch, in a first step; None if nobody can tell."""
        rows = self.global_batch_size
        return None if rows is None else self._split.share_sizes(rows)

    def __iter__(self) -> DatasetIterator:
        return DatasetIterator(self._stage, self._epochs, before_next=self._before_next)

    def __len__(self) -> int:
        return length(self.cardinality, "DistributedDataset")

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "DistributedDataset: it belongs to the replicas of this process, and can't be pickled or copied; need the dataset that it is made of"
        )

    def __bool__(self) -> bool:
        return True  # not by length, which may be unknown

    def __repr__(self) -> str:
        return (
            f"DistributedDataset(global_batch_size={self.global_batch_size}, "
            f"per_replica_batch_sizes={self.per_replica_batch_sizes}, cardinality={self.cardinality})"
        )


@final
@dataclass(frozen=True, eq=False)
class _Split(Stage):
    """The steps into which global batches are split.

    Attributes:
        inner: global batches, the same on every worker unless it sees all.
        replicas: who gets the shares.
        sees_all: whether this worker works through all shares of a batch, in as many steps as there are
            workers. Its sizes then begin with those of its own replicas, so that all workers' shares in a
            step together are one batch's size.
        on_uneven: what happens with a batch of fewer rows than there are replicas.
    """

    inner: Stage
    replicas: LocalReplicas
    sees_all: bool
    on_uneven: OnUneven

    @property
    def traits(self) -> Traits:
        known = self.inner.traits
        cardinality = (
            known.cardinality * self._steps_per_batch if known.cardinality > 0 else known.cardinality
        )
        if self.on_uneven is OnUneven.STOP and self.replicas.num_total > 1 and cardinality:
            cardinality = UNKNOWN_CARDINALITY  # how many rows a last batch has is not known before
        return replace(known, cardinality=cardinality)

    def open(self, epoch: int, skip: int) -> Iterator[Element]:
        batch, step = divmod(skip, self._steps_per_batch)
        return itertools.islice(self._steps(self.inner.open(epoch, batch)), step, None)

    def share_sizes(self, num_rows: int) -> tuple[int, ...]:
        """The rows of the local replicas in the first step of a batch of ``num_rows``."""
        sizes = share_sizes(num_rows, self.replicas.now.num_total, self._rotation)
        return tuple(sizes[share] for share in self._rounds()[0])

    @property
    def _steps_per_batch(self) -> int:
        return self.replicas.now.num_workers if self.sees_all else 1

    @property
    def _rotation(self) -> int:
        return self.replicas.now.first_id if self.sees_all else 0

    def _rounds(self) -> list[range]:
        """For each step of a batch, the shares of the local replicas."""
        count = self.replicas.num_local
        first = 0 if self.sees_all else self.replicas.now.first_id
        starts = range(first, first + self._steps_per_batch * count, count)
        return [range(start, start + count) for start in starts]

    def _steps(self, batches: Iterator[Element]) -> Iterator[Element]:
        for batch in batches:
            replicas, rotation, rounds = self.replicas.now, self._rotation, self._rounds()
            leaves, structure = flatten(batch)
            # Whole batches are needed again if a process is lost in the step.
            keeps = replicas.numbers is not None and not self.sees_all
            if replicas.num_total == 1:
                yield unflatten(
                    structure, [replicas.joined([leaf], leaf if keeps else None) for leaf in leaves]
                )
                continue
            rows = count_rows(leaves, structure, "distribute_dataset", "batch() the dataset first")
            if rows < replicas.num_total and self.on_uneven is not OnUneven.CONTINUE:
                if self.on_uneven is OnUneven.STOP:
                    return
                raise ValueError(
                    f"distribute_dataset: got a batch of {rows} rows for {replicas.num_total} replicas and on_uneven='error'; need a "
                    "row for each — batch(..., drop_remainder=True), or on_uneven='continue', which makes empty shares"
                )
            bounds = share_bounds(rows, replicas.num_total, rotation)
            for shares in rounds:
                parts = [slice(bounds[share], bounds[share + 1]) for share in shares]
                yield unflatten(
                    structure,
                    [
                        replicas.joined([leaf[part] for part in parts], leaf if keeps else None)
                        for leaf in leaves
                    ],
                )


def _require_shardable(policy: AutoShardPolicy, known: Traits, replicas: LocalReplicas) -> None:
    """Refuse what several workers would see differently from what the policy says."""
    workers = replicas.num_workers
    if policy is AutoShardPolicy.FILE:
        raise ValueError(
            f"distribute_dataset: got auto_shard_policy FILE and {workers} workers; need a dataset that is read from "
            "files, which ours are not — take DATA, or give each worker its files with "
            "distribute_datasets_from_function"
        )
    if policy is AutoShardPolicy.OFF and replicas.num_total != replicas.num_local * workers:
        raise ValueError(
            f"distribute_dataset: got auto_shard_policy OFF with {replicas.num_local} replicas here and "
            f"{replicas.num_total} on {workers} workers; need as many on each — take DATA"
        )
    if policy is not AutoShardPolicy.OFF and known.unseeded:
        raise ValueError(
            f"distribute_dataset: got a shuffle without a seed and {workers} workers; need one order on all of them, "
            "or some rows are seen twice and others never — pass seed= to shuffle()"
        )
