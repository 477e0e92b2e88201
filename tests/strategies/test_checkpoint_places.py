"""Checkpoints where none can be written: each error names the path and what to do, and leaves nothing behind."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import pytest

import strategies as xd

ROOT = Path(__file__).parents[2]


def files_in(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*")}


def save(checkpoint: xd.Checkpoint, path: str, *, blocking: bool) -> None:
    pending = checkpoint.save(path, blocking=blocking)
    if isinstance(pending, xd.PendingSave):
        pending.wait(20.0)


@pytest.mark.parametrize("blocking", [True, False])
@pytest.mark.parametrize(
    ("path", "kind", "words"),
    [
        (
            "file/ck",
            NotADirectoryError,
            "file is no folder; need one there — move it away, or save to another",
        ),
        ("file/deeper/ck", NotADirectoryError, "file is no folder; need one there"),
        ("link/ck", NotADirectoryError, "link is no folder; need one there"),
        ("folder", IsADirectoryError, "which is a folder; need the path of a file in it"),
        ("n" * 300, OSError, "need a shorter name"),
        (
            "/proc/nowhere/ck",
            FileNotFoundError,
            "need a folder, and /proc/nowhere can't be made — save to anot",
        ),
        ("a\0b", ValueError, "which no file can be called; need a path without the character 0"),
    ],
)
def test_what_is_no_place_for_a_file_is_named_with_what_to_do(
    tmp_path: Path, path: str, kind: type[Exception], words: str, blocking: bool
) -> None:
    (tmp_path / "file").write_text("kept")
    (tmp_path / "link").symlink_to("nothing")
    (tmp_path / "folder").mkdir()
    before = files_in(tmp_path)
    checkpoint = xd.Checkpoint(v=np.ones(1000))
    target = os.path.join(tmp_path, path)
    with pytest.raises(kind, match=r"^(\[Errno \d+\] )?save: ") as caught:
        save(checkpoint, target, blocking=blocking)
    assert words in str(caught.value)
    assert repr(target) in str(caught.value)
    assert files_in(tmp_path) == before
    assert (tmp_path / "file").read_text() == "kept"
    assert checkpoint.save(tmp_path / "good")


_AS_NOBODY = """
import os, sys
import numpy as np
import strategies as xd
xd.Checkpoint(v=np.ones(10)).to_bytes()  # what is loaded late is loaded by who may
try:
    os.setgid(65534)
    os.setuid(65534)
except PermissionError:
    sys.exit(3)
for path in sys.argv[1:]:
    try:
        xd.Checkpoint(v=np.ones(1000)).save(path)
    except OSError as error:
        print(type(error).__name__, error)
"""


def test_a_folder_that_others_may_write_is_named() -> None:
    # Not pytest's own folder, which is closed to other users.
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        folder.chmod(0o555)
        paths = [str(folder / "ck"), str(folder / "new" / "ck")]
        done = subprocess.run(
            [sys.executable, "-c", _AS_NOBODY, *paths],
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=30,
            check=False,
        )
        if done.returncode == 3:
            pytest.skip("this user may not become another one")
        for line, path in zip(done.stdout.splitlines(), paths, strict=True):
            assert line == (
                "PermissionError [Errno 13] save: Permission denied; need a folder that this user may write into — change its rights, "
                f"or save to another path: {path!r}"
            )
        assert not files_in(folder)


def test_a_full_disk_is_named_with_what_is_needed_and_the_last_checkpoint_stays(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(disk)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("this user may not mount a small file system")
    try:
        checkpoint = xd.Checkpoint(v=np.full(1000, 3.0))
        path = checkpoint.save(disk / "ck")
        words = r"save: No space left on device; need room for 1,600,000 bytes beside what stood there before — free some"
        for blocking in (True, False):
            with pytest.raises(OSError, match=words) as caught:
                save(xd.Checkpoint(v=np.ones(200_000)), path, blocking=blocking)
            assert caught.value.filename == path
            assert re.search(r"'.*/disk/ck'$", str(caught.value))
        assert files_in(disk) == {"ck"}
        assert xd.load_checkpoint(path)["v"].tolist() == [3.0] * 1000
    finally:
        subprocess.run(["umount", disk], check=True)
