"""Imports that wait: names of packages until they are used, and libraries that extras install."""

from __future__ import annotations

import ast
import sys
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

from farflung.errors import MissingExtra

__all__ = ["docstring_of", "lazy", "need"]


def lazy(package: str) -> tuple[Callable[[str], object], Callable[[], list[str]]]:
    """Makes ``__getattr__`` and ``__dir__`` of a package from the imports under its ``if TYPE_CHECKING:``.

    Type checkers read these imports as they stand, so each name and its home are written once. No name may be that of a
    module of the package: importing that module would put it in the name's place.

    Args:
      package: its ``__name__``.
    """
    module = sys.modules[package]
    homes = {
        alias.name: statement.module
        for branch in _source(package).body
        if isinstance(branch, ast.If) and ast.unparse(branch.test) == "TYPE_CHECKING"
        for statement in branch.body
        if isinstance(statement, ast.ImportFrom) and statement.module is not None
        for alias in statement.names
    }

    def get(name: str) -> object:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = getattr(import_module(homes[name]), name)
        setattr(module, name, value)
        return value

    return get, lambda: sorted({*vars(module), *homes})


def docstring_of(module: str, name: str) -> str:
    """Reads the docstring of a class without importing its module."""
    (found,) = (node for node in _source(module).body if isinstance(node, ast.ClassDef) and node.name == name)
    return ast.get_docstring(found) or ""


def _source(module: str) -> ast.Module:
    loaded = sys.modules.get(module)
    path = loaded.__file__ if loaded is not None else getattr(find_spec(module), "origin", None)
    assert path is not None
    return ast.parse(Path(path).read_text(encoding="utf-8"))


def need(what: str, *modules: str, extra: str) -> None:
    """Makes sure of modules that an extra installs, before they are imported.

    >>> need("arithmetic", "math", extra="maths")

    Args:
      what: what cannot be done without them; an error begins with it.
      modules: as they are imported.
      extra: which one installs them.

    Raises:
      MissingExtra: one of them is not installed; says how to install it.
    """
    for module in modules:
        if find_spec(module) is None:
            raise MissingExtra(what, module, extra)
