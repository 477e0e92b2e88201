"""Datasets of several workers that need not be equally long: all workers make the same number of steps.

Where the lengths are known and equal, nothing is communicated. Elsewhere the workers agree before each step whether anybody has
data left: one small reduction. In an elastic job they do so always, as workers are lost and come, and with them their data.
"""

from __future__ import annotations

import pickle
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias, final

import numpy as np

from collectives.calls import Call
from collectives.errors import CollectiveAbortedError, common, in_words
from collectives.link import Link
from collectives.reduce_op import ReduceOp
from strategies.datasets.elements import Element, flatten, unflatten
from strategies.datasets.input_options import AutoShardPolicy, OnUneven
from strategies.datasets.local_replicas import LocalReplicas
from strategies.datasets.stage import INFINITE_CARDINALITY, UNKNOWN_CARDINALITY, Stage, Traits
from variables.values import PerReplica

Again: TypeAlias = Callable[[Callable[[], Any]], Any]
"""Does what it is given, perhaps more than once, and returns what that has returned."""

_HAS, _IS_OUT, _LACKS_FORM, _FAILED = range(4)
"""What the workers tell one another before each step: flags, of which the maximum says whether it is so on any of them."""

_NEXT = Call("next", ("of a distributed dataset",))


def in_step(
    stage: Stage,
    link: Link | None,
    replicas: LocalReplicas,
    on_uneven: OnUneven,
    policy: AutoShardPolicy | None,
    where: str,
    again: Again | None = None,
) -> Stage:
    """The same steps, as many on each worker; all workers call it.

    Args:
        stage: this worker's steps.
        link: to the other workers; None where there are none.
        replicas: who gets the elements.
        on_uneven: what happens when some workers have no data left and others have.
        policy: how the data is shared; None where each worker has its own.
        where: what the user called.
        again: in an elastic job, does what all workers do together, again where some are lost in it. The link is then one that
            does not connect a newcomer yet.

    Raises:
        ValueError: the workers share their data by different policies, or differ in what they do about uneven data.
    """
    is_shared = policy is not None and policy is not AutoShardPolicy.OFF
    if link is None or (again is not None and is_shared):
        return stage  # shared data has as many steps for whoever is there
    if again is not None and not link.is_connected:
        return _InStep(stage, link, replicas, on_uneven, (UNKNOWN_CARDINALITY,), again)
    act = _once if again is None else again
    own = (stage.traits.cardinality, None if policy is None else policy.name, on_uneven.name)
    told: list[Any] = act(lambda: link.gather_objects(Call(where), [own] * replicas.num_local))
    by_worker = [told[start] for start in link.starts[:-1]]
    if len({kind[1:] for kind in by_worker}) > 1:
        listed = "; ".join(
            f"worker {w} has policy {p or 'of a function'}, on_uneven {u}"
            for w, (_, p, u) in enumerate(by_worker)
        )
        raise common(ValueError(f"{where}: {listed}; need the same on all workers"))
    lengths = [cardinality for cardinality, *_ in by_worker]
    is_even = len(set(lengths)) == 1 and lengths[0] != UNKNOWN_CARDINALITY
    if is_shared and link.process == 0 and len({n for n in lengths if n >= 0}) > 1:
        warnings.warn(
            f"{where}: the workers' datasets have {', '.join(map(str, lengths))} steps, and by policy {own[1]} each takes only "
            "its own replicas' rows of every batch; need the same dataset on all workers — for data of their own "
            "take auto_shard_policy='OFF' or distribute_datasets_from_function",
            stacklevel=4,
        )
    if is_even and again is None:
        return stage
    return _InStep(stage, link, replicas, on_uneven, tuple(lengths), act)


def _once(work: Callable[[], Any]) -> Any:
    return work()


