"""The demo: its network against plain NumPy, its loss curve on every strategy, its command line."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("sklearn", reason="the digits come with scikit-learn, of the extra demo")
pytest.importorskip("matplotlib", reason="the plot is drawn by matplotlib, of the extra demo")

from examples import mlp
from examples.curves import History, save_plot
from examples.digits import HIDDEN_WIDTHS, LEARNING_RATES, Digits, load, main, make_strategy, train
from strategies import from_arrays

PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"


@pytest.fixture(scope="module")
def digits() -> Digits:
    return load()


@pytest.fixture(scope="module")
def one_device_curves(digits: Digits) -> dict[int, list[float]]:
    """By batch size."""
    return {size: curve("one_device", 1, digits, epochs=3, batch_size=size) for size in (64, 359)}


def curve(strategy_name: str, num_replicas: int, digits: Digits, epochs: int, batch_size: int) -> list[float]:
    with make_strategy(strategy_name, num_replicas) as strategy:
        history = train(strategy, digits, epochs=epochs, batch_size=batch_size)
    # Replicas that were all given the whole batch would follow the same curve, so count what they were given.
    assert history.num_examples == epochs * len(digits.train_labels)
    return history.losses


def curve_in_plain_numpy(digits: Digits, epochs: int, batch_size: int, seed: int = 0) -> list[float]:
    """The demo's training with Adam written out, the batches from the dataset as they come."""
    widths = (digits.train_images.shape[1], *HIDDEN_WIDTHS, 10)
    parameters = mlp.initial_parameters(widths, np.random.default_rng(seed))
    means = [np.zeros_like(parameter) for parameter in parameters]
    squares = [np.zeros_like(parameter) for parameter in parameters]
    batches = from_arrays((digits.train_images, digits.train_labels)).shuffle(seed=seed).batch(batch_size)
    losses_by_step = []
    for _ in range(epochs):
        for images, labels in batches:
            logits, inputs = mlp.forward(parameters, images)
            losses, derivatives = mlp.cross_entropy(logits, labels)
            losses_by_step.append(float(losses.mean()))
            gradients = mlp.backward(parameters, inputs, derivatives / len(labels))
            step = len(losses_by_step)
            rate = LEARNING_RATES["adam"] * np.sqrt(1 - 0.999**step) / (1 - 0.9**step)
            for parameter, gradient, mean, square in zip(parameters, gradients, means, squares, strict=True):
                mean += 0.1 * (gradient - mean)
                square += 0.001 * (gradient**2 - square)
                parameter -= rate * mean / (np.sqrt(square) + 1e-7)
    return losses_by_step


def test_the_gradients_by_hand_agree_with_finite_differences() -> None:
    rng = np.random.default_rng(1)
    parameters = mlp.initial_parameters((5, 7, 6, 4), rng)
    for parameter in parameters:
        parameter += 0.1 * rng.standard_normal(parameter.shape)
    images, labels = rng.standard_normal((9, 5)), rng.integers(0, 4, 9)

    def loss() -> float:
        return float(mlp.cross_entropy(mlp.forward(parameters, images)[0], labels)[0].sum())

    logits, inputs = mlp.forward(parameters, images)
    gradients = mlp.backward(parameters, inputs, mlp.cross_entropy(logits, labels)[1])
    for parameter, gradient in zip(parameters, gradients, strict=True):
        differences = np.empty_like(parameter)
        for index in np.ndindex(parameter.shape):
            value = parameter[index]
            parameter[index] = value + 1e-5
            above = loss()
            parameter[index] = value - 1e-5
            below = loss()
            parameter[index] = value
            differences[index] = (above - below) / 2e-5
        np.testing.assert_allclose(gradient, differences, rtol=1e-6, atol=1e-7)


def test_the_cross_entropy_of_two_examples_is_as_by_hand() -> None:
    losses, derivatives = mlp.cross_entropy(np.array([[0.0, 0.0], [1000.0, 0.0]]), np.array([1, 1]))
    np.testing.assert_allclose(losses, np.array([np.log(2), 1000]))
    np.testing.assert_allclose(derivatives, np.array([[0.5, -0.5], [1, -1]]))


def test_an_empty_share_has_gradients_of_zero() -> None:
    parameters = mlp.initial_parameters((5, 7, 4), np.random.default_rng(0))
    logits, inputs = mlp.forward(parameters, np.empty((0, 5)))
    losses, derivatives = mlp.cross_entropy(logits, np.empty(0, np.int64))
    assert losses.shape == (0,)
    for parameter, gradient in zip(parameters, mlp.backward(parameters, inputs, derivatives), strict=True):
        np.testing.assert_array_equal(gradient, np.zeros_like(parameter))


def test_the_split_is_the_same_each_time_and_shares_no_image(digits: Digits) -> None:
    again = load()
    for one, other in zip(digits, again, strict=True):
        np.testing.assert_array_equal(one, other)
    assert [len(part) for part in digits] == [1437, 1437, 360, 360]
    assert digits.train_images.min() == 0
    assert digits.train_images.max() == 1
    train_images = {image.tobytes() for image in digits.train_images}
    assert not any(image.tobytes() in train_images for image in digits.test_images)


# 1,437 examples in batches of 359 leave a last batch of one: with 2 replicas and more, one has it and
# the others are given nothing.
@pytest.mark.parametrize("batch_size", [64, 359])
def test_one_device_follows_the_loss_curve_of_plain_numpy(
    digits: Digits, one_device_curves: dict[int, list[float]], batch_size: int
) -> None:
    expected = curve_in_plain_numpy(digits, 3, batch_size)
    np.testing.assert_allclose(one_device_curves[batch_size], expected, rtol=0, atol=1e-9)


