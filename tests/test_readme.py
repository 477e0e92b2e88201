"""What README shows runs, and does what it says."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

README = Path(__file__).parents[1] / "README.md"


def test_the_code_in_readme_trains_and_prints_what_its_comment_says(
    capsys: pytest.CaptureFixture[str],
) -> None:
    blocks = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)
    assert blocks
    for block in blocks:
        exec(compile(block, str(README), "exec"), {})
    weights, loss = re.fullmatch(r"(\[.*\]) (\S+)\n", capsys.readouterr().out).groups()  # type: ignore[union-attr]  # else it fails
    assert [float(weight) for weight in weights.strip("[]").split()] == [1.0, -2.0, 0.5]
    assert float(loss) < 1e-9


@pytest.mark.parametrize("target", sorted(set(re.findall(r"\]\((?!http)([^)]+)\)", README.read_text(encoding="utf-8")))))
def test_a_link_in_readme_leads_to_a_file(target: str) -> None:
    assert (README.parent / target).exists()
