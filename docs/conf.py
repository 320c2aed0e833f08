"""Configuration of the documentation site: `make docs` writes it to runs/site.

The root of the sources is the repository, so that links between docs/, benchmarks/ and the code are the same here and
in a browser of the repository.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx.application import Sphinx

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from laconic.version import __version__  # noqa: E402  the path is set above

project = "laconic"
author = "the authors of laconic"
copyright = "the authors of laconic, Apache-2.0"
release = version = __version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.autosummary", "sphinx.ext.napoleon"]
root_doc = "docs/index"
include_patterns = ["docs/**", "benchmarks/**/*.md", "soak/*.md", "CHANGELOG.md", "CONTRIBUTING.md"]
exclude_patterns = ["docs/_static", "runs", ".*"]

myst_enable_extensions = ["attrs_inline", "colon_fence", "deflist"]
myst_heading_anchors = 4

default_role = "literal"  # docstrings write `names` in single backquotes
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_default_options = {"members": True}
autodoc_preserve_defaults = True
napoleon_numpy_docstring = False
python_use_unqualified_type_names = True
add_module_names = False
autosummary_generate = False

html_theme = "furo"
html_title = f"laconic {release}"
html_static_path = ["_static"]
html_extra_path = ["_root"]
html_css_files = ["site.css"]
html_show_sphinx = False
html_copy_source = False
pygments_style, pygments_dark_style = "friendly", "github-dark"


def inline_figures(app: Sphinx, doctree: nodes.document, page: str) -> None:
    """Puts the SVG files of docs/figures into the page itself, where they follow its light or dark theme."""
    for image in list(doctree.findall(nodes.image)):
        source = ROOT / image["uri"]
        if source.parent.name == "figures" and source.suffix == ".svg":
            markup = source.read_text().replace("<svg ", f'<svg aria-label="{image["alt"]}" ', 1)
            image.replace_self(nodes.raw("", f'<div class="figure">{markup}</div>', format="html"))


def show_equations(app: Sphinx, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    """Shows indented lines after an empty one, the equations in docstrings, as they are written."""
    for i in range(len(lines) - 1, 1, -1):
        before = lines[i - 2]
        is_text = before[:1].strip() and not before.endswith("::")
        if lines[i].startswith("    ") and not lines[i - 1].strip() and is_text:
            lines[i:i] = ["::", ""]
    if lines and what in ("property", "attribute") and ":" in lines[0]:
        lines[:0] = ["..", ""]  # an empty comment: napoleon takes a first line "text: more" for "type: text"


def setup(app: Sphinx) -> dict[str, Any]:
    app.connect("doctree-resolved", inline_figures)
    app.connect("autodoc-process-docstring", show_equations, priority=400)  # before napoleon, at 500
    return {"parallel_read_safe": True, "parallel_write_safe": True}
