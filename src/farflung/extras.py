"""What is installed beside the core only where it is wanted: the extras of ``pip install 'farflung[...]'``."""

from __future__ import annotations

from importlib.util import find_spec

from farflung.errors import MissingExtra

__all__ = ["need"]


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
