"""Brings the gradients of several processes together, before each of them updates its own copies.

One reduction of all dense gradients, in place in memory that the processes share, and a gathering for each sparse one. Nothing
is updated before the last of these has succeeded, so an update is made in all processes or in none.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, final

from collectives.arrays import Array
from collectives.calls import Call
from collectives.errors import CollectiveMismatchError
from collectives.indexed_slices import IndexedSlices
from collectives.link import Link
from collectives.linked import gather_slices_over
from collectives.reduce_op import ReduceOp
from strategies.optimizers.contribution import Contribution
from strategies.optimizers.plan import Plan
from strategies.optimizers.sparse_rows import reduced_slices
from strategies.optimizers.variable_group import VariableGroup

_KINDS = " where gradients are "
"""Stands in calls before what differs legitimately: which gradients are missing or sparse."""


@final
class Exchange:
    """What one process does to bring its replicas' gradients together with those of the others, for one group of variables.

    Args:
        link: to the other processes.
        op: how the replicas' gradients become one.
    """

    def __init__(self, link: Link, op: ReduceOp) -> None:
        self._link = link
        self._op = op
        # The plan keeps its id its own.
        self._calls: dict[tuple[int, str], tuple[Call, Plan]] = {}

    def bring_together(
        self, group: VariableGroup, contributions: Sequence[Contribution]
    ) -> tuple[Plan, list[Array], dict[int, IndexedSlices]]:
        """How to update, the dense gradients of each segment, reduced, and the sparse ones by position, reduced.

        Args:
            group: of the variables, the same in all processes.
            contributions: of this process's replicas.
        """
        kinds = [(c.missing, c.sparse) for c in contributions]
        first = kinds[0]
        is_uniform = all(kind == first for kind in kinds[1:])
        if not is_uniform or first[0]:
            return self._reconciled(group, contributions, kinds)
        plan = group.plan(first[1])
        try:
            return self._reduced(group, plan, contributions, str(first[1]) if first[1] else "dense")
        except CollectiveMismatchError as error:
            if not _differ_in_kind_only(error):
                raise
        return self._reconciled(group, contributions, kinds, is_known=True)

    def _reconciled(
        self,
        group: VariableGroup,
        contributions: Sequence[Contribution],
        kinds: Sequence[tuple[tuple[int, ...], tuple[int, ...]]],
        *,
        is_known: bool = False,
    ) -> tuple[Plan, list[Array], dict[int, IndexedSlices]]:
        """Where replicas have gradients of different kinds, or none: agree on what is updated, and how."""
        if not is_known:
            # The others don't know yet; they come to this by way of the mismatch. Where all know, there is none.
            try:
                self._link.barrier(_call(group, "of different kinds, or missing", ()))
            except CollectiveMismatchError as error:
                if not _differ_in_kind_only(error):
                    raise
        told: list[Any] = self._link.gather_objects(Call("apply_gradients kinds", (group.title,)), kinds)
        everywhere = set.intersection(*(set(missing) for missing, _ in told))
        somewhere = set.union(*(set(missing) for missing, _ in told)) - everywhere
        if len(everywhere) == len(group.variables):
            raise ValueError(
                f"{group.where}: got None for every variable on every replica; need at least one gradient"
            )
        group.warn_of_missing(somewhere)
        sparse = set.intersection(*(set(positions) for _, positions in told))
        plan = group.plan(tuple(sorted(sparse)), frozenset(everywhere))
        return self._reduced(group, plan, contributions, f"{sorted(sparse)} without {sorted(everywhere)}")

    def _reduced(
        self, group: VariableGroup, plan: Plan, contributions: Sequence[Contribution], kind: str
    ) -> tuple[Plan, list[Array], dict[int, IndexedSlices]]:
        for contribution in contributions:
            contribution.pack(plan.segments, plan.sparse, group.variables, group.where)
        rows = [
            [
                segment.lendable(lent, contribution.replica)
                for segment, lent in zip(plan.segments, contribution.lent, strict=True)
            ]
            for contribution in contributions
        ]
        if plan.segments:
            known = self._calls.get((id(plan), kind))
            if known is None:
                shapes = tuple((row.dtype, row.shape) for row in rows[0])
                known = self._calls[id(plan), kind] = (_call(group, kind, (self._op, *shapes)), plan)
            self._link.fold(known[0], self._op, rows, rows[:1])
        sparse = {}
        for position in plan.sparse:
            parts = [contribution.rows[position] for contribution in contributions]
            call = _call(group, kind, (f"position {position}",))
            sparse[position] = reduced_slices(gather_slices_over(self._link, call, parts), self._op)
        return plan, rows[0], sparse


def _call(group: VariableGroup, kind: str, detail: tuple[Any, ...]) -> Call:
    return Call("apply_gradients", (f"{group.title}{_KINDS}{kind}", *detail))


def _differ_in_kind_only(error: CollectiveMismatchError) -> bool:
    """Whether all processes bring gradients of the same variables, and only their kinds differ."""
    starts = {None if call is None or _KINDS not in call else call.split(_KINDS)[0] for call in error.calls}
    return len(starts) == 1 and None not in starts