@final
@dataclass(frozen=True, eq=False)
class _InStep(Stage):
    """Steps that all workers make together.

    Attributes:
        inner: this worker's own.
        link: to the other workers.
        replicas: who gets the elements.
        on_uneven: what happens when only some workers have data.
        lengths: cardinalities, by worker.
        again: does what all workers do together, again where some are lost in it.
    """

    inner: Stage
    link: Link
    replicas: LocalReplicas
    on_uneven: OnUneven
    lengths: tuple[int, ...]
    again: Again

    @property
    def traits(self) -> Traits:
        known = self.inner.traits
        if UNKNOWN_CARDINALITY in self.lengths:
            return replace(known, cardinality=UNKNOWN_CARDINALITY)
        if self.on_uneven is OnUneven.CONTINUE and INFINITE_CARDINALITY in self.lengths:
            return replace(known, cardinality=INFINITE_CARDINALITY)
        finite = [length for length in self.lengths if length >= 0]
        return replace(known, cardinality=max(finite) if self.on_uneven is OnUneven.CONTINUE else min(finite))

    def open(self, epoch: int, skip: int) -> Iterator[Element]:
        elements: Iterator[Element] | None = None
        empty: Element | None = None
        is_out = False
        while True:
            element: Element | None = None
            failure: Exception | None = None
            try:
                if elements is None:  # only now, as it may fail on one worker only
                    elements = self.inner.open(epoch, skip)
                if not is_out:
                    element = next(elements, None)
                    is_out = element is None
                if is_out and empty is _HAS_NO_FORM:
                    raise ValueError(
                        f"next: worker {self.link.process} has no data left while others have, and scalars have no empty form "
                        "that it could get; need batches — call batch() on the dataset, or take on_uneven='stop'"
                    )
                if empty is None and element is not None:
                    empty = _without_rows(element)
            except Exception as error:  # noqa: BLE001  # raised when the others know
                failure = error
            lacks = is_out and empty is None
            told = self._agree(element is not None, is_out, lacks, failure is not None)
            if told[_FAILED]:
                self._raise(failure)
            if not told[_HAS]:
                return
            if told[_IS_OUT] and self.on_uneven is not OnUneven.CONTINUE:
                if self.on_uneven is OnUneven.ERROR:
                    self._refuse(is_out)
                return
            if told[_LACKS_FORM]:
                form = self._form_of_others(empty)
                empty = form if empty is None else empty
            yield empty if is_out else element

    def _agree(self, *flags: bool) -> Sequence[bool]:
        own = np.array(flags, np.uint8)
        result = np.empty(len(flags), np.uint8)
        call = Call(_NEXT.kind, (*_NEXT.detail, (own.dtype, own.shape)))
        self.again(lambda: self.link.fold(call, ReduceOp.MAX, [[own]] * self.replicas.num_local, [[result]]))
        return [bool(flag) for flag in result]

    def _told(self, what: str, value: object) -> list[Any]:
        """Every worker's value, by worker."""
        call = Call(_NEXT.kind, (*_NEXT.detail, what))
        told = self.again(lambda: self.link.gather_objects(call, [value] * self.replicas.num_local))
        return [told[start] for start in self.link.starts[:-1]]

    def _raise(self, own: Exception | None) -> None:
        texts = self._told("that failed", None if own is None else in_words(own))
        if own is not None:
            raise common(own)
        worker = next(number for number, text in enumerate(texts) if text is not None)
        raise common(
            CollectiveAbortedError(
                f"next: worker {worker} failed to make its next element: {texts[worker]}; need an element on every worker, or the "
                "end of its data"
            )
        )

    def _refuse(self, is_out: bool) -> None:
        outs = [number for number, out in enumerate(self._told("that is uneven", is_out)) if out]
        raise common(
            ValueError(
                f"next: workers {outs} of {self.link.num_processes} have no data left, the others have; need equally many steps on "
                "all — or on_uneven='continue', which gives them empty batches, or 'stop'"
            )
        )

    def _form_of_others(self, empty: Element | None) -> Element:
        """An empty element like those of the first worker that has had one."""
        sent: tuple[str, Any] | None = None
        if empty is _HAS_NO_FORM:
            sent = ("scalars have no empty form; need batches — call batch() on the dataset", None)
        elif empty is not None:
            leaves, structure = flatten(empty)
            bare = [leaf.values[0] if isinstance(leaf, PerReplica) else leaf for leaf in leaves]
            template = unflatten(structure, bare)
            try:
                sent = ("", pickle.dumps(template))
            except Exception as error:  # noqa: BLE001  # raised on all workers
                sent = (f"an element can't be sent to the others ({error}); need what pickle takes", None)
        worker, (problem, data) = next(
            (number, told) for number, told in enumerate(self._told("to be like", sent)) if told is not None
        )
        if problem:
            raise common(
                ValueError(f"next: some workers have no data at all, and of worker {worker} {problem}")
            )
        leaves, structure = flatten(pickle.loads(data))
        return unflatten(
            structure, [self.replicas.joined([leaf] * self.replicas.num_local) for leaf in leaves]
        )


_HAS_NO_FORM = object()
"""In the place of an empty element: there is none."""


def _without_rows(element: Element) -> Element:
    leaves, structure = flatten(element)
    emptied = []
    for leaf in leaves:
        parts = leaf.values if isinstance(leaf, PerReplica) else (leaf,)
        if not all(getattr(part, "shape", ()) for part in parts):
            return _HAS_NO_FORM
        without = [part[:0] for part in parts]
        emptied.append(PerReplica(without) if isinstance(leaf, PerReplica) else without[0])
    return unflatten(structure, emptied)
