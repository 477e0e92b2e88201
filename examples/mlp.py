"""A multi-layer perceptron and its gradients by hand, in plain NumPy.

Nothing here knows of replicas. The parameters are a list, weight and bias of the first layer, weight
and bias of the second and so on, of anything that computes like an array: variables or arrays.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

Floats = NDArray[np.floating[Any]]
Labels = NDArray[np.int64]


def initial_parameters(
    widths: Sequence[int], rng: np.random.Generator, dtype: DTypeLike = np.float64
) -> list[Floats]:
    """Weights drawn so that, through ReLU, a signal keeps its size from layer to layer; biases of zero.

    Args:
        widths: of the input, of each hidden layer, of the output.
        rng: where the weights are drawn from.
        dtype: of weights and biases.

    Returns:
        For each layer a weight of shape ``(width_in, width_out)`` and a bias of shape ``(width_out,)``.
    """
    parameters: list[Floats] = []
    for width_in, width_out in pairwise(widths):
        weight = rng.standard_normal((width_in, width_out)) * np.sqrt(2 / width_in)
        parameters += [weight.astype(dtype), np.zeros(width_out, dtype)]
    return parameters


def forward(parameters: Sequence[Any], x: Floats) -> tuple[Floats, list[Floats]]:
    """The network's answer, and what each layer was given, which `backward` needs.

    Args:
        parameters: as from `initial_parameters`.
        x: shape ``(batch, width)``; a batch of length 0 is as good as any.

    Returns:
        Logits of shape ``(batch, classes)``, and for each layer its input of shape ``(batch, width_in)``.
    """
    inputs: list[Floats] = []
    logits = x
    for weight, bias in zip(parameters[::2], parameters[1::2], strict=True):
        inputs.append(np.maximum(logits, 0) if inputs else x)
        logits = inputs[-1] @ weight + bias
    return logits, inputs


def cross_entropy(logits: Floats, labels: Labels) -> tuple[Floats, Floats]:
    """The softmax cross-entropy of each example, and its derivative by the logits.

    Args:
        logits: shape ``(batch, classes)``.
        labels: shape ``(batch,)``, the class of each example.

    Returns:
        Losses of shape ``(batch,)`` and derivatives of shape ``(batch, classes)``. Neither is averaged:
        one replica cannot know how many examples the others have.
    """
    # Softmax doesn't change when all logits are shifted alike, and exp of at most 0 cannot overflow.
    logits = logits - logits.max(axis=1, keepdims=True)
    exponentials = np.exp(logits)
    sums = exponentials.sum(axis=1, keepdims=True)
    answers = np.arange(len(labels)), labels
    losses = np.log(sums[:, 0]) - logits[answers]
    derivatives = exponentials / sums
    derivatives[answers] -= 1
    return losses, derivatives


def backward(parameters: Sequence[Any], inputs: Sequence[Floats], derivatives: Floats) -> list[Floats]:
    """The gradient of every parameter, summed over the examples.

    Args:
        parameters: those that `forward` was given.
        inputs: those that it returned.
        derivatives: of the loss by the logits, shape ``(batch, classes)``.

    Returns:
        Arrays in the order and the shapes of `parameters`.
    """
    gradients: list[Floats] = []
    for weight, x in zip(reversed(parameters[::2]), reversed(inputs), strict=True):
        gradients += [derivatives.sum(axis=0), x.T @ derivatives]
        derivatives = (derivatives @ np.transpose(weight)) * (x > 0)
    return gradients[::-1]