@pytest.mark.parametrize("batch_size", [64, 359])
@pytest.mark.parametrize("num_replicas", [1, 2, 3, 4])
@pytest.mark.parametrize("strategy_name", ["mirrored", "central_storage"])
def test_every_strategy_follows_the_loss_curve_of_one_device(
    digits: Digits,
    one_device_curves: dict[int, list[float]],
    strategy_name: str,
    num_replicas: int,
    batch_size: int,
) -> None:
    got = curve(strategy_name, num_replicas, digits, epochs=3, batch_size=batch_size)
    assert len(got) == 3 * -(-1437 // batch_size)
    np.testing.assert_allclose(got, one_device_curves[batch_size], rtol=0, atol=1e-9)


def test_batches_smaller_than_the_number_of_replicas_train_the_same_network(digits: Digits) -> None:
    few = Digits(digits.train_images[:20], digits.train_labels[:20], *digits[2:])
    got = curve("mirrored", 4, few, epochs=1, batch_size=3)
    np.testing.assert_allclose(got, curve("one_device", 1, few, epochs=1, batch_size=3), rtol=0, atol=1e-9)


def test_float32_digits_are_learnt_in_float32() -> None:
    got = curve("mirrored", 2, load("float32"), epochs=1, batch_size=200)
    assert got == [float(np.float32(loss)) for loss in got]
    np.testing.assert_allclose(got, curve("mirrored", 2, load(), epochs=1, batch_size=200), rtol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["adam", "sgd"])
@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_two_replicas_read_96_percent_of_the_test_set(optimizer: str, dtype: str) -> None:
    with make_strategy("mirrored", 2) as strategy:
        history = train(strategy, load(dtype), optimizer=optimizer)
    assert history.test_accuracies[-1] >= 0.96
    assert history.train_accuracies[-1] >= 0.99
    assert len(history.test_accuracies) == len(history.train_accuracies) == 30
    assert history.num_examples == 30 * 1437
    assert history.examples_per_second > 0


def test_the_report_comes_after_each_step_and_each_test(digits: Digits) -> None:
    seen = []
    with make_strategy("mirrored", 2) as strategy:
        train(
            strategy,
            digits,
            epochs=2,
            batch_size=800,
            report=lambda history: seen.append((len(history.losses), len(history.test_accuracies))),
        )
    assert seen == [(1, 0), (2, 0), (2, 1), (3, 1), (4, 1), (4, 2)]


def test_the_command_leaves_a_plot_and_says_accuracy_and_speed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plot = tmp_path / "curves.png"
    main(["--epochs", "2", "--replicas", "3", "--quiet", "--plot", str(plot)])
    out = capsys.readouterr().out
    assert re.fullmatch(
        rf"test accuracy \d+\.\d%, [\d,]+ examples/s, curves in {re.escape(str(plot))}\n", out
    )
    assert plot.read_bytes().startswith(PNG_SIGNATURE)
    assert list(tmp_path.iterdir()) == [plot]


def test_the_progress_bar_ends_with_all_steps_done(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    plot = tmp_path / "curves.png"
    main(["--strategy", "central_storage", "--epochs", "2", "--batch-size", "200", "--plot", str(plot)])
    heading, bar, *_ = capsys.readouterr().out.splitlines()
    assert heading == "1,437 digits to learn from, CentralStorageStrategy(['cpu:0', 'cpu:1'])"
    assert re.fullmatch(r"epoch 2/2 ━+ loss \S+, accuracy \S+%, \S+ examples/s *", bar)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--replicas", "0"], "--replicas: got '0'; a whole number of at least 1 is needed"),
        (["--epochs", "two"], "--epochs: got 'two'; a whole number of at least 1 is needed"),
        (["--batch-size", "-5"], "--batch-size: got '-5'; a whole number of at least 1 is needed"),
        (["--seed", "1.5"], "--seed: got '1.5'; a whole number of at least 0 is needed"),
        (["--learning-rate", "nan"], "--learning-rate: got 'nan'; a number above 0 is needed"),
        (["--learning-rate", "fast"], "--learning-rate: got 'fast'; a number above 0 is needed"),
        (
            ["--plot", "no/such/folder.png"],
            "--plot: got 'no/such/folder.png'; a file in a folder that can be written to",
        ),
        (["--plot", "."], "--plot: got '.'; a file in a folder that can be written to is needed"),
        (["--strategy", "tpu"], "one_device"),
        (["--strategy", "one_device", "--replicas", "2"], "--replicas: got 2; one_device runs 1"),
    ],
)
def test_a_wrong_flag_is_refused_with_what_is_needed(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as exit_info:
        main(arguments)
    assert exit_info.value.code == 2
    assert words in capsys.readouterr().err


@pytest.mark.parametrize("module", ["sklearn.datasets", "matplotlib.figure"])
def test_a_missing_extra_is_named_before_any_training(module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(SystemExit, match=r"pip install 'xpdistribute\[demo\]'"):
        main(["--quiet"])


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_a_loss_that_is_no_number_ends_the_training_with_advice(tmp_path: Path) -> None:
    plot = tmp_path / "curves.png"
    with pytest.raises(SystemExit, match="a finite loss is needed — lower the learning rate"):
        main(["--optimizer", "sgd", "--learning-rate", "1e200", "--quiet", "--plot", str(plot)])
    assert not plot.exists()


def test_a_plot_that_cannot_be_put_in_place_leaves_nothing_behind(tmp_path: Path) -> None:
    taken = tmp_path / "taken"
    taken.mkdir()
    with pytest.raises(IsADirectoryError):
        save_plot(History([2.0, 1.0], [0.5], [0.6]), taken, "Digits")
    assert list(tmp_path.iterdir()) == [taken]
