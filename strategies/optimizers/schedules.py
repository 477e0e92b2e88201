"""Learning rates that change over time: plain functions of the number of updates so far.

Every function here returns a schedule, to be passed as ``learning_rate``. Steps count from 0. Nothing is remembered, so a
resumed run needs the number of updates only.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable, Sequence

from strategies.optimizers.hyperparameters import require_real

Schedule = Callable[[int], float]
"""From the number of updates before this one to its learning rate."""


def constant(learning_rate: float) -> Schedule:
    """Always the same.

    Raises:
        ValueError: a negative learning rate.
    """
    _require_at_least(0, learning_rate=learning_rate)
    return lambda _: learning_rate


def piecewise_constant(boundaries: Sequence[int], values: Sequence[float]) -> Schedule:
    """``values[i]`` while the step is at most ``boundaries[i]``, the last value after the last boundary, as Keras has it.

    Args:
        boundaries: steps, ascending.
        values: one more than boundaries.

    Raises:
        ValueError: other lengths, or boundaries out of order.
    """
    boundaries, values = list(boundaries), list(values)
    for number in (*boundaries, *values):
        require_real("piecewise_constant", number=number)
    if len(values) != len(boundaries) + 1:
        raise ValueError(
            f"piecewise_constant: got {len(boundaries)} boundaries and {len(values)} values; need one value more"
        )
    if sorted(set(boundaries)) != boundaries:
        raise ValueError(f"piecewise_constant: got boundaries {boundaries}; need them ascending")
    return lambda step: values[bisect.bisect_left(boundaries, step)]


def exponential_decay(
    initial_learning_rate: float, decay_steps: int, decay_rate: float, *, staircase: bool = False
) -> Schedule:
    """``initial * decay_rate ** (step / decay_steps)``.

    Args:
        initial_learning_rate: at step 0.
        decay_steps: in which it shrinks by ``decay_rate`` once.
        decay_rate: above 0.
        staircase: whether it shrinks once at the end of each ``decay_steps`` steps instead of a little each step.

    Raises:
        TypeError: what is no real number.
        ValueError: a number outside of its range.
    """
    _require_at_least(1, decay_steps=decay_steps)
    _require_at_least(0, initial_learning_rate=initial_learning_rate)
    require_real("exponential_decay", decay_rate=decay_rate)
    if not decay_rate > 0:
        raise ValueError(f"exponential_decay: got decay_rate={decay_rate}; need a number above 0")

    def schedule(step: int) -> float:
        periods = step // decay_steps if staircase else step / decay_steps
        return initial_learning_rate * decay_rate**periods

    return schedule


def cosine_decay(initial_learning_rate: float, decay_steps: int, alpha: float = 0.0) -> Schedule:
    """Half a cosine from the initial value to ``alpha`` times it, then constant (Loshchilov and Hutter, arXiv:1608.03983).

    Args:
        initial_learning_rate: at step 0.
        decay_steps: from which on it is lowest.
        alpha: the lowest value as a share of the initial one.

    Raises:
        TypeError: what is no real number.
        ValueError: a number outside of its range.
    """
    _require_at_least(1, decay_steps=decay_steps)
    _require_at_least(0, initial_learning_rate=initial_learning_rate, alpha=alpha)

    def schedule(step: int) -> float:
        cosine = 0.5 * (1 + math.cos(math.pi * min(step, decay_steps) / decay_steps))
        return initial_learning_rate * ((1 - alpha) * cosine + alpha)

    return schedule


def polynomial_decay(
    initial_learning_rate: float,
    decay_steps: int,
    end_learning_rate: float = 0.0001,
    power: float = 1.0,
    *,
    cycle: bool = False,
) -> Schedule:
    """From the initial to the end value as ``(1 - step / decay_steps) ** power``, then constant.

    Args:
        initial_learning_rate: at step 0.
        decay_steps: from which on it is lowest.
        end_learning_rate: the lowest value.
        power: 1 for a straight line.
        cycle: whether to go on to the next multiple of ``decay_steps`` instead of staying at the end.

    Raises:
        TypeError: what is no real number.
        ValueError: a number outside of its range.
    """
    _require_at_least(1, decay_steps=decay_steps)
    _require_at_least(
        0, initial_learning_rate=initial_learning_rate, end_learning_rate=end_learning_rate, power=power
    )

    def schedule(step: int) -> float:
        length = decay_steps * max(1, math.ceil(step / decay_steps)) if cycle else decay_steps
        left: float = (1 - min(step, length) / length) ** power
        return (initial_learning_rate - end_learning_rate) * left + end_learning_rate

    return schedule


def warm_up(schedule: Schedule | float, num_steps: int, start: float = 0.0) -> Schedule:
    """A straight line from ``start`` to a schedule's first value, then that schedule from its beginning.

    Args:
        schedule: what follows, or a constant.
        num_steps: of the line.
        start: at step 0.

    Raises:
        TypeError: what is no real number.
        ValueError: a number outside of its range.
    """
    _require_at_least(1, num_steps=num_steps)
    _require_at_least(0, start=start)
    after = schedule if callable(schedule) else constant(schedule)
    target = after(0)
    return lambda step: (
        after(step - num_steps) if step >= num_steps else start + (target - start) * step / num_steps
    )


def scale_linearly(learning_rate: float, global_batch_size: int, base_batch_size: int) -> float:
    """The learning rate for a larger global batch: in proportion to it (Goyal et al., arXiv:1706.02677).

    Args:
        learning_rate: found good for ``base_batch_size``.
        global_batch_size: examples of all replicas together.
        base_batch_size: examples.

    Raises:
        ValueError: a size below 1.
    """
    _require_at_least(1, global_batch_size=global_batch_size, base_batch_size=base_batch_size)
    return learning_rate * global_batch_size / base_batch_size


def _require_at_least(least: int, **numbers: float) -> None:
    require_real("", **numbers)
    for name, number in numbers.items():
        if not number >= least:
            raise ValueError(f"{name}: got {number}; need at least {least}")
