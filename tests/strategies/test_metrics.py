"""Metrics of data that is spread over replicas, against scikit-learn's and Keras's of the whole."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from strategies import (
    CentralStorageStrategy,
    Checkpoint,
    MirroredStrategy,
    OneDeviceStrategy,
    Strategy,
    from_arrays,
    get_replica_context,
    merge_call,
    metrics,
)
from variables import PerReplica, ReplicaContextError

STRATEGIES: dict[str, Callable[[], Strategy]] = {
    "one_device": OneDeviceStrategy,
    "mirrored_1": lambda: MirroredStrategy(["cpu:0"]),
    "mirrored_2": lambda: MirroredStrategy(["cpu:0", "cpu:1"]),
    "mirrored_5": lambda: MirroredStrategy([f"cpu:{i}" for i in range(5)]),
    "central_3": lambda: CentralStorageStrategy([f"cpu:{i}" for i in range(3)]),
}


@pytest.fixture(params=STRATEGIES)
def strategy(request: pytest.FixtureRequest) -> Any:
    with STRATEGIES[request.param]() as strategy:
        yield strategy


def mirrored(size: int = 2) -> MirroredStrategy:
    return MirroredStrategy([f"cpu:{i}" for i in range(size)])


def count_in_shares(strategy: Strategy, metric: metrics.Metric, *whole: Any) -> None:
    """Update with all rows of some arrays, in three steps of uneven shares, of which some are empty."""
    rng = np.random.default_rng(3)
    size = strategy.num_replicas_in_sync
    for rows in np.array_split(np.arange(len(whole[0])), 3):
        cuts = np.sort(rng.integers(0, len(rows) + 1, size - 1))
        shares = np.split(rows, cuts) if len(rows) % 2 else [rows, *[rows[:0]] * (size - 1)]
        args = [PerReplica([array[share] for share in shares]) for array in whole]
        strategy.run(metric.update, args=tuple(args))


N, C = 83, 4
RNG = np.random.default_rng(11)
CLASSES = RNG.integers(0, C, N)
SCORES = RNG.normal(size=(N, C)).astype(np.float32) + np.eye(C, dtype=np.float32)[CLASSES]
TAKEN = SCORES.argmax(axis=1)
BINARY = RNG.integers(0, 2, N)
# One score in each of a hundred gaps between thresholds: there the area is exact.
CHANCES = (np.sort(RNG.permutation(100)[:N]) + 0.5)[np.argsort(np.argsort(BINARY + RNG.normal(size=N)))] / 100
SAID = CHANCES > 0.5
LABELS = RNG.integers(0, 2, (N, C))
LABEL_SCORES = np.clip(0.5 * LABELS + RNG.uniform(-0.1, 0.7, (N, C)), 0, 1)
NUMBERS = 100 + RNG.normal(size=N)
GUESSES = NUMBERS + RNG.normal(size=N) / 2
OUTPUTS = RNG.normal(size=(N, 3)) * [1, 10, 0.1]
OUTPUT_GUESSES = OUTPUTS + RNG.normal(size=(N, 3)) * [0.5, 4, 0.2]
WEIGHTS = RNG.uniform(0.1, 3, N)

Case = tuple[Callable[[], metrics.Metric], str, dict[str, Any], tuple[Any, Any], tuple[Any, Any]]
AGAINST_SKLEARN: dict[str, Case] = {
    # name: (our metric, scikit-learn's function and its arguments, our truth and predictions, scikit-learn's)
    "accuracy_labels": (metrics.Accuracy, "accuracy_score", {}, (CLASSES, TAKEN), (CLASSES, TAKEN)),
    "accuracy_sparse": (metrics.Accuracy, "accuracy_score", {}, (CLASSES, SCORES), (CLASSES, TAKEN)),
    "accuracy_one_hot": (
        metrics.Accuracy,
        "accuracy_score",
        {},
        (np.eye(C)[CLASSES], SCORES),
        (CLASSES, TAKEN),
    ),
    "accuracy_binary": (metrics.Accuracy, "accuracy_score", {}, (BINARY, CHANCES), (BINARY, SAID)),
    "accuracy_threshold": (
        lambda: metrics.Accuracy("binary", threshold=0.3),
        "accuracy_score",
        {},
        (BINARY, CHANCES),
        (BINARY, CHANCES > 0.3),
    ),
    "top_2": (
        lambda: metrics.TopKAccuracy(2),
        "top_k_accuracy_score",
        {"k": 2},
        (CLASSES, SCORES),
        (CLASSES, SCORES),
    ),
    "top_3_one_hot": (
        lambda: metrics.TopKAccuracy(3),
        "top_k_accuracy_score",
        {"k": 3},
        (np.eye(C)[CLASSES], SCORES),
        (CLASSES, SCORES),
    ),
    "confusion": (
        lambda: metrics.ConfusionMatrix(C),
        "confusion_matrix",
        {},
        (CLASSES, SCORES),
        (CLASSES, TAKEN),
    ),
    "roc": (lambda: metrics.AUC(101), "roc_auc_score", {}, (BINARY, CHANCES), (BINARY, CHANCES)),
    "mse": (metrics.MeanSquaredError, "mean_squared_error", {}, (NUMBERS, GUESSES), (NUMBERS, GUESSES)),
    "mse_outputs": (
        metrics.MeanSquaredError,
        "mean_squared_error",
        {},
        (OUTPUTS, OUTPUT_GUESSES),
        (OUTPUTS, OUTPUT_GUESSES),
    ),
    "rmse": (
        metrics.RootMeanSquaredError,
        "root_mean_squared_error",
        {},
        (NUMBERS, GUESSES),
        (NUMBERS, GUESSES),
    ),
    "mae": (metrics.MeanAbsoluteError, "mean_absolute_error", {}, (NUMBERS, GUESSES), (NUMBERS, GUESSES)),
    "r2": (metrics.R2Score, "r2_score", {}, (NUMBERS, GUESSES), (NUMBERS, GUESSES)),
    "r2_center": (
        lambda: metrics.R2Score(center=1e8),
        "r2_score",
        {},
        (NUMBERS + 1e8, GUESSES + 1e8),
        (NUMBERS + 1e8, GUESSES + 1e8),
    ),
    "r2_outputs": (
        lambda: metrics.R2Score(3),
        "r2_score",
        {},
        (OUTPUTS, OUTPUT_GUESSES),
        (OUTPUTS, OUTPUT_GUESSES),
    ),
}


def _add_class_scores(name: str, kind: type[metrics.ClassScore]) -> None:
    """Cases of precision and its kin: of two classes, of several, and of several labels."""
    function = f"{name}_score"
    AGAINST_SKLEARN[f"{name}_binary"] = (kind, function, {}, (BINARY, CHANCES), (BINARY, SAID))
    for average in ("macro", "micro", "weighted", None):
        settings, ours = {"average": average}, average or "none"
        AGAINST_SKLEARN[f"{name}_{average}"] = (
            lambda ours=ours: kind(C, average=ours),  # type: ignore[misc]  # mypy infers no default arguments
            function,
            settings,
            (CLASSES, SCORES),
            (CLASSES, TAKEN),
        )
        AGAINST_SKLEARN[f"{name}_labels_{average}"] = (
            lambda ours=ours: kind(C, average=ours, threshold=0.6),  # type: ignore[misc]  # as above
            function,
            settings,
            (LABELS, LABEL_SCORES),
            (LABELS, LABEL_SCORES > 0.6),
        )


_add_class_scores("precision", metrics.Precision)
_add_class_scores("recall", metrics.Recall)
_add_class_scores("f1", metrics.F1Score)


@pytest.mark.parametrize("weighted", [False, True], ids=["plain", "weighted"])
@pytest.mark.parametrize("case", AGAINST_SKLEARN)
def test_a_metric_of_uneven_and_empty_shares_is_scikit_learns_of_the_whole_data(
    strategy: Strategy, case: str, weighted: bool
) -> None:
    sklearn_metrics = pytest.importorskip("sklearn.metrics", reason="needs scikit-learn, the demo extra")
    make, function, settings, ours, theirs = AGAINST_SKLEARN[case]
    weights = [WEIGHTS] if weighted else []
    with strategy.scope():
        metric = make()
    count_in_shares(strategy, metric, *ours, *weights)
    expected = getattr(sklearn_metrics, function)(
        *theirs, **settings, sample_weight=WEIGHTS if weighted else None
    )
    np.testing.assert_allclose(metric.pop(), expected, rtol=1e-9)
    count_in_shares(strategy, metric, *ours, *weights)  # pop has forgotten the first time
    np.testing.assert_allclose(metric.result(), expected, rtol=1e-9)


# fmt: off
KERAS_TRUTH = [
    1, 1, 1, 1, 1, 1, 1, 0, 0, 0, 0, 1, 1, 0, 0, 1, 0, 1, 0, 0, 1, 0, 0, 0, 1, 0, 1, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1, 1, 0, 1, 0,
    0, 1, 0, 1, 1, 0, 0, 0, 0, 0, 1, 1, 0, 1, 1, 1, 1, 0, 1,
]
KERAS_SCORES = [
    0.341, 0.657, 0.506, 0.557, 1.0, 0.558, 0.79, 0.565, 0.125, 0.266, 0.333, 0.819, 0.432, 0.323, 0.708, 0.336, 0.558, 0.836,
    0.108, 0.9, 1.0, 0.0, 0.322, 0.473, 0.743, 0.505, 0.78, 0.5, 0.732, 0.597, 0.861, 0.661, 0.838, 0.444, 0.626, 0.741, 1.0,
    1.0, 0.0, 0.562, 0.494, 0.0, 0.661, 0.271, 1.0, 1.0, 0.202, 0.189, 0.225, 0.757, 0.172, 0.709, 0.906, 0.264, 0.741, 0.466,
    0.797, 0.667, 0.65, 0.996,
]
KERAS_WEIGHTS = [
    1.81, 1.2, 1.32, 0.98, 1.63, 0.54, 1.06, 0.55, 0.68, 1.95, 1.49, 1.14, 1.29, 1.81, 1.02, 1.39, 1.53, 1.03, 1.28, 1.65, 1.86,
    0.73, 1.9, 0.51, 1.63, 1.72, 0.71, 1.13, 1.72, 0.52, 1.44, 1.69, 1.27, 1.59, 0.84, 0.8, 1.04, 0.77, 1.02, 1.92, 1.36, 1.01,
    0.91, 1.93, 1.17, 1.97, 1.27, 1.28, 1.84, 1.61, 1.37, 1.14, 1.82, 1.12, 1.88, 0.6, 1.14, 1.28, 1.93, 0.88,
]
# fmt: on
GRID, CHOSEN = {"num_thresholds": 20}, {"thresholds": [0.8, 0.2, 0.5]}


@pytest.mark.parametrize(
    ("curve", "summation", "thresholds", "plain", "weighted"),
    [
        ("ROC", "interpolation", GRID, 0.8569005131721497, 0.8465474843978882),
        ("ROC", "interpolation", CHOSEN, 0.8303167819976807, 0.81495600938797),
        ("ROC", "minoring", GRID, 0.8404977321624756, 0.8281235098838806),
        ("ROC", "minoring", CHOSEN, 0.7251130938529968, 0.7038418054580688),
        ("ROC", "majoring", GRID, 0.8733031749725342, 0.8649715185165405),
        ("ROC", "majoring", CHOSEN, 0.935520350933075, 0.9260702729225159),
        ("PR", "interpolation", GRID, 0.8765045404434204, 0.8603076934814453),
        ("PR", "interpolation", CHOSEN, 0.844344973564148, 0.8215508460998535),
        ("PR", "minoring", GRID, 0.6595135927200317, 0.6266677379608154),
        ("PR", "minoring", CHOSEN, 0.4862315058708191, 0.44311201572418213),
        ("PR", "majoring", GRID, 0.8879984021186829, 0.8744500875473022),
        ("PR", "majoring", CHOSEN, 0.902592658996582, 0.8821901082992554),
    ],
)
def test_the_area_under_a_curve_is_keras_3_15s(
    curve: str, summation: str, thresholds: dict[str, Any], plain: float, weighted: float
) -> None:
    with mirrored(3) as strategy:
        with strategy.scope():
            auc = metrics.AUC(curve=curve, summation_method=summation, **thresholds)
        truth, scores, weights = map(np.array, (KERAS_TRUTH, KERAS_SCORES, KERAS_WEIGHTS))
        count_in_shares(strategy, auc, truth, scores)
        assert auc.pop() == pytest.approx(plain, rel=3e-7)  # Keras counts in float32
        count_in_shares(strategy, auc, truth, scores, weights)
        assert auc.pop() == pytest.approx(weighted, rel=3e-7)


def test_logits_are_scores_after_the_sigmoid_and_do_not_overflow() -> None:
    auc, of_logits = metrics.AUC(50), metrics.AUC(50, from_logits=True)
    scores = np.array(KERAS_SCORES).clip(0.001, 0.999)
    auc.update(KERAS_TRUTH, scores)
    of_logits.update(KERAS_TRUTH, np.log(scores / (1 - scores)))
    assert of_logits.result() == pytest.approx(auc.result())
    of_logits.reset()
    of_logits.update([0, 1], [-1e4, 1e4])
    assert of_logits.result() == 1


# ------------------------------------------------------------------ written by hand


def test_the_mean_weighs_every_value_and_not_every_batch() -> None:
    with mirrored() as strategy:
        with strategy.scope():
            mean, total = metrics.Mean("loss"), metrics.Sum()
        for values in ([np.array([1.0, 2.0, 3.0]), np.array([4.0])], [np.array([]), np.array([10.0])]):
            strategy.run(mean.update, args=(PerReplica(values),))
            strategy.run(total.update, args=(PerReplica(values),))
        assert mean.result() == 4.0  # of 1, 2, 3, 4 and 10
        assert total.result() == 20.0


def test_values_and_weights_may_be_numbers_rows_or_of_any_shape_that_the_values_begin_with() -> None:
    mean = metrics.Mean()
    mean.update(2.0, sample_weight=3)
    mean.update([[1, 3], [5, 7]], sample_weight=[1, 2])
    mean.update(np.array([[10, 20]], np.float16), sample_weight=[[0.5, 1]])
    assert mean.result() == pytest.approx((6 + 4 + 24 + 25) / (3 + 2 + 4 + 1.5))


def test_sums_of_narrow_dtypes_neither_overflow_nor_wrap_around() -> None:
    mean, error = metrics.Mean(), metrics.MeanAbsoluteError()
    mean.update(np.full(1000, 60000, np.float16))
    error.update(np.array([200, 3], np.uint8), np.array([100, 5], np.uint8))
    assert mean.result() == float(np.float16(60000))
    assert error.result() == 51


def test_examples_of_weight_0_may_hold_anything() -> None:
    mask = [True, False]
    mean, accuracy, error = metrics.Mean(), metrics.Accuracy(), metrics.MeanSquaredError()
    matrix, auc, top = metrics.ConfusionMatrix(3), metrics.AUC(), metrics.TopKAccuracy(1)
    mean.update([1.0, math.nan], mask)
    accuracy.update([2, -1], [[0.1, 0.2, 0.7], [math.nan, 0, 0]], mask)
    top.update([2, -1], [[0.1, 0.2, 0.7], [math.nan, 0, 0]], mask)
    error.update([1, math.inf], [3, 1], mask)
    matrix.update([1, -100], [2, 7], mask)
    auc.update([1, 255], [0.5, math.nan], mask)
    assert (mean.result(), accuracy.result(), top.result(), error.result()) == (1, 1, 1, 4)
    np.testing.assert_array_equal(matrix.result(), [[0, 0, 0], [0, 0, 1], [0, 0, 0]])


def test_of_no_examples_ratios_are_nan_and_counts_zero() -> None:
    with mirrored() as strategy:
        with strategy.scope():
            ratios = [
                metrics.Mean(),
                metrics.Accuracy("binary"),
                metrics.TopKAccuracy(),
                metrics.AUC(),
                metrics.AUC(curve="PR"),
                metrics.MeanSquaredError(),
                metrics.RootMeanSquaredError(),
                metrics.MeanAbsoluteError(),
                metrics.R2Score(),
            ]
            matrix, total, precision = metrics.ConfusionMatrix(2), metrics.Sum(), metrics.Precision()
        assert all(math.isnan(metric.result()) for metric in ratios)
        strategy.run(precision.update, args=(np.zeros(0, np.int64), np.zeros(0)))
        strategy.run(matrix.update, args=(np.zeros(0, np.int64), np.zeros((0, 2))))
        np.testing.assert_array_equal(matrix.result(), np.zeros((2, 2)))
        assert (total.result(), precision.result()) == (0, 0)


def test_a_class_without_examples_scores_what_zero_division_says() -> None:
    truth, said = [0, 0, 1], [0, 0, 0]  # nothing was taken for class 1, and class 2 never came up
    for zero, by_class, macro in ((0.0, [2 / 3, 0, 0], 2 / 9), (1.0, [2 / 3, 1, 1], 8 / 9)):
        each = metrics.Precision(3, average="NONE", zero_division=zero)
        mean = metrics.Precision(3, zero_division=zero)
        each.update(truth, said)
        mean.update(truth, said)
        np.testing.assert_allclose(each.result(), by_class)
        assert mean.result() == pytest.approx(macro)
    left_out = metrics.Precision(3, zero_division=math.nan)
    left_out.update(truth, said)
    assert left_out.result() == pytest.approx(2 / 3)
    assert math.isnan(metrics.Recall(3, zero_division=math.nan).result())


def test_a_score_on_the_threshold_says_0_and_ties_are_among_the_top() -> None:
    accuracy, top = metrics.Accuracy(), metrics.TopKAccuracy(2)
    accuracy.update([0, 1, 1], [0.5, 0.5, 0.6])
    assert accuracy.result() == pytest.approx(2 / 3)
    top.update([0, 1, 2, 2], [[0.5, 0.5, 0.5], [0.1, 0.1, 0.8], [0.3, 0.3, 0.3], [0.9, 0.6, 0.1]])
    assert top.result() == 0.75  # as Keras's
    top.reset()
    top.update([1], [[0.5, math.nan, 0.1]])
    assert top.result() == 0


def test_the_kind_of_accuracy_is_told_by_shapes_and_dtypes() -> None:
    for truth, said, expected in (
        ([[3], [0]], [[0.1, 0.2, 0.3, 0.4], [0.1, 0.5, 0.2, 0.2]], 0.5),  # sparse, in a column
        ([[0, 1], [1, 1]], np.eye(2)[[[0, 1], [0, 1]]], 0.75),  # sparse, of sequences
        ([True, False], [True, True], 0.5),  # labels
        ([7, 8, 9], [7, 8, 8], 2 / 3),  # labels
        ([[1.0], [0.0]], [[0.9], [0.8]], 0.5),  # binary, in columns
    ):
        accuracy = metrics.Accuracy()
        accuracy.update(truth, said)
        assert accuracy.result() == pytest.approx(expected)
    several = metrics.Accuracy("BINARY")
    several.update([[1, 1, 0], [0, 0, 1]], [[0.9, 0.2, 0.1], [0.6, 0.1, 0.7]])
    assert several.result() == pytest.approx(4 / 6)


def test_r2_is_nan_where_the_truth_does_not_vary_or_its_variance_is_lost_in_rounding() -> None:
    r2, centred = metrics.R2Score(), metrics.R2Score(center=1e9)
    r2.update([0.1] * 10, [0.1] * 10)
    assert math.isnan(r2.pop())
    r2.update([1.0], [2.0])
    assert math.isnan(r2.pop())
    truth, said = 1e9 + np.array([1.0, 2.0, 4.0]), 1e9 + np.array([1.0, 2.5, 3.0])
    r2.update(truth, said)
    centred.update(truth, said)
    assert math.isnan(r2.result())
    assert centred.result() == pytest.approx(0.7321428571428571)


# ----------------------------------------------------------------- where it is called


def test_the_loop_over_an_uneven_dataset_gives_the_figures_of_the_whole(strategy: Strategy) -> None:
    with strategy.scope():
        accuracy = metrics.Accuracy()
    dataset = from_arrays((SCORES, CLASSES)).batch(10)  # 83 rows: the last batch has 3
    for scores, classes in strategy.distribute_dataset(dataset):
        strategy.run(lambda scores, classes: accuracy.update(classes, scores), args=(scores, classes))
    assert accuracy.result() == np.mean(TAKEN == CLASSES)


def test_outside_of_a_step_an_update_counts_once_and_of_per_replica_values_all_parts(
    strategy: Strategy,
) -> None:
    size = strategy.num_replicas_in_sync
    with strategy.scope():
        mean = metrics.Mean()
        mean.update([1.0, 2.0])
    mean.update([3.0])
    assert mean.result() == 2
    losses = strategy.distribute_values_from_function(lambda c: np.full(c.replica_id_in_sync_group, 8.0))
    mean.update(losses)
    assert mean.result() == pytest.approx((6 + 8 * size * (size - 1) / 2) / (3 + size * (size - 1) / 2))


def test_replicas_may_make_different_numbers_of_updates() -> None:
    with mirrored(3) as strategy:
        with strategy.scope():
            total = metrics.Sum()

        def step() -> None:
            replica = get_replica_context()
            assert replica is not None
            for _ in range(replica.replica_id):
                total.update([10.0, 1.0])

        strategy.run(step)
        assert total.result() == 33


def test_a_metric_of_plain_code_counts_once_also_from_the_replicas_of_a_strategy() -> None:
    total = metrics.Sum()
    with mirrored(4) as strategy:
        strategy.run(lambda: total.update(np.ones(5)))
    assert total.result() == 20


def test_a_result_in_a_step_is_refused_and_works_in_a_merge_function() -> None:
    with mirrored() as strategy:
        with strategy.scope():
            mean = metrics.Mean("loss")
        for method in (mean.result, mean.pop, mean.reset, mean.state):
            with pytest.raises(
                ReplicaContextError, match=r"loss.\w+: called inside replica \d.*merge function"
            ):
                strategy.run(method)

        def step(value: Any) -> Any:
            mean.update(value)
            return merge_call(lambda _: mean.result())

        assert strategy.run(step, args=(PerReplica([[2.0], [4.0]]),)) == 3.0
        with pytest.raises(ReplicaContextError, match=r"loss.result: called in an update function"):
            strategy.update(mean.sums, lambda _: mean.result())


def test_a_per_replica_value_in_a_step_is_refused() -> None:
    with mirrored() as strategy:
        with strategy.scope():
            mean = metrics.Mean("loss")
        values = PerReplica([np.ones(1), np.ones(2)])
        with pytest.raises(
            ValueError, match=r"loss.update: got a PerReplica in a step.*args of strategy.run"
        ):
            strategy.run(lambda: mean.update(values))
        accuracy = metrics.Accuracy()
        with pytest.raises(ValueError, match="values of 2 and 3 replicas"):
            accuracy.update(values, PerReplica([np.ones(1)] * 3))


def test_a_metric_of_another_strategy_is_named() -> None:
    with mirrored() as strategy, mirrored() as other:
        with strategy.scope():
            mean = metrics.Mean("loss")
        with pytest.raises(ReplicaContextError, match="loss: used in a replica of"):
            other.run(lambda: mean.update(1.0))


# ------------------------------------------------------------------------ bad input


@pytest.mark.parametrize(
    ("make", "args", "message"),
    [
        (metrics.Mean, ([1j],), r"mean.update: got complex128 of shape \(1,\); need real numbers"),
        (metrics.Mean, (["a"],), "mean.update: got list of dtype <U1"),
        (metrics.Mean, ([1.0, 2.0], [1.0, 2.0, 3.0]), r"sample_weight of shape \(3,\) for examples of shape \(2,\)"),
        (metrics.Mean, ([1.0], [[1.0]]), r"need \(1,\), or another beginning"),
        (metrics.Mean, ([1.0, 2.0], [1, -1]), "got a sample_weight below 0 or nan"),
        (metrics.MeanSquaredError, ([1.0, 2.0], [[1.0], [2.0]]), r"\(2,\), y_pred of shape \(2, 1\); need equal shapes"),
        (metrics.Accuracy, ([0, 1, 2], [[0.1, 0.9]] * 2), "class numbers, shape"),
        (metrics.Accuracy, ([0, 2], [[0.1, 0.9]] * 2), "got class 2; need whole numbers from 0 to 1"),
        (metrics.Accuracy, ([[1, 1]], [[0.1, 0.9]]), r"adds up to 2; need 1.*Accuracy\('BINARY'\)"),
        (metrics.Accuracy, ([0, 3], [0.1, 0.9]), "got 3 in y_true; need 0 and 1"),
        (lambda: metrics.ConfusionMatrix(3), ([0, 1.5], [0, 1]), "got 1.5 in y_true; need whole numbers from 0 to 2"),
        (lambda: metrics.ConfusionMatrix(3), ([0, 1], [0, -1]), "got -1 in y_pred"),
        (lambda: metrics.ConfusionMatrix(3), ([0, 1], [[0.5, 0.5]] * 2), r"scores of 3 classes, shape \(batch, 3\)"),
        (lambda: metrics.Recall(2), (np.eye(2, dtype=int), np.eye(2, dtype=int)), "class numbers or one-hot rows"),
        (lambda: metrics.Recall(3, threshold=0.5), ([[0, 1]], [[0.5, 0.5]]), r"need \(batch, 3\)"),
        (metrics.AUC, ([0, 1], [0.5, 1.5]), r"got 1.5 in y_pred; need scores from 0 to 1.*from_logits=True"),
        (metrics.AUC, ([0, 1], [0.5, math.nan]), "got nan in y_pred"),
        (lambda: metrics.R2Score(2), (np.zeros((4, 3)), np.zeros((4, 3))), r"need \(batch, 2\)"),
    ],
)  # fmt: skip
def test_input_without_a_meaning_is_refused_and_not_counted(
    make: Callable[[], metrics.Metric], args: tuple[Any, ...], message: str
) -> None:
    metric = make()
    with pytest.raises((ValueError, TypeError), match=message):
        metric.update(*args)
    assert not metric.sums.numpy().any()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: metrics.TopKAccuracy(0), "TopKAccuracy: got k=0; need an integer of 1 or more"),
        (lambda: metrics.ConfusionMatrix(1), "ConfusionMatrix: got num_classes=1"),
        (lambda: metrics.F1Score(2.5), "F1Score: got num_classes=2.5"),  # type: ignore[arg-type]
        (lambda: metrics.Precision(3, average="mean"), "average"),
        (lambda: metrics.Accuracy("dense"), "kind"),
        (lambda: metrics.AUC(1), "AUC: got num_thresholds=1"),
        (lambda: metrics.AUC(thresholds=[0.5, 2]), "need a list of numbers from 0 to 1"),
        (lambda: metrics.R2Score(0), "R2Score: got outputs=0"),
    ],
)
def test_arguments_without_a_meaning_are_refused(make: Callable[[], metrics.Metric], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


# ---------------------------------------------------------------------- checkpoints


def test_a_state_continues_exactly_in_another_number_of_replicas(strategy: Strategy) -> None:
    with mirrored(3) as before:
        with before.scope():
            matrix = metrics.ConfusionMatrix(C)
        count_in_shares(before, matrix, CLASSES, SCORES)
        state = matrix.state()
    state = {**state, "sums": json.loads(json.dumps(state["sums"].tolist()))}
    with strategy.scope():
        after = metrics.ConfusionMatrix(C)
    count_in_shares(strategy, after, CLASSES, SCORES)  # is forgotten
    after.restore(state)
    np.testing.assert_array_equal(after.result(), matrix.result())
    count_in_shares(strategy, after, CLASSES, SCORES)
    np.testing.assert_array_equal(after.result(), 2 * matrix.result())


def test_a_state_of_another_metric_is_refused_and_changes_nothing() -> None:
    mean, matrix = metrics.Mean(), metrics.ConfusionMatrix(2)
    mean.update([4.0])
    for state, got in (
        (metrics.Accuracy().state(), "one of Accuracy"),
        (None, "one of NoneType"),
        ({"sums": [1, 2]}, "one of dict"),
    ):
        with pytest.raises(ValueError, match=f"mean.restore: got {got}; need a state of Mean"):
            mean.restore(state)
    with pytest.raises(
        ValueError, match=r"shape \(3, 3\); need a state of ConfusionMatrix with sums of shape \(2, 2\)"
    ):
        matrix.restore(metrics.ConfusionMatrix(3).state())
    assert mean.result() == 4


def test_a_checkpoint_continues_a_metric_in_another_number_of_replicas(tmp_path: Path) -> None:
    with mirrored(3) as before, mirrored(2) as after:
        with before.scope():
            saved = metrics.Accuracy()
        with after.scope():
            restored = metrics.Accuracy()
        count_in_shares(before, saved, CLASSES[:40], SCORES[:40])
        Checkpoint(accuracy=saved).save(tmp_path / "last")
        Checkpoint(accuracy=restored).restore(tmp_path / "last")
        count_in_shares(after, restored, CLASSES[40:], SCORES[40:])
        assert restored.result() == np.mean(TAKEN == CLASSES)
