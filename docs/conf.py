"""How Sphinx builds the documentation: ``make docs``."""

from __future__ import annotations

import inspect
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

project = "xpdistribute"
copyright = "the xpdistribute developers"  # Sphinx reads it by this name
try:
    release = version("xpdistribute")
except PackageNotFoundError:
    release = ""

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.viewcode"]
exclude_patterns = ["_build"]
myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 3

html_theme = "furo"
html_title = f"xpdistribute {release}".strip()

default_role = "py:obj"  # `name` in a docstring is a link where there is such a name
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
python_use_unqualified_type_names = True
napoleon_use_rtype = False
maximum_signature_line_length = 80


def _summary_of_override(app: Any, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    """An override has the documentation of the interface's method, under whatever name that has."""
    del app, what, name, options
    if not lines and (text := inspect.getdoc(obj)):
        lines += text.splitlines()


def setup(app: Any) -> None:
    """Called by Sphinx."""
    app.connect("autodoc-process-docstring", _summary_of_override)
