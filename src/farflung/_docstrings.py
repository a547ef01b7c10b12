"""Docstrings for help texts, also of modules that are not imported and under ``python -OO``."""

from __future__ import annotations

import ast
import inspect
import sys
from collections.abc import Callable
from pathlib import Path

__all__ = ["get_docstring", "read_docstring"]


def get_docstring(target: Callable[..., object]) -> str:
    """Returns the docstring of a class or function, under ``python -OO`` too."""
    if sys.flags.optimize < 2:
        return inspect.getdoc(target) or ""
    return read_docstring(target.__module__, target.__qualname__)


def read_docstring(module: str, name: str) -> str:
    """Reads a docstring from the source without importing the module; empty if there is no source."""
    try:
        source = ast.parse(_find_source(module).read_text(encoding="utf-8"))
    except OSError:
        return ""
    definitions = (node for node in source.body if isinstance(node, ast.ClassDef | ast.FunctionDef))
    return next((ast.get_docstring(node) or "" for node in definitions if node.name == name), "")


def _find_source(module: str) -> Path:
    """Finds the source file of a module, without importing the parent packages of a farflung module."""
    top, *inner = module.split(".")
    if module in sys.modules or top != "farflung":
        return Path(getattr(sys.modules.get(module), "__file__", None) or "")
    path = Path(__file__).parent.joinpath(*inner)
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
