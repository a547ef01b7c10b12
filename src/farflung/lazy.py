"""Packages whose names are imported when they are first used, so that what needs no torch does not import it.

Names of an earlier version are given from where they are now, with a warning.
"""

from __future__ import annotations

import ast
import sys
import warnings
from collections.abc import Callable, Mapping
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

__all__ = ["docstring_of", "lazy", "renamed"]


def lazy(
    package: str, moved: Mapping[str, str] | None = None
) -> tuple[Callable[[str], object], Callable[[], list[str]]]:
    """Makes ``__getattr__`` and ``__dir__`` of a package from the imports under its ``if TYPE_CHECKING:``.

    Type checkers read these imports as they stand, so each name and its home are written once. No name may be that of a
    module of the package: importing that module would put it in the name's place.

    Args:
      package: its ``__name__``.
      moved: names of 0.1 that are elsewhere now, each with its module and name there; until 0.3.
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
        if moved is not None and name in moved:
            renamed(f"{package}.{name}", moved[name])
            home, _, there = moved[name].rpartition(".")
            return getattr(import_module(home), there)
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = getattr(import_module(homes[name]), name)
        setattr(module, name, value)
        return value

    return get, lambda: sorted({*vars(module), *homes})


def renamed(before: str, now: str) -> None:
    """Warns the caller's caller of a name of 0.1, which works until 0.3."""
    warnings.warn(
        f"{before} is now {now}; the earlier name is removed in 0.3", DeprecationWarning, stacklevel=3
    )


def docstring_of(module: str, name: str) -> str:
    """Reads the docstring of a class without importing its module."""
    (found,) = (node for node in _source(module).body if isinstance(node, ast.ClassDef) and node.name == name)
    return ast.get_docstring(found) or ""


def _source(module: str) -> ast.Module:
    loaded = sys.modules.get(module)
    path = loaded.__file__ if loaded is not None else getattr(find_spec(module), "origin", None)
    assert path is not None
    return ast.parse(Path(path).read_text(encoding="utf-8"))
