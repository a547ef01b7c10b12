"""Packages whose names are imported when they are first used, so that what needs no torch does not import it.

Names of an earlier version are given from where they are now, with a warning.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Mapping
from importlib import import_module

__all__ = ["lazy", "renamed"]


def lazy(
    package: str, homes: Mapping[str, str] | None = None, moved: Mapping[str, str] | None = None
) -> tuple[Callable[[str], object], Callable[[], list[str]]]:
    """Makes ``__getattr__`` and ``__dir__`` of a package.

    Type checkers read the imports under the package's ``if TYPE_CHECKING:``, which say the same as ``homes``. No name
    may be that of a module of the package: importing that module would put it in the name's place.

    Args:
      package: its ``__name__``.
      homes: modules of the package, each with the names that are imported from it, between spaces.
      moved: names of 0.1 that are elsewhere now, each with its module and name there; until 0.3.
    """
    module = sys.modules[package]
    home_of = {name: home for home, names in (homes or {}).items() for name in names.split()}

    def get(name: str) -> object:
        if moved is not None and name in moved:
            renamed(f"{package}.{name}", moved[name])
            home, _, there = moved[name].rpartition(".")
            return getattr(import_module(home), there)
        if name not in home_of:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = getattr(import_module(f"{package}.{home_of[name]}"), name)
        setattr(module, name, value)
        return value

    return get, lambda: sorted({*vars(module), *home_of})


def renamed(before: str, now: str) -> None:
    """Warns the caller's caller of a name of 0.1, which works until 0.3."""
    warnings.warn(
        f"{before} is now {now}; the earlier name is removed in 0.3", DeprecationWarning, stacklevel=3
    )
