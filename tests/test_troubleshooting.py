"""The page on messages quotes messages that there are."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
QUOTED = re.findall(r"^\| `([^`\n]+)` \|", PAGE, re.MULTILINE)


def said(tree: ast.AST) -> Iterator[str]:
    """All texts of a module, those with values in them with a mark in each value's place."""
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            yield "".join(str(part.value) if isinstance(part, ast.Constant) else "…" for part in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


@functools.cache
def texts() -> list[str]:
    """All that the package may say."""
    paths = (ROOT / "src" / "farflung").rglob("*.py")
    return [text for path in paths for text in said(ast.parse(path.read_text(encoding="utf-8")))]


def test_it_quotes_many() -> None:
    assert len(QUOTED) > 15


@pytest.mark.parametrize("message", QUOTED)
def test_a_message_on_the_page_is_one_of_ours(message: str) -> None:
    pieces = [piece.strip(" ;:") for piece in message.split("…")]
    assert sum(map(len, pieces)) > 6
    in_order = re.compile(".*".join(map(re.escape, pieces)), re.DOTALL)
    assert any(in_order.search(text) for text in texts()), f"nothing says {message!r}"
