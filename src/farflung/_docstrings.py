"""Docstrings as text for people: of what is not imported, and of what ``python -OO`` has stripped of them."""

from __future__ import annotations

import ast
import inspect
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

__all__ = ["docstring_of", "read_docstring"]


def docstring_of(thing: Callable[..., object]) -> str:
    """Returns the docstring of a class or function, under ``python -OO`` too."""
    if sys.flags.optimize < 2:
        return inspect.getdoc(thing) or ""
    return read_docstring(thing.__module__, thing.__qualname__)


def read_docstring(module: str, name: str) -> str:
    """Reads the docstring of a class or function without importing its module; empty where there is no source."""
    loaded = sys.modules.get(module)
    path = getattr(find_spec(module), "origin", "") if loaded is None else getattr(loaded, "__file__", "")
    try:
        source = ast.parse(Path(path).read_text(encoding="utf-8"))
    except OSError:
        return ""
    documented = (node for node in source.body if isinstance(node, ast.ClassDef | ast.FunctionDef))
    return next((ast.get_docstring(node) or "" for node in documented if node.name == name), "")
