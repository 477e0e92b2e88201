"""How Sphinx builds the documentation: ``make docs``."""

from __future__ import annotations

import sys
from importlib import metadata
from pathlib import Path
from typing import Any

from sphinx.ext.napoleon import GoogleDocstring

sys.path.insert(0, str(Path(__file__).parents[1]))

project = "xpdistribute"
copyright = "the xpdistribute developers"  # Sphinx reads it by this name
try:
    release = metadata.version("xpdistribute")
except metadata.PackageNotFoundError:
    release = ""

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.viewcode"]
exclude_patterns = ["_build"]
myst_heading_anchors = 3

html_theme = "furo"
html_title = f"xpdistribute {release}".strip()

default_role = "py:obj"  # `name` in a docstring is a link where there is such a name
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
python_use_unqualified_type_names = True
maximum_signature_line_length = 80

_COLON = "\N{NUL}"
_FOR_READERS = ("attribute", "data", "property")


def _shield(app: Any, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    """Properties say what they are, in sentences; Napoleon would take what stands before a colon for their type."""
    if what in _FOR_READERS:
        sections = GoogleDocstring(list(lines), app.config, app, "method", name, obj, options)
        lines[:] = [line.replace(":", _COLON) for line in sections.lines()]


def _unshield(app: Any, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    del app, what, name, obj, options
    lines[:] = [line.replace(_COLON, ":") for line in lines]


def _shorten(
    app: Any, what: str, name: str, obj: Any, options: Any, signature: str | None, returns: str | None
) -> tuple[str | None, str | None]:
    """Types by their short names, and not as what they stand for."""
    del app, what, name, obj, options

    def short(text: str | None) -> str | None:
        return None if text is None else text.replace(_ARRAY, "Array").replace(_DTYPE, "DTypeLike")

    return short(signature), short(returns)


_ARRAY = "~numpy.ndarray[tuple[~typing.Any, ...], ~numpy.dtype[~typing.Any]]"
_DTYPE = " | ".join(
    (
        "type[~typing.Any]",
        "~numpy.dtype[~typing.Any]",
        "~numpy._typing._dtype_like._HasDType[~numpy.dtype[~typing.Any]]",
        "~numpy._typing._dtype_like._HasNumPyDType[~numpy.dtype[~typing.Any]]",
        "tuple[~typing.Any, ~typing.Any]",
        "list[~typing.Any]",
        "~numpy._typing._dtype_like._DTypeDict",
        "str",
    )
)


def setup(app: Any) -> None:
    """Called by Sphinx. Napoleon has the priority 500."""
    app.connect("autodoc-process-signature", _shorten)
    app.connect("autodoc-process-docstring", _shield, priority=400)
    app.connect("autodoc-process-docstring", _unshield, priority=600)
