"""The gradients of three well-known models: their published shapes, in the order of the forward pass."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise

Shape = tuple[int, ...]


def resnet50() -> list[Shape]:
    """ResNet-50 for ImageNet (He et al. 2015), with torchvision's layout: 161 arrays, 25,557,032 numbers."""
    shapes: list[Shape] = [(64, 3, 7, 7), (64,), (64,)]
    channels = 64
    for blocks, width in ((3, 64), (4, 128), (6, 256), (3, 512)):
        for block in range(blocks):
            for kernel in ((width, channels, 1, 1), (width, width, 3, 3), (4 * width, width, 1, 1)):
                shapes += [
                    kernel,
                    kernel[:1],
                    kernel[:1],
                ]  # the convolution, and its batch norm's scale and shift
            if block == 0:
                shapes += [(4 * width, channels, 1, 1), (4 * width,), (4 * width,)]
            channels = 4 * width
    return [*shapes, (1000, channels), (1000,)]


def bert_base() -> list[Shape]:
    """BERT-base, uncased (Devlin et al. 2018), with its pooler: 199 arrays, 109,482,240 numbers."""
    hidden, intermediate = 768, 3072
    norm: list[Shape] = [(hidden,), (hidden,)]
    dense: list[Shape] = [(hidden, hidden), (hidden,)]
    layer: list[Shape] = [
        *dense * 4,  # query, key, value, output
        *norm,
        (intermediate, hidden),
        (intermediate,),
        (hidden, intermediate),
        (hidden,),
        *norm,
    ]
    return [(30522, hidden), (512, hidden), (2, hidden), *norm, *layer * 12, *dense]


def dlrm_dense() -> list[Shape]:
    """The dense part of DLRM as MLPerf trains it (Naumov et al. 2019): 16 arrays, 2,368,897 numbers.

    The top network reads the dot products of all pairs of 27 vectors of 128 numbers, and one vector itself.
    """
    shapes: list[Shape] = []
    for widths in ((13, 512, 256, 128), (27 * 26 // 2 + 128, 1024, 1024, 512, 256, 1)):
        for n, m in pairwise(widths):
            shapes += [(m, n), (m,)]
    return shapes


MODELS: dict[str, Callable[[], list[Shape]]] = {
    "ResNet-50": resnet50,
    "BERT-base": bert_base,
    "DLRM-dense": dlrm_dense,
}


def num_elements(shapes: list[Shape]) -> int:
    """How many numbers arrays of these shapes hold together."""
    return sum(math.prod(shape) for shape in shapes)
