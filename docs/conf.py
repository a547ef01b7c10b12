"""How Sphinx builds these pages: scripts/docs."""

from __future__ import annotations

import ast
import importlib
import re
from html import escape
from pathlib import Path

from docutils import nodes
from latex2mathml.converter import convert
from pygments.lexers.special import TextLexer
from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment
from sphinx.pycode import ModuleAnalyzer
from sphinx.util import logging
from sphinx.util.inspect import TypeAliasForwardRef
from sphinx.writers.html5 import HTML5Translator

import farflung

project = "farflung"
author = "The farflung developers"
version = release = farflung.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
source_suffix = {".md": "markdown"}
exclude_patterns = ["_build"]
myst_enable_extensions = ["attrs_block", "dollarmath"]
myst_heading_anchors = 3

autodoc_default_options = {"members": True, "undoc-members": True, "show-inheritance": True}
autodoc_member_order = "bysource"
autodoc_type_aliases = {name: f"farflung.types.{name}" for name in ("Json", "SampleIds", "State")}
autodoc_typehints_format = "short"
python_use_unqualified_type_names = True
napoleon_numpy_docstring = False
napoleon_use_rtype = False

html_theme = "furo"
html_math_renderer = "mathml"  # browsers draw it themselves: no script, no font, no network
html_static_path = ["_static"]
html_css_files = ["farflung.css"]
html_extra_path = ["llms.txt"]
html_title = f"farflung {version}"

LONGEST_TYPE = 2
"""Words of a field "Type"; what is longer is a sentence that was taken for one."""
VERDICTS = {"reproduced", "better", "worse", "not reached", "undecided", "not comparable", "not run"}
REFERENCE = "".join(path.read_text(encoding="utf-8") for path in Path(__file__).parent.glob("reference/*.md"))
MODULES = re.findall(r"^\.\. automodule:: (\S+)$", REFERENCE, re.MULTILINE)


# Sphinx shows the alias inside of another type, as in Mapping[str, Json], by its representation.
TypeAliasForwardRef.__repr__ = lambda alias: alias.name  # type: ignore[method-assign]


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


def mark_verdicts(app: Sphinx, doctree: nodes.document) -> None:
    """Gives verdicts in tables a class, by which the style sheet shows them as chips."""
    for row in doctree.findall(nodes.row):
        for strong in row.findall(nodes.strong):
            if strong.astext() in VERDICTS:
                strong["classes"] += ["verdict", strong.astext().replace(" ", "-")]


def inline_drawings(app: Sphinx, doctree: nodes.document, name: str) -> None:
    """Puts SVG into the page, where its text and axes take the colour of the theme."""
    for image in [*doctree.findall(nodes.image)] if app.builder.format == "html" else []:
        if image["uri"].endswith(".svg"):
            svg = Path(app.srcdir, image["uri"]).read_text(encoding="utf-8")
            svg = re.sub(r"<style>.*?</style>", "", svg)
            svg = svg.replace("<svg ", f'<svg role="img" aria-label="{escape(image["alt"])}" ', 1)
            image.replace_self(nodes.raw("", f'<div class="drawing">{svg}</div>', format="html"))


def render_inline_math(translator: HTML5Translator, node: nodes.math) -> None:
    """Writes an equation of a line as MathML."""
    translator.body.append(convert(node.astext()))
    raise nodes.SkipNode


def render_block_math(translator: HTML5Translator, node: nodes.math_block) -> None:
    """Writes an equation in a block of its own as MathML."""
    translator.body.append(f'<div class="math">{convert(node.astext(), display="block")}</div>')
    raise nodes.SkipNode


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
    app.add_html_math_renderer("mathml", (render_inline_math, None), (render_block_math, None))
    app.connect("doctree-read", tidy_reference)
    app.connect("doctree-read", mark_verdicts)
    app.connect("doctree-resolved", inline_drawings)
    app.connect("env-check-consistency", find_missing_names)
