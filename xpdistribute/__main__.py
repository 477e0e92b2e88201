"""``python -m xpdistribute``: the same as the command."""

from __future__ import annotations

import sys

from xpdistribute.command_line import main

sys.exit(main())
