"""Codecs: gradient to payload and back. One file per algorithm; ``CODECS`` names them for recipes."""

from collections.abc import Callable

from farflung.codecs.identity import Identity
from farflung.codecs.truncate16 import Truncate16
from farflung.types import Codec

__all__ = ["CODECS", "Identity", "Truncate16"]

CODECS: dict[str, Callable[..., Codec]] = {
    "identity": Identity,
    "truncate16": Truncate16,
}
"""All of them by name."""
