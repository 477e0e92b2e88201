"""The interface of optimization algorithms: pure updates of flat memory."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping

from collectives.arrays import Array


class UpdateRule(ABC):
    """How parameters follow from gradients.

    A rule has hyperparameters and no state: what it remembers from step to step lies in slots, arrays of the
    parameters' shape that it is handed. It sees pieces of flat memory of one dtype, or some rows of a table, so whatever
    it does to an element depends on that element alone, unless it asks for whole variables.
    """

    @property
    @abstractmethod
    def slots(self) -> Mapping[str, float]:
        """The slots it needs, by name, and what they are filled with at first."""

    @property
    @abstractmethod
    def num_scratch(self) -> int:
        """How many arrays of the parameters' shape it needs for intermediate results."""

    @property
    def needs_whole_variables(self) -> bool:
        """Whether the pieces are to be whole variables, one each, for rules that look at a variable's norm."""
        return False

    @abstractmethod
    def update(
        self,
        parameters: Array,
        gradients: Array,
        slots: Mapping[str, Array],
        scratch: list[Array],
        *,
        step: int,
        learning_rate: float,
    ) -> None:
        """Change parameters and slots in place.

        Args:
            parameters: shape ``(n,)``.
            gradients: shape ``(n,)``; left as they are.
            slots: shape ``(n,)`` each, one for each name in `slots`.
            scratch: `num_scratch` arrays of shape ``(n,)`` with arbitrary content.
            step: how many updates there have been with this one: from 1.
            learning_rate: for this update.
        """
