"""The command line: ``xpdistribute run``, ``xpdistribute doctor`` and ``xpdistribute bench``."""

from __future__ import annotations

import sys
from collections.abc import Sequence


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command.

    Args:
        arguments: without the command's name; None takes the process's.

    Returns:
        The exit status: 0; 1 where something needed is missing or a result was wrong; 2 for wrong usage; of ``run``, the
        job's.
    """
    given = list(sys.argv[1:] if arguments is None else arguments)
    # Each is loaded when it is asked for: what the others need takes longer to load than a job to start.
    if given[:1] == ["run"]:
        from xpdistribute.launcher import launch  # noqa: PLC0415

        return launch(given[1:])
    from xpdistribute.commands import run_command  # noqa: PLC0415

    return run_command(given)
