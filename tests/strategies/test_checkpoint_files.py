"""Checkpoints as files: whole or not at all, whatever happens; and files that are not what they should be."""

from __future__ import annotations

import json
import os
import pickle
import resource
import subprocess
import sys
import threading
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy

import strategies as xpd


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A checkpoint of two variables, a generator and a number."""
    v = xpd.Variable(np.arange(1000.0))
    return Path(
        xpd.Checkpoint(v=v, w=xpd.Variable([1, 2]), rng=np.random.default_rng(0), step=1).save(tmp_path / "c")
    )


def refused(path: Path) -> str:
    """The message with which a file is refused; nothing of it is restored."""
    v, w = xpd.Variable(np.zeros(1000)), xpd.Variable([0, 0])
    checkpoint = xpd.Checkpoint(v=v, w=w, rng=np.random.default_rng(1), step=0)
    with pytest.raises(xpd.CheckpointError) as caught:
        checkpoint.restore(path)
    assert not v.numpy().any()
    assert not w.numpy().any()
    assert checkpoint.step == 0
    with pytest.raises(xpd.CheckpointError):
        xpd.load_checkpoint(path)
    return str(caught.value)


# ---------------------------------------------------------------------------- damage


def test_a_path_without_a_checkpoint_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"no checkpoint at '.*absent/c'; need the path"):
        xpd.Checkpoint(v=xpd.Variable(1.0)).restore(tmp_path / "absent" / "c")


def test_a_file_cut_anywhere_is_refused(saved: Path) -> None:
    whole = saved.read_bytes()
    for length in [0, 1, 7, 8, 9, 100, len(whole) // 2, len(whole) - 1]:
        saved.write_bytes(whole[:length])
        assert "can't be used" in refused(saved)
    saved.write_bytes(whole + b"\0")
    assert "can't be used" in refused(saved)


def test_a_flipped_bit_anywhere_is_noticed(saved: Path) -> None:
    whole = saved.read_bytes()
    header = 8 + int.from_bytes(whole[:8], "little")
    unused = len(whole[8:header].rstrip(b" ")) + 8  # what follows fills up with blanks
    places = np.random.default_rng(0).integers(0, len(whole) * 8, 300)
    for place in [*places.tolist(), 8 * header, 8 * len(whole) - 1]:
        byte, bit = divmod(place, 8)
        if unused <= byte < header:
            continue
        damaged = bytearray(whole)
        damaged[byte] ^= 1 << bit
        saved.write_bytes(damaged)
        v = xpd.Variable(np.zeros(1000))
        with pytest.raises(xpd.CheckpointError):
            xpd.Checkpoint(v=v).restore(saved)
        assert not v.numpy().any()


def test_damage_names_the_array(saved: Path) -> None:
    damaged = bytearray(saved.read_bytes())
    damaged[-1] ^= 1  # w has narrower numbers, or came later
    saved.write_bytes(damaged)
    assert "the checksum of w is wrong" in refused(saved)


@pytest.mark.parametrize("content", ["text", "pickle", "npz", "zeros", "random", "json"])
def test_foreign_files_are_refused_and_never_executed(content: str, tmp_path: Path) -> None:
    executed = tmp_path / "executed"

    class Hostile:
        def __reduce__(self) -> Any:
            return os.mkdir, (str(executed),)

    path = tmp_path / "c"
    if content == "npz":
        with path.open("wb") as file:
            np.savez(file, v=np.zeros(3))
    else:
        path.write_bytes(
            {
                "text": b"hello\n" * 100,
                "pickle": pickle.dumps(Hostile()),
                "zeros": bytes(4096),
                "random": np.random.default_rng(0).bytes(4096),
                "json": b'{"v": [1, 2]}',
            }[content]
        )
    assert "can't be used" in refused(path)
    assert not executed.exists()


def test_a_folder_is_refused_with_the_way_to_its_checkpoints(tmp_path: Path) -> None:
    with pytest.raises(xpd.CheckpointError, match=r"which is a folder.*latest_checkpoint"):
        xpd.Checkpoint().restore(tmp_path)
    with pytest.raises(IsADirectoryError, match="which is a folder"):
        xpd.Checkpoint().save(tmp_path)


def test_another_programs_safetensors_file_is_told_apart(tmp_path: Path) -> None:
    path = tmp_path / "c"
    safetensors.numpy.save_file({"v": np.zeros(1000), "w": np.zeros(2, np.int64)}, path)
    assert "a safetensors file of another program" in refused(path)


# --------------------------------------------------------------------------- hostility


def build(path: Path, header: str | bytes, data: bytes = b"", length: int | None = None) -> Path:
    text = header if isinstance(header, bytes) else header.encode()
    path.write_bytes((len(text) if length is None else length).to_bytes(8, "little") + text + data)
    return path


def ours(index: Any, arrays: dict[str, Any]) -> str:
    text = index if isinstance(index, str) else json.dumps(index)
    metadata = {"xpdistribute": text, "xpdistribute.crc32": f"{zlib.crc32(text.encode()):08x}"}
    return json.dumps({"__metadata__": metadata, **arrays})


V = {"dtype": "F64", "shape": [1], "data_offsets": [0, 8]}
ABOUT_V = {"dtype": "float64", "shape": [1], "crc32": ["6522df69"]}


@pytest.mark.parametrize(
    "header",
    [
        '{"v": {"dtype": "F64", "shape": [1], "data_offsets": [0, 9999999999999]}}',
        '{"v": {"dtype": "F64", "shape": [-1], "data_offsets": [0, 8]}}',
        '{"v": {"dtype": "F64", "shape": [4611686018427387904, 4], "data_offsets": [0, 8]}}',
        '{"v": {"dtype": "F64", "shape": [1], "data_offsets": [8, 0]}}',
        '{"v": {"dtype": "PY_OBJECT", "shape": [1], "data_offsets": [0, 8]}}',
        '{"v": ' * 100_000,
        "{" + '"a":{"dtype":"F64","shape":[0],"data_offsets":[0,0]},' * 2 + '"v":[]}',
        b"\xff\xfe\x00",
    ],
    ids=["end", "negative", "overflow", "backwards", "dtype", "deep", "broken", "no_text"],
)
def test_headers_that_lie_are_refused(header: str | bytes, tmp_path: Path) -> None:
    assert "can't be used" in refused(build(tmp_path / "c", header, bytes(8)))


@pytest.mark.parametrize("length", [2**64 - 1, 2**63, 10**9, 10**6])
def test_a_header_that_claims_to_be_huge_takes_no_memory(length: int, tmp_path: Path) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert "can't be used" in refused(build(tmp_path / "c", "{}", length=length))
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 50_000  # KB


@pytest.mark.parametrize(
    "index",
    [
        "no JSON",
        "[" * 100_000,
        "9" * 100_000,
        [],
        {"format": 1},
        {"format": 99, "arrays": {"v": ABOUT_V}, "states": {}},
        {"format": 1, "arrays": {}, "states": {}},
        {"format": 1, "arrays": {"v": {**ABOUT_V, "shape": [2]}}, "states": {}},
        {"format": 1, "arrays": {"v": {**ABOUT_V, "dtype": "object"}}, "states": {}},
        {"format": 1, "arrays": {"v": {**ABOUT_V, "crc32": []}}, "states": {}},
        {"format": 1, "arrays": {"v": {**ABOUT_V, "crc32": ["no hex"]}}, "states": {}},
        {"format": 1, "arrays": {"v": ABOUT_V}, "states": []},
        {"format": 1, "arrays": {"v": ABOUT_V}, "states": {"x": {"$array": "../../elsewhere"}}},
        {"format": 1, "arrays": {"v": ABOUT_V}, "states": {"x": {"$array": ["v"]}}},
    ],
)
def test_an_index_that_makes_no_sense_is_refused(index: Any, tmp_path: Path) -> None:
    message = refused(build(tmp_path / "c", ours(index, {"v": V}), bytes(8)))
    assert "can't be used" in message or "has format 99" in message


def test_arrays_that_lie_over_one_another_are_refused(tmp_path: Path) -> None:
    index = {"format": 1, "arrays": {"v": ABOUT_V, "w": ABOUT_V}, "states": {}}
    assert "can't be used" in refused(build(tmp_path / "c", ours(index, {"v": V, "w": V}), bytes(8)))


def test_of_two_arrays_of_one_name_none_is_believed(tmp_path: Path) -> None:
    two = ours({"format": 1, "arrays": {"v": ABOUT_V}, "states": {}}, {"v": V})
    two = two[:-1] + ', "v": {"dtype": "F64", "shape": [1], "data_offsets": [8, 16]}}'
    assert "can't be used" in refused(build(tmp_path / "c", two, bytes(16)))


def test_names_are_never_paths(tmp_path: Path) -> None:
    name = "../../outside"
    path = xpd.Checkpoint(**{name: xpd.Variable(1.0)}).save(tmp_path / "a" / "b" / "c")
    assert sorted(str(p.relative_to(tmp_path)) for p in tmp_path.rglob("*")) == ["a", "a/b", "a/b/c"]
    assert list(xpd.load_checkpoint(path)) == [name]


def test_a_state_of_the_wrong_kind_is_refused(tmp_path: Path) -> None:
    path = xpd.Checkpoint(o="not an optimizer's").save(tmp_path / "c")
    optimizer = xpd.SGD(0.1)
    with pytest.raises(ValueError, match="need iterations and learning_rate"):
        xpd.Checkpoint(o=optimizer).restore(path)
    assert (optimizer.learning_rate, optimizer.iterations) == (0.1, 0)


# --------------------------------------------------------------------------- atomicity


def test_saving_leaves_one_file_and_replaces_the_one_before(tmp_path: Path) -> None:
    v = xpd.Variable([1.0])
    checkpoint = xpd.Checkpoint(v=v)
    assert checkpoint.save(tmp_path / "c") == str(tmp_path / "c")
    v.assign([2.0])
    checkpoint.save(str(tmp_path / "c"))
    assert [p.name for p in tmp_path.iterdir()] == ["c"]
    assert xpd.load_checkpoint(tmp_path / "c")["v"].tolist() == [2.0]


def test_a_checkpoint_can_be_read_while_it_is_replaced(tmp_path: Path) -> None:
    v = xpd.Variable(np.zeros(50_000))
    checkpoint = xpd.Checkpoint(v=v)
    path = checkpoint.save(tmp_path / "c")
    over = threading.Event()
    seen: list[Any] = []

    def read() -> None:
        while not over.is_set():
            seen.append(np.unique(xpd.load_checkpoint(path)["v"]))

    reader = threading.Thread(target=read)
    reader.start()
    for number in range(30):
        v.assign(np.full(50_000, float(number)))
        checkpoint.save(path)
    over.set()
    reader.join(10)
    assert len(seen) > 1
    assert all(len(values) == 1 for values in seen)


_KILLED = """
import os, random, signal, sys, time
import numpy as np
import strategies as xpd

