"""Datasets that a function makes for each pipeline, dealt out to replicas element by element."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NoReturn, final

from collectives.link import Link
from strategies.datasets.dataset import Dataset, from_generator, length
from strategies.datasets.dataset_iterator import DatasetIterator, Epochs
from strategies.datasets.elements import Element, flatten, unflatten
from strategies.datasets.input_options import InputContext, InputOptions, InputReplicationMode, OnUneven
from strategies.datasets.local_replicas import LocalReplicas, Place, keep, refuse_in_replica
from strategies.datasets.stage import UNKNOWN_CARDINALITY, Stage, Traits
from strategies.datasets.workers_in_step import Again, in_step


@final
class DistributedDatasetFromFunction:
    """Datasets that a function made for this process, dealt out to its replicas element by element.

    Elements, usually batches of one replica, are not split. In a last round that is short, the remaining
    replicas get arrays of length 0.
    """

    def __init__(
        self,
        pipelines: Sequence[Dataset],
        replicas: LocalReplicas,
        on_uneven: OnUneven = OnUneven.CONTINUE,
        link: Link | None = None,
        again: Again | None = None,
    ) -> None:
        """As `distribute_from_function`, with the datasets made already: one for all local replicas, or one each."""
        self._dealt = _Dealt(tuple(dataset.stage for dataset in pipelines), replicas, on_uneven)
        self._stage = in_step(
            self._dealt, link, replicas, on_uneven, None, "distribute_datasets_from_function", again
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
    def per_replica_batch_sizes(self) -> tuple[int | None, ...]:
        """Rows of a full batch of each local replica, None where nobody can tell."""
        sizes = [pipeline.traits.batch_size for pipeline in self._dealt.pipelines]
        return tuple(sizes * self._dealt.turns)

    def __iter__(self) -> DatasetIterator:
        return DatasetIterator(self._stage, self._epochs, before_next=refuse_in_replica)

    def __len__(self) -> int:
        return length(self.cardinality, "DistributedDatasetFromFunction")

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "DistributedDatasetFromFunction: it belongs to the replicas of this process, and can't be pickled or copied; need the dataset that it is made of"
        )

    def __bool__(self) -> bool:
        return True  # not by length, which may be unknown

    def __repr__(self) -> str:
        return (
            f"DistributedDatasetFromFunction(per_replica_batch_sizes={self.per_replica_batch_sizes}, "
            f"cardinality={self.cardinality})"
        )


def distribute_from_function(
    dataset_fn: Callable[[InputContext], Dataset | Iterable[Element]],
    num_replicas: int,
    *,
    place: Place = keep,
    wrap: bool | None = None,
    options: InputOptions | None = None,
    num_input_pipelines: int = 1,
    input_pipeline_id: int = 0,
    num_replicas_in_sync: int | None = None,
    first_replica_id: int | None = None,
    link: Link | None = None,
    again: Again | None = None,
) -> DistributedDatasetFromFunction:
    """Call ``dataset_fn`` for this process's pipelines, and deal out what they give.

    Args:
        dataset_fn: makes the dataset of an `InputContext`, with batches of one replica. Called once; with
            replication mode PER_REPLICA once for each local replica.
        num_replicas: replicas of this process.
        place: moves an array to its replica's device.
        wrap: whether leaves are PerReplica; by default if there is more than one replica in all.
        options: how arrays reach the devices, how often the function is called, and what happens when only some
            replicas have data left.
        num_input_pipelines: workers.
        input_pipeline_id: which worker this is.
        num_replicas_in_sync: replicas of all workers; by default as many on each as here.
        first_replica_id: the global id of this process's first replica, by default likewise.
        link: to the other workers, which then all call this; by it they make equally many steps.
        again: in an elastic job, as `in_step` has it.

    Raises:
        TypeError: ``dataset_fn`` doesn't return an iterable.
        ValueError: replica numbers that don't fit together.
    """
    options = InputOptions() if options is None else options
    replicas = LocalReplicas.of_worker(
        num_replicas,
        num_workers=num_input_pipelines,
        worker_id=input_pipeline_id,
        num_total=num_replicas_in_sync,
        first_id=first_replica_id,
        place=place,
        wrap=wrap,
        options=options,
    )
    if options.replication_mode is InputReplicationMode.PER_WORKER:
        contexts = [InputContext(num_input_pipelines, input_pipeline_id, replicas.num_total)]
    elif num_input_pipelines == 1:
        contexts = [InputContext(num_replicas, replica, num_replicas) for replica in range(num_replicas)]
    else:
        raise NotImplementedError(
            f"distribute_datasets_from_function: got replication mode PER_REPLICA and {num_input_pipelines} workers; "
            "need PER_WORKER, or one worker"
        )
    pipelines = []
    for context in contexts:
        made = dataset_fn(context)
        if not isinstance(made, Iterable):
            raise TypeError(
                f"distribute_datasets_from_function: the function returned {type(made).__name__}; need a Dataset, or "
                "another iterable of elements — return it"
            )
        pipelines.append(made if isinstance(made, Dataset) else from_generator(made))
    return DistributedDatasetFromFunction(pipelines, replicas, options.uneven, link, again)


_MISSING = object()


@final
@dataclass(frozen=True, eq=False)
class _Dealt(Stage):
    """The steps in which whole elements are dealt to the local replicas.

    Attributes:
        pipelines: one, whose elements go round, or one for each replica.
        replicas: who gets them.
        on_uneven: what happens in a round with elements for some of them only.
    """

    pipelines: tuple[Stage, ...]
    replicas: LocalReplicas
    on_uneven: OnUneven

    @property
    def turns(self) -> int:
        """How many elements of a pipeline make one step."""
        return self.replicas.num_local // len(self.pipelines)

    @property
    def traits(self) -> Traits:
        known = [pipeline.traits for pipeline in self.pipelines]
        cardinalities = [traits.cardinality for traits in known]
        stops = self.on_uneven is OnUneven.STOP
        of_all = max(cardinalities) if min(cardinalities) >= 0 else min(cardinalities)
        if stops and UNKNOWN_CARDINALITY not in cardinalities:
            of_all = min((length for length in cardinalities if length >= 0), default=of_all)
        if of_all > 0:
            of_all = of_all // self.turns if stops else -(-of_all // self.turns)
        return Traits(
            cardinality=of_all,
            shuffle_seeds=tuple(seed for traits in known for seed in traits.shuffle_seeds),
            unseeded=any(traits.unseeded for traits in known),
            one_shot=any(traits.one_shot for traits in known),
        )

    def open(self, epoch: int, skip: int) -> Iterator[Element]:
        # One iterator several times over, so that zip_longest takes its elements in turn.
        return self._steps([p.open(epoch, skip * self.turns) for p in self.pipelines] * self.turns)

    def _steps(self, elements: list[Iterator[Element]]) -> Iterator[Element]:
        for step in itertools.zip_longest(*elements, fillvalue=_MISSING):
            whole = all(element is not _MISSING for element in step)
            if not whole and self.on_uneven is OnUneven.STOP:
                return
            yield self._joined(step if whole else self._filled_up(step))

    def _joined(self, step: Sequence[Element]) -> Element:
        flat = [flatten(element) for element in step]
        _, structure = flat[0]
        for replica, (_, other) in enumerate(flat):
            if other != structure:
                raise ValueError(
                    f"distribute_datasets_from_function: in one step replica {replica} got an element of structure "
                    f"{other}, replica 0 {structure}; need one structure — make them alike with map()"
                )
        columns = zip(*(leaves for leaves, _ in flat), strict=True)
        return unflatten(structure, [self.replicas.joined(column) for column in columns])

    def _filled_up(self, step: Sequence[Element]) -> list[Element]:
        """The step with empty batches for the replicas that have none."""
        present = [element for element in step if element is not _MISSING]
        if self.on_uneven is OnUneven.ERROR:
            raise ValueError(
                f"distribute_datasets_from_function: the last round has elements for {len(present)} of "
                f"{self.replicas.num_local} replicas, and on_uneven is 'error'; need whole rounds — or on_uneven='continue', which "
                "gives the others empty batches, or 'stop'"
            )
        leaves, structure = flatten(present[0])
        if not all(getattr(leaf, "shape", ()) for leaf in leaves):
            raise ValueError(
                f"distribute_datasets_from_function: the last round has elements for {len(present)} of "
                f"{self.replicas.num_local} replicas, and scalars have no empty form for the others; need whole rounds, or "
                "batches — call batch(), or take() a multiple of the number of replicas"
            )
        empty = unflatten(structure, [leaf[:0] for leaf in leaves])
        return [empty if element is _MISSING else element for element in step]
