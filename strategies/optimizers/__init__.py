"""Optimizers: pure update rules over flat memory, and one class that applies them."""

from strategies.optimizers.adagrad import Adagrad as Adagrad
from strategies.optimizers.adam import Adam as Adam
from strategies.optimizers.adam import AdamW as AdamW
from strategies.optimizers.clipping import clip_by_global_norm as clip_by_global_norm
from strategies.optimizers.clipping import global_norm as global_norm
from strategies.optimizers.gradient_accumulator import GradientAccumulator as GradientAccumulator
from strategies.optimizers.lamb import LAMB as LAMB
from strategies.optimizers.loss_scale import LossScaleOptimizer as LossScaleOptimizer
from strategies.optimizers.moving_average import ExponentialMovingAverage as ExponentialMovingAverage
from strategies.optimizers.optimizer import GradientAggregation as GradientAggregation
from strategies.optimizers.optimizer import Optimizer as Optimizer
from strategies.optimizers.rmsprop import RMSprop as RMSprop
from strategies.optimizers.schedules import Schedule as Schedule
from strategies.optimizers.sgd import SGD as SGD
from strategies.optimizers.update_rule import UpdateRule as UpdateRule
