"""Dynamic loss scaling: half precision without gradients that vanish."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, final

from strategies.optimizers.hyperparameters import require_real
from strategies.optimizers.optimizer import LearningRate, Optimizer
from variables.variable import Variable


@final
class LossScaleOptimizer:
    """Wraps an optimizer whose gradients come from a loss that was multiplied by a scale.

    A large scale keeps small gradients above the smallest number that float16 holds. All replicas decide together: if any
    gradient of any replica is not finite, none updates, and the scale is halved once; after a number of updates in a
    row, it is doubled (Micikevicius et al., arXiv:1710.03740).

    Args:
        inner_optimizer: what updates the variables.
        initial_scale: above 0; a power of two loses no bits.
        dynamic_growth_steps: updates in a row before the scale is doubled.

    Raises:
        TypeError: what is no real number.
        ValueError: a number outside of its range.
    """

    def __init__(
        self, inner_optimizer: Optimizer, initial_scale: float = 2.0**15, dynamic_growth_steps: int = 2000
    ) -> None:
        require_real(
            "LossScaleOptimizer", initial_scale=initial_scale, dynamic_growth_steps=dynamic_growth_steps
        )
        if not initial_scale > 0 or dynamic_growth_steps < 1:
            raise ValueError(
                f"LossScaleOptimizer: got initial_scale={initial_scale}, dynamic_growth_steps={dynamic_growth_steps}; "
                "need both above 0"
            )
        self.inner_optimizer = inner_optimizer
        self.loss_scale = float(initial_scale)
        self.dynamic_growth_steps = dynamic_growth_steps
        self.updates_since_change = 0
        self.skipped_steps = 0

    @property
    def iterations(self) -> int:
        """How many updates there have been, without those that were skipped."""
        return self.inner_optimizer.iterations

    @property
    def learning_rate(self) -> LearningRate:
        """The inner optimizer's."""
        return self.inner_optimizer.learning_rate

    def scale_loss(self, loss: Any) -> Any:
        """The loss, or the gradient that backpropagation starts from, multiplied by the scale."""
        return loss * self.loss_scale

    def apply_gradients(self, grads_and_vars: Iterable[tuple[Any, Variable]]) -> bool:
        """Divide the gradients by the scale and update, if all are finite. Arguments and errors as `Optimizer` has them.

        Returns:
            Whether the update was made, the same on all replicas.
        """
        return self.inner_optimizer.apply_scaled_gradients(grads_and_vars, self)

    def settle(self, is_finite: bool) -> None:
        """Take in whether all gradients were finite, for all replicas at once; `apply_gradients` sees to it."""
        if not is_finite:
            self.skipped_steps += 1
            self.updates_since_change = 0
            self.loss_scale = max(self.loss_scale / 2, _SMALLEST)
            return
        self.updates_since_change += 1
        if self.updates_since_change >= self.dynamic_growth_steps:
            self.updates_since_change = 0
            self.loss_scale *= 2


_SMALLEST = 2.0**-24
"""The smallest number above 0 in float16: below, a loss that is not finite is the loss's own fault."""
