"""The built documentation: it needs no network to be read, and shows no sentence as a type."""

from __future__ import annotations

import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
LIMIT_S = 1200
LOADED = {"audio": "src", "iframe": "src", "img": "src", "link": "href", "script": "src", "source": "src"}
"""Attributes whose addresses a browser loads when it shows a page."""
TEX = re.compile(r"\\\(|\\\[|\\frac|\$\$")
FIELD = re.compile(r'<dt class="field-\w+">([^<]+)')

pytestmark = [pytest.mark.thorough, pytest.mark.timeout(LIMIT_S)]


class Page(HTMLParser):
    """The addresses that a page loads, and its text except code."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.html, self.loaded, self.text = html, list[str](), ""
        self._open: list[str] = []
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if address := dict(attrs).get(LOADED.get(tag, "")):
            self.loaded.append(address)
        self._open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        while self._open and self._open.pop() != tag:
            pass

    def handle_data(self, data: str) -> None:
        if not {"code", "pre", "script", "style"}.intersection(self._open):
            self.text += data


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Page]:
    for package in ("sphinx", "furo", "myst_parser", "latex2mathml"):
        pytest.importorskip(package)
    out = tmp_path_factory.mktemp("html")
    command = [sys.executable, "-m", "sphinx", "--quiet", "--builder", "html", str(ROOT / "docs"), str(out)]
    built = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert built.returncode == 0, built.stderr[-3000:]
    files = out.rglob("*.html")
    return {file.relative_to(out).as_posix(): Page(file.read_text(encoding="utf-8")) for file in files}


def test_pages_load_nothing_from_a_network(pages: dict[str, Page]) -> None:
    assert len(pages) > 60
    for name, page in pages.items():
        assert not [address for address in page.loaded if re.match(r"(https?:)?//", address)], name


def test_equations_are_drawn(pages: dict[str, Page]) -> None:
    assert "<math" in pages["papers/mercury.html"].html
    assert not [name for name, page in pages.items() if TEX.search(page.text)]


def test_the_reference_takes_no_sentence_for_a_type(pages: dict[str, Page]) -> None:
    fields = [
        field for name, page in pages.items() if "reference/" in name for field in FIELD.findall(page.html)
    ]
    assert "Parameters" in fields
    assert "Type" not in fields


def test_signatures_name_types_as_people_write_them(pages: dict[str, Page]) -> None:
    """Sphinx's and typing's own wrappers have no meaning to a reader."""
    wrapped = re.compile(r"TypeAliasForwardRef|ForwardRef\(|&lt;(class|function|object) |at 0x[0-9a-f]")
    assert not [name for name, page in pages.items() if "reference/" in name and wrapped.search(page.html)]
