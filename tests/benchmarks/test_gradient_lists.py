"""The published sizes of the models whose gradients are reduced."""

from __future__ import annotations

import pytest

from benchmarks.gradient_lists import MODELS, num_elements


@pytest.mark.parametrize(
    ("model", "arrays", "numbers"),
    [("ResNet-50", 161, 25_557_032), ("BERT-base", 199, 109_482_240), ("DLRM-dense", 16, 2_368_897)],
)
def test_a_model_has_as_many_parameters_as_published(model: str, arrays: int, numbers: int) -> None:
    shapes = MODELS[model]()
    assert len(shapes) == arrays
    assert num_elements(shapes) == numbers
