"""Optional dependencies: the extras of ``pip install 'farflung[...]'``."""

from __future__ import annotations

from importlib.util import find_spec

from farflung.errors import MissingExtra

__all__ = ["require_modules"]


def require_modules(feature: str, *modules: str, extra: str) -> None:
    """Checks that modules of an extra are installed, before they are imported.

    >>> require_modules("arithmetic", "math", extra="maths")

    Args:
      feature: Feature that needs the modules, which begins the error message.
      modules: Names of the modules.
      extra: Extra that installs them.

    Raises:
      MissingExtra: A module is not installed; the message explains how to install it.
    """
    for module in modules:
        if find_spec(module) is None:
            raise MissingExtra(feature, module, extra)
