"""Every block of Python in README and the guide runs, a page from its top to its end, and prints what the page says.

A block of kind ``text`` right after one of ``python`` is what that one prints, with ``...`` for what may vary. Blocks of kind
``python notest`` are for hardware that not every machine has; the line above says which.
"""

from __future__ import annotations

import doctest
import re
import sys
import textwrap
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted(p for p in (ROOT / "docs").rglob("*.md") if "_build" not in p.parts)]
_FENCE = re.compile(r"^(?P<indent>\s*)(?P<fence>`{3,})\s*(?P<kind>.*?)\s*$")
_NAMED = r"^\.\. (?:auto|py:)\w+:: (\S+)$"
_EXTRAS = ("torch", "jax", "autograd", "sklearn", "safetensors", "matplotlib")
"""What not every environment that runs the tests has."""


@final
@dataclass(frozen=True)
class Block:
    """A fenced block: its kind, what stands in it, the number of its first line, and the line of text above it."""

    kind: str
    text: str
    line: int
    above: str


def blocks_of(page: Path) -> list[Block]:
    blocks: list[Block] = []
    lines = page.read_text(encoding="utf-8").splitlines()
    number, above = 0, ""
    while number < len(lines):
        opening = _FENCE.match(lines[number])
        if opening is None:
            above = lines[number].strip() or above
            number += 1
            continue
        closing = opening["indent"] + opening["fence"]
        end = next(i for i in range(number + 1, len(lines)) if lines[i].rstrip() == closing)
        text = textwrap.dedent("\n".join(lines[number + 1 : end]) + "\n")
        blocks.append(Block(opening["kind"], text, number + 2, above))
        number, above = end + 1, ""
    return blocks


def identifier(page: Path) -> str:
    return str(page.relative_to(ROOT).with_suffix(""))


RUNNABLE = [page for page in PAGES if any(block.kind == "python" for block in blocks_of(page))]


@pytest.mark.parametrize("page", RUNNABLE, ids=identifier)
def test_the_blocks_of_a_page_run_in_order_and_print_what_it_says(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    blocks = blocks_of(page)
    for extra in _EXTRAS:
        if any(
            re.search(rf"^\s*(import|from) {extra}\b", b.text, re.M) for b in blocks if b.kind == "python"
        ):
            pytest.importorskip(extra)
    monkeypatch.chdir(tmp_path)
    namespace: dict[str, Any] = {"__name__": "__main__"}
    for number, block in enumerate(blocks):
        if block.kind != "python":
            continue
        # Line numbers of tracebacks are those of the page.
        code = compile("\n" * (block.line - 1) + block.text, str(page), "exec")
        exec(code, namespace)
        printed = capsys.readouterr().out
        after = blocks[number + 1] if number + 1 < len(blocks) else None
        if after is not None and after.kind == "text":
            assert_prints(after, printed, page)


def assert_prints(expected: Block, printed: str, page: Path) -> None:
    options = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
    assert doctest.OutputChecker().check_output(expected.text, printed, options), (
        f"{page}, line {expected.line}: the page says\n{expected.text}\nand the block before prints\n{printed}"
    )


def test_the_block_in_readme_learns_the_weights_that_its_comment_says(
    capsys: pytest.CaptureFixture[str],
) -> None:
    (block,) = [block for block in blocks_of(ROOT / "README.md") if block.kind == "python"]
    exec(compile(block.text, "README.md", "exec"), {})
    weights, loss = re.fullmatch(r"(\[.*\]) (\S+)\n", capsys.readouterr().out).groups()  # type: ignore[union-attr]  # else it fails
    assert [float(weight) for weight in weights.strip("[]").split()] == [1.0, -2.0, 0.5]
    assert float(loss) < 1e-9


def test_blocks_that_do_not_run_are_for_hardware_that_the_line_above_names() -> None:
    known = {"python", "python notest", "text", "bash", "toml", "json"}
    for page in PAGES:
        for block in blocks_of(page):
            assert block.kind in known or block.kind.startswith("{"), (
                f"{page}, line {block.line}: {block.kind!r}"
            )
            if block.kind == "python notest":
                assert re.search("GPU|MPI", block.above), (
                    f"{page}, line {block.line}: no reason in {block.above!r}"
                )


@pytest.mark.parametrize("page", PAGES, ids=identifier)
def test_the_links_of_a_page_lead_to_files(page: Path) -> None:
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    for target in re.findall(r"\]\((?!https?:)([^)#]+)(?:#[^)]*)?\)", text):
        assert (page.parent / target).exists(), f"{page}: {target}"


def test_every_public_name_is_in_the_reference() -> None:
    import strategies
    from strategies import metrics, schedules

    told = "\n".join(page.read_text(encoding="utf-8") for page in PAGES if page.parent.name == "reference")
    documented = set(re.findall(_NAMED, told, re.M))
    modules = {
        strategies: "strategies",
        metrics: "strategies.metrics",
        schedules: "strategies.optimizers.schedules",
    }
    missing = {
        f"{where}.{name}"
        for module, where in modules.items()
        for name, value in vars(module).items()
        if not name.startswith("_")
        and not isinstance(value, type(sys))
        and (module is not schedules or getattr(value, "__module__", None) == schedules.__name__)
    } - documented
    assert not missing


def test_what_the_reference_names_is_there() -> None:
    from importlib import import_module

    for page in PAGES:
        for name in re.findall(_NAMED, page.read_text(encoding="utf-8"), re.M):
            where, _, what = name.rpartition(".")
            assert hasattr(import_module(where), what), f"{page}: {name}"
