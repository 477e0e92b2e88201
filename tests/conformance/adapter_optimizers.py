"""Optimizers of the conformance cases."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, final

import strategies as ours

_MAKERS: dict[str, Callable[..., ours.Optimizer]] = {
    "sgd": ours.SGD,
    "adam": ours.Adam,
    "adamw": ours.AdamW,
    "adagrad": ours.Adagrad,
    "rmsprop": ours.RMSprop,
    "lamb": ours.LAMB,
}


class OptimizerOperations:
    """What the adapter does with optimizers."""

    _variables_of: dict[int, list[ours.Variable]]

    def do_optimizer(self, strategy: ours.Strategy, name: str, config: Mapping[str, Any]) -> ours.Optimizer:
        with strategy.scope():
            return _MAKERS[name](**config)

    def do_apply(self, _: ours.Strategy, optimizer: ours.Optimizer, pairs: Any) -> None:
        self._remember(optimizer, [variable for _, variable in pairs])
        optimizer.apply_gradients([(gradient, variable) for gradient, variable in pairs])

    def do_iterations(self, _: ours.Strategy, optimizer: ours.Optimizer) -> int:
        return optimizer.iterations

    def do_opt_build(
        self, _: ours.Strategy, optimizer: ours.Optimizer, variables: Sequence[ours.Variable]
    ) -> None:
        self._remember(optimizer, variables)
        optimizer.build(variables)

    def do_opt_vars(self, strategy: ours.Strategy, optimizer: ours.Optimizer) -> list[Any]:
        slots = []
        for variable in self._variables_of.get(id(optimizer), []):
            for name in optimizer.rule.slots:
                found = strategy.run(lambda v, n: optimizer.slot(v, n).copy(), (variable, name))
                slots.append(Slot(strategy.experimental_local_results(found)))
        return slots

    def _remember(self, optimizer: ours.Optimizer, variables: Sequence[ours.Variable]) -> None:
        known = self._variables_of.setdefault(id(optimizer), [])
        known.extend(v for v in variables if all(v is not other for other in known))


@final
class Slot:
    """An optimizer's slot of one variable, by its copies."""

    def __init__(self, components: Sequence[Any]) -> None:
        self.components = list(components)
