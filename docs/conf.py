"""How Sphinx builds these pages: scripts/docs."""

from __future__ import annotations

import ast
import importlib
import re
from pathlib import Path

from docutils import nodes
from pygments.lexers.special import TextLexer
from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment
from sphinx.pycode import ModuleAnalyzer
from sphinx.util import logging

import farflung

project = "farflung"
author = "The farflung developers"
version = release = farflung.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.mathjax", "sphinx.ext.napoleon"]
source_suffix = {".md": "markdown"}
exclude_patterns = ["_build"]
myst_enable_extensions = ["dollarmath"]
myst_heading_anchors = 3

autodoc_default_options = {"members": True, "undoc-members": True, "show-inheritance": True}
autodoc_member_order = "bysource"
autodoc_type_aliases = {name: f"farflung.types.{name}" for name in ("Json", "SampleIds", "State")}
autodoc_typehints_format = "short"
python_use_unqualified_type_names = True
napoleon_numpy_docstring = False
napoleon_use_rtype = False

html_theme = "furo"
html_extra_path = ["llms.txt"]
html_title = f"farflung {version}"

LONGEST_TYPE = 2
"""Words of a field "Type"; what is longer is a sentence that was taken for one."""
REFERENCE = (Path(__file__).parent / "reference.md").read_text(encoding="utf-8")
MODULES = re.findall(r"^\.\. automodule:: (\S+)$", REFERENCE, re.MULTILINE)


def lend_docstrings(app: Sphinx) -> None:
    """Gives a package the docstrings of the constants it re-exports; autodoc looks for them in it alone."""
    for module in MODULES:
        source = Path(importlib.import_module(module).__file__ or "")
        package = ModuleAnalyzer.for_module(module)
        package.analyze()
        for node in ast.walk(ast.parse(source.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and f"{node.module}.".startswith(f"{module}."):
                origin = ModuleAnalyzer.for_module(node.module or "")
                origin.analyze()
                for alias in node.names:
                    if ("", alias.name) in origin.attr_docs:
                        package.attr_docs["", alias.asname or alias.name] = origin.attr_docs["", alias.name]


def keep_first_words(
    app: Sphinx, what: str, name: str, obj: object, options: object, lines: list[str]
) -> None:
    """Begins the docstring of an attribute with an empty comment, so that napoleon takes no ``words:`` for its type."""
    if what in {"attribute", "data", "property"}:
        lines[:0] = ["..", ""]


def tidy_reference(app: Sphinx, doctree: nodes.document) -> None:
    """Removes bases that say nothing, and warns of sentences that are shown as types."""
    for paragraph in [*doctree.findall(nodes.paragraph)]:
        if paragraph.astext() == "Bases: object":
            paragraph.parent.remove(paragraph)
    for field in doctree.findall(nodes.field):
        name, body = field.children
        if name.astext() == "Type" and len(body.astext().split()) > LONGEST_TYPE:
            logging.getLogger(__name__).warning("no type: %s", body.astext(), location=field)


def find_missing_names(app: Sphinx, env: BuildEnvironment) -> None:
    """Warns of public names that the reference page shows nowhere, for want of a docstring."""
    shown = env.domains.python_domain.objects
    for module in MODULES:
        # What farflung itself names is shown where it is made.
        homes = MODULES if module == "farflung" else [module]
        for name in importlib.import_module(module).__all__:
            if not name.startswith("_") and not any(f"{home}.{name}" in shown for home in homes):
                logging.getLogger(__name__).warning("%s.%s is not in the reference", module, name)


def setup(app: Sphinx) -> None:
    """Called by Sphinx."""
    app.add_lexer("mermaid", TextLexer)  # drawn by GitHub, shown as text here
    app.connect("builder-inited", lend_docstrings)
    app.connect("autodoc-process-docstring", keep_first_words, priority=400)  # before napoleon's 500
    app.connect("doctree-read", tidy_reference)
    app.connect("env-check-consistency", find_missing_names)
