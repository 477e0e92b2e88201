"""Texts that others have made, in bounds: nobody reads 50 MB, and no log, terminal or line to the hub is the better for them."""

from __future__ import annotations

MOST = 32 << 10
"""Characters of what a process says last, such as a traceback."""
MOST_OF_A_LINE = 2000


def shortened(text: str, most: int = MOST) -> str:
    """A text's head and tail, and how much was left out between them; the text itself if it is no longer than ``most``."""
    if len(text) <= most:
        return text
    import re  # noqa: PLC0415  # the launcher starts without it

    # What was cut before by somebody with more room is told as one.
    found = re.search(r" \.\.\. \[(\d+) characters left out\] \.\.\. ", text)
    head, tail, before = (
        (text, text, 0) if found is None else (text[: found.start()], text[found.end() :], int(found[1]))
    )
    num_chars = len(text) if found is None else len(head) + len(tail) + before
    half = most // 2
    head, tail = head[:half], tail[-half:]
    return f"{head} ... [{num_chars - len(head) - len(tail)} characters left out] ... {tail}"
