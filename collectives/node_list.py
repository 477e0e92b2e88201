"""How Slurm writes the nodes of a job and the tasks on them."""

from __future__ import annotations

import re

_NODES_AT_MOST = 1 << 16


def expand_node_list(text: str) -> tuple[str, ...]:
    """The names that a node list of Slurm's stands for: ``node[01-03,7],login`` is node01, node02, node03, node7 and login.

    Raises:
        ValueError: brackets that don't match, a range that is none, or a list without end.
    """
    names: list[str] = []
    for pattern in _split_outside_brackets(text):
        names += _expand(pattern, text)
        if len(names) > _NODES_AT_MOST:
            raise ValueError(f"SLURM_JOB_NODELIST: got over {_NODES_AT_MOST} nodes in {text[:80]!r}")
    if not names:
        raise ValueError(f"SLURM_JOB_NODELIST: got {text!r}; need names such as node[01-03,7]")
    return tuple(names)


def expand_counts(text: str) -> list[int]:
    """The counts that a text stands for: ``2(x3),1`` is 2, 2, 2, 1; none where it is of another form."""
    numbers: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d+)(?:\(x(\d+)\))?\s*", part)
        if match is None:
            return []
        numbers += [int(match[1])] * min(int(match[2] or 1), _NODES_AT_MOST)
    return numbers


def _split_outside_brackets(text: str) -> list[str]:
    parts, depth, start = [], 0, 0
    for at, character in enumerate(text):
        if character == "[":
            depth += 1
        elif character == "]":
            depth -= 1
        elif character == "," and not depth:
            parts.append(text[start:at])
            start = at + 1
        if depth not in (0, 1):
            break
    if depth:
        raise ValueError(
            f"SLURM_JOB_NODELIST: got {text!r}, whose brackets don't match; need names such as node[01-03,7]"
        )
    parts.append(text[start:])
    return [part.strip() for part in parts if part.strip()]


def _expand(pattern: str, text: str) -> list[str]:
    head, bracket, rest = pattern.partition("[")
    if not bracket:
        return [head]
    inside, _, tail = rest.partition("]")
    tails = _expand(tail, text)
    names = []
    for part in inside.split(","):
        match = re.fullmatch(r"(\d+)(?:-(\d+))?", part.strip())
        if match is None or int(match[2] or match[1]) - int(match[1]) not in range(_NODES_AT_MOST):
            raise ValueError(
                f"SLURM_JOB_NODELIST: got {part!r} in {text[:80]!r}; need numbers and ranges such as node[01-03,7]"
            )
        width = len(match[1])
        for number in range(int(match[1]), int(match[2] or match[1]) + 1):
            names += [f"{head}{number:0{width}d}{end}" for end in tails]
    return names
