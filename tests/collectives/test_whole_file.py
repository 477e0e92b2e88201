"""Files that are written as a whole or not at all."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from collectives.whole_file import write_whole


def test_a_file_is_made_or_replaced_and_nothing_is_left_beside_it(tmp_path: Path) -> None:
    path = tmp_path / "new" / "file"
    write_whole(path, b"one")
    write_whole(str(path), b"another")
    assert path.read_bytes() == b"another"
    assert os.listdir(path.parent) == ["file"]


def test_a_new_file_has_the_usual_permissions(tmp_path: Path) -> None:
    (tmp_path / "usual").write_bytes(b"")
    write_whole(tmp_path / "whole", b"")
    modes = [stat.S_IMODE((tmp_path / name).stat().st_mode) for name in ("usual", "whole")]
    assert modes[0] == modes[1]


def test_what_cannot_be_put_in_place_leaves_the_old_and_no_rest(tmp_path: Path) -> None:
    (tmp_path / "folder" / "full").mkdir(parents=True)
    with pytest.raises(OSError, match="folder"):
        write_whole(tmp_path / "folder", b"one")
    assert os.listdir(tmp_path) == ["folder"]