path, kills = sys.argv[1], int(sys.argv[2])
rng = random.Random(0)

def save_forever(first):
    a, b = xpd.Variable(np.zeros(200_000)), xpd.Variable(np.zeros(3, np.int64))
    optimizer = xpd.SGD(0.1, momentum=0.9)
    checkpoint = xpd.Checkpoint(a=a, b=b, optimizer=optimizer, step=first)
    optimizer.slot(a, "momentum")
    while True:
        checkpoint.step += 1
        for variable in (a, b):
            variable.assign(np.full(variable.shape, checkpoint.step, variable.dtype))
        optimizer.slot(a, "momentum")[:] = checkpoint.step
        checkpoint.save(path)

begin = time.monotonic()
for _ in range(5):
    xpd.Checkpoint(v=xpd.Variable(np.zeros(400_000))).save(path + "_timed")
os.unlink(path + "_timed")
duration = (time.monotonic() - begin) / 5
last = 0
for number in range(kills):
    child = os.fork()
    if not child:
        save_forever(last)
    deadline = time.monotonic() + 30
    while number == 0 and not os.path.exists(path) and time.monotonic() < deadline:
        time.sleep(0.001)
    time.sleep(rng.uniform(0, 5 * duration))
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    values = xpd.load_checkpoint(path)
    step = values["step"]
    assert step >= last, (step, last)
    for name in ("a", "b", "optimizer/momentum/a"):
        assert (values[name] == step).all(), (name, step)
    last = step
