"""Pictures of the documentation: SVG whose text and axes take the colour of the page, light or dark."""

from __future__ import annotations

import io
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from farflung.report.pictures import STYLE

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["create_drawing"]

INKS = ("#000000", "#222222", "#444444", "#555555")
"""Colours of matplotlib's text and of reference curves; drawings show them in the colour of the page's text."""
GRID = "#e4e4e4"
THEME = "<style>:root{color:#222}@media(prefers-color-scheme:dark){:root{color:#ddd}}</style>"
"""For a drawing that is shown as a file; pages that contain it remove it and set the colour themselves."""


@contextmanager
def create_drawing(path: Path, size: tuple[float, float]) -> Iterator[Figure]:
    """Yields an empty figure in the common style, and writes it as an SVG if drawing raises no error.

    Args:
      path: of the SVG.
      size: width and height in inches.
    """
    import matplotlib.style
    from matplotlib.figure import Figure

    # The same picture gives the same bytes: a fixed salt of identifiers, and no date.
    style = {**STYLE, "svg.fonttype": "none", "svg.hashsalt": path.stem}
    with matplotlib.style.context(["default", style]):
        figure = Figure(figsize=size, layout="constrained")
        yield figure
        drawn = io.StringIO()
        figure.savefig(drawn, format="svg", transparent=True, metadata={"Date": None})
    path.write_text(_follow_theme(drawn.getvalue()), encoding="utf-8")


def _follow_theme(svg: str) -> str:
    """Returns an SVG of matplotlib with the colours and the font of the page, and without a header."""
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>\s*", "", svg, flags=re.DOTALL)
    svg = re.sub(r"<style .*?</style>", THEME, svg, count=1, flags=re.DOTALL)
    svg = svg.replace("<svg ", '<svg stroke-linejoin="round" ', 1)
    svg = re.sub("|".join(INKS), "currentColor", svg)
    svg = svg.replace(f"stroke: {GRID}", "stroke: currentColor; stroke-opacity: 0.15")
    svg = re.sub(r"(font: [^'\";]*)'[^;\"]*", r"\1system-ui, sans-serif", svg)
    return re.sub(r"[ \t]+$", "", svg, flags=re.MULTILINE)
