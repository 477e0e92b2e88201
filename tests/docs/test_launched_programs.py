"""The programs in the guide that are for several processes run as the commands below them say, and print what the page says.

A block of Python whose text above names a file, as in "Save this as `train.py`", is that file. A block of ``bash`` that is followed by
one of ``text`` is a command and what it prints; Python and the command are those of this environment.
"""

from __future__ import annotations

import itertools
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.test_code_blocks import PAGES, ROOT, Block, assert_prints, blocks_of, identifier

pytest.importorskip("mpi4py", reason="xpdistribute run needs mpiexec, of the extra mpi")

_FILE = re.compile(r"`(\w+\.py)`:$")


def files_of(page: Path) -> dict[str, str]:
    named = ((_FILE.search(block.above), block) for block in blocks_of(page) if block.kind == "python")
    return {name[1]: block.text for name, block in named if name is not None}


def commands_of(page: Path) -> list[tuple[Block, Block]]:
    blocks = blocks_of(page)
    return [
        (command, output)
        for command, output in itertools.pairwise(blocks)
        if command.kind == "bash" and output.kind == "text"
    ]


LAUNCHED = [
    pytest.param(page, command, output, id=f"{identifier(page)}:{command.line}")
    for page in PAGES
    for command, output in commands_of(page)
]


@pytest.mark.parametrize(("page", "command", "output"), LAUNCHED)
def test_a_command_prints_what_the_page_says(
    page: Path, command: Block, output: Block, tmp_path: Path
) -> None:
    for name, text in files_of(page).items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    own = f'"{sys.executable}"'
    line = re.sub(r"^xpdistribute\b", f"{own} -m xpdistribute", command.text.strip())
    done = subprocess.run(
        ["bash", "-c", re.sub(r"^python\b", own, line)],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT if "2>&1" in line else subprocess.PIPE,
        text=True,
        timeout=60,
        check=False,
    )
    assert_prints(output, done.stdout, page)
    shutil.rmtree(tmp_path)


def test_the_pages_on_processes_have_such_commands() -> None:
    pages = {page.stem for page in PAGES if commands_of(page)}
    assert {"many_processes", "when_processes_die", "debugging"} <= pages
