"""Optimizers: pure update rules over flat memory, and one class that applies them."""

from strategies.optimizers.adam import Adam as Adam
from strategies.optimizers.optimizer import GradientAggregation as GradientAggregation
from strategies.optimizers.optimizer import Optimizer as Optimizer
from strategies.optimizers.sgd import SGD as SGD
from strategies.optimizers.update_rule import UpdateRule as UpdateRule