print(last)
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="kills forked processes")
def test_a_writer_killed_at_any_of_50_moments_leaves_the_last_checkpoint_whole(tmp_path: Path) -> None:
    path = tmp_path / "c"
    done = subprocess.run(
        [sys.executable, "-c", _KILLED, str(path), "50"],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
        cwd=Path(__file__).parents[2],
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 20  # they did save in between
    leftovers = [p for p in tmp_path.iterdir() if p != path]
    assert leftovers, "no kill came in the middle of a save"
    for leftover in leftovers:  # killed writers hold no lock
        os.utime(leftover, (time.time() - 3600,) * 2)
    xpd.Checkpoint(v=xpd.Variable(1.0)).save(path)
    assert [p.name for p in tmp_path.iterdir()] == ["c"]


def test_a_partial_file_whose_writer_lives_is_left_alone(tmp_path: Path) -> None:
    import fcntl

    partial = tmp_path / ".c.123.456.partial"
    with partial.open("wb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        os.utime(partial, (0, 0))
        xpd.Checkpoint(v=xpd.Variable(1.0)).save(tmp_path / "c")
        assert partial.exists()
    xpd.Checkpoint(v=xpd.Variable(1.0)).save(tmp_path / "c")
    assert not partial.exists()


_FULL = """
import resource, sys
import numpy as np
import strategies as xpd

v = xpd.Variable(np.zeros(100_000))
checkpoint = xpd.Checkpoint(v=v)
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
for blocking in (True, False):
    try:
        saving = checkpoint.save(sys.argv[1], blocking=blocking)
        saving.wait()
    except OSError as error:
        print(error.strerror)
"""


def test_a_disk_without_room_is_an_error_and_leaves_the_last_checkpoint(tmp_path: Path) -> None:
    path = xpd.Checkpoint(v=xpd.Variable([3.0])).save(tmp_path / "c")
    done = subprocess.run(
        [sys.executable, "-c", _FULL, path],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
        cwd=Path(__file__).parents[2],
    )
    text = "save: File too large; need files of 800,000 bytes to be allowed — raise the limit (ulimit -f unlimited), or save to another path"
    assert done.stdout.splitlines() == [text] * 2
    assert [p.name for p in tmp_path.iterdir()] == ["c"]
    assert xpd.load_checkpoint(path)["v"].tolist() == [3.0]


def test_a_value_that_cannot_be_saved_leaves_the_last_checkpoint(tmp_path: Path) -> None:
    class Odd:
        def state(self) -> Any:
            return {"f": print}

        def restore(self, state: Any) -> None:
            raise AssertionError

    path = xpd.Checkpoint(v=xpd.Variable([3.0])).save(tmp_path / "c")
    with pytest.raises(TypeError, match="odd/f: got builtin_function_or_method"):
        xpd.Checkpoint(v=xpd.Variable([4.0]), odd=Odd()).save(path)
    assert xpd.load_checkpoint(path)["v"].tolist() == [3.0]


# ---------------------------------------------------------------------------- sizes


@pytest.mark.parametrize("num_bytes", [(16 << 20) - 1, 16 << 20, (16 << 20) + 1, 40 << 20])
def test_arrays_around_the_size_of_a_checksums_piece_come_back(num_bytes: int, tmp_path: Path) -> None:
    value = np.random.default_rng(0).integers(0, 256, num_bytes, np.uint8)
    whole, first, second = xpd.Variable(value), xpd.Variable(value[:7]), xpd.Variable(value[7:])
    path = xpd.Checkpoint(v=xpd.ShardedVariable([first, second]), small=xpd.Variable(1.0)).save(
        tmp_path / "c"
    )
    whole.assign(np.zeros_like(value))
    xpd.Checkpoint(v=whole, small=xpd.Variable(0.0)).restore(path).assert_consumed()
    assert (whole.numpy() == value).all()
    with open(path, "r+b") as file:  # in the last piece
        file.seek(-1, os.SEEK_END)
        last = file.read(1)
        file.seek(-1, os.SEEK_END)
        file.write(bytes([last[0] ^ 255]))
    with pytest.raises(xpd.CheckpointError, match="the checksum of v is wrong"):
        xpd.Checkpoint(v=whole).restore(path)


def test_thousands_of_variables_come_back(tmp_path: Path) -> None:
    def made(fill: Callable[[int], float]) -> list[xpd.Variable]:
        return [xpd.Variable([fill(i)] * (i % 3)) for i in range(2000)]

    variables, others = made(float), made(lambda _: 0.0)
    path = xpd.Checkpoint(v=variables).save(tmp_path / "c")
    xpd.Checkpoint(v=others).restore(path).assert_consumed()
    assert [v.numpy().tolist() for v in others] == [v.numpy().tolist() for v in variables]
