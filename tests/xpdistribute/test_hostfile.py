"""What may stand in a file of hosts."""

from __future__ import annotations

from pathlib import Path

import pytest

from xpdistribute.hostfile import Host, parse_hosts, read_hostfile


def test_comments_line_ends_and_the_mark_of_windows_are_no_hosts(tmp_path: Path) -> None:
    file = tmp_path / "hosts"
    file.write_bytes(b"\xef\xbb\xbfa slots=2 # the first\r\n\r\n# none\r\nb:3\r\nc\r\n")
    assert read_hostfile(str(file)) == (Host("a", 2), Host("b", 3), Host("c"))


def test_addresses_of_ipv6_may_stand_in_brackets() -> None:
    assert parse_hosts("::1,[fe80::2],[fe80::3]:4") == (Host("::1"), Host("fe80::2"), Host("fe80::3", 4))


@pytest.mark.parametrize("text", ["[fe80::2", "[]", "[]:2", "[fe80::2]:", "[fe80::2]3"])
def test_half_a_bracket_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"need \[ADDRESS\] or \[ADDRESS\]:SLOTS"):
        parse_hosts(text)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "has no host"),
        (b"a\na\n", "got a twice"),
        (b"h\xff\n", "can't decode"),
        (b"a slots=0\n", "got '0' slots; need a whole number from 1"),
        (b"a cores=2\n", "got 'cores=2'"),
    ],
)
def test_a_file_that_names_no_hosts_is_refused(tmp_path: Path, content: bytes, words: str) -> None:
    file = tmp_path / "hosts"
    file.write_bytes(content)
    with pytest.raises(ValueError, match=words):
        read_hostfile(str(file))


def test_a_folder_is_no_file_of_hosts(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="need a file with a line for each host"):
        read_hostfile(str(tmp_path))
