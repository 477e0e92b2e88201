"""What a process is doing, in the words of its links, each of which knows its own calls only."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from typing import Any, final

Describe = Callable[[], Mapping[str, Any]]
"""Says in a dict of JSON's types ``seq`` and ``call`` (where the process is in the order of a link's collectives), ``waiting`` (whether
it waits in that call) and ``recent`` (its last calls)."""


@final
class Descriptions:
    """Keeps who can say what; links that are gone are forgotten.

    Args:
        otherwise: says it where no link is left.
    """

    def __init__(self, otherwise: Describe = dict) -> None:
        self._otherwise = otherwise
        self._by_name: dict[str, weakref.WeakMethod[Describe]] = {}

    def add(self, name: str, describe: Describe) -> None:
        """A link, which all processes call by this name, can say what it does; in the place of one of the same name.

        Args:
            name: of the link.
            describe: a method of it.
        """
        alive = {key: kept for key, kept in self._by_name.items() if key != name and kept() is not None}
        self._by_name = {**alive, name: weakref.WeakMethod(describe)}

    def about(self, what: str) -> Mapping[str, Any]:
        """What this process does, as far as what is asked about goes.

        Args:
            what: begins with a link's name. Otherwise, and where that link is gone, a link that waits answers, or the last one.
        """
        links = [(name, say) for name, kept in self._by_name.items() if (say := kept()) is not None]
        for name, say in links:
            if what == name or what.startswith(f"{name} "):
                return say()
        said = [say() for _, say in links]
        waiting = [one for one in said if one.get("waiting")]
        return (waiting or said or [self._otherwise()])[-1]
