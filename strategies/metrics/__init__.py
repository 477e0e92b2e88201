"""Metrics: counts that each replica keeps of its own share, ratios when read across all."""

from strategies.metrics.accuracy import Accuracy as Accuracy
from strategies.metrics.accuracy import AccuracyKind as AccuracyKind
from strategies.metrics.accuracy import TopKAccuracy as TopKAccuracy
from strategies.metrics.area_under_curve import AUC as AUC
from strategies.metrics.area_under_curve import Curve as Curve
from strategies.metrics.area_under_curve import Summation as Summation
from strategies.metrics.confusion_matrix import ConfusionMatrix as ConfusionMatrix
from strategies.metrics.metric import Comparison as Comparison
from strategies.metrics.metric import Metric as Metric
from strategies.metrics.precision_recall import Average as Average
from strategies.metrics.precision_recall import ClassScore as ClassScore
from strategies.metrics.precision_recall import F1Score as F1Score
from strategies.metrics.precision_recall import Precision as Precision
from strategies.metrics.precision_recall import Recall as Recall
from strategies.metrics.regression import MeanAbsoluteError as MeanAbsoluteError
from strategies.metrics.regression import MeanError as MeanError
from strategies.metrics.regression import MeanSquaredError as MeanSquaredError
from strategies.metrics.regression import R2Score as R2Score
from strategies.metrics.regression import RootMeanSquaredError as RootMeanSquaredError
from strategies.metrics.weighted_values import Mean as Mean
from strategies.metrics.weighted_values import Sum as Sum
