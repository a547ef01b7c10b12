"""Packages that import their names on first use, so that torch is imported only if needed."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from importlib import import_module

__all__ = ["build_lazy_attributes"]


def build_lazy_attributes(
    package: str, exports: Mapping[str, str]
) -> tuple[Callable[[str], object], Callable[[], list[str]]]:
    """Builds ``__getattr__`` and ``__dir__`` of a package with lazy imports.

    Type checkers read the equal imports under the package's ``if TYPE_CHECKING:``. A name must not be that of a module
    of the package, since importing that module would overwrite it.

    Args:
      package: ``__name__`` of the package.
      exports: Names that the package exports, separated by spaces, by the module that defines them.
    """
    module = sys.modules[package]
    sources = {name: source for source, names in exports.items() for name in names.split()}

    def get(name: str) -> object:
        if name not in sources:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = getattr(import_module(f"{package}.{sources[name]}"), name)
        setattr(module, name, value)
        return value

    return get, lambda: sorted({*vars(module), *sources})
