"""Packages whose names are imported when they are first used, so that what needs no torch does not import it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from importlib import import_module

__all__ = ["lazy"]


def lazy(package: str, homes: Mapping[str, str]) -> tuple[Callable[[str], object], Callable[[], list[str]]]:
    """Makes ``__getattr__`` and ``__dir__`` of a package.

    Type checkers read the imports under the package's ``if TYPE_CHECKING:``, which say the same as ``homes``. No name
    may be that of a module of the package: importing that module would put it in the name's place.

    Args:
      package: its ``__name__``.
      homes: modules of the package, each with the names that are imported from it, between spaces.
    """
    module = sys.modules[package]
    home_of = {name: home for home, names in homes.items() for name in names.split()}

    def get(name: str) -> object:
        if name not in home_of:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = getattr(import_module(f"{package}.{home_of[name]}"), name)
        setattr(module, name, value)
        return value

    return get, lambda: sorted({*vars(module), *home_of})
