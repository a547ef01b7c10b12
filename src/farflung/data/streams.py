"""Registry of the streams that a recipe names."""

from __future__ import annotations

from farflung.spec import Registry
from farflung.types import Stream

__all__ = ["STREAMS"]

STREAMS: Registry[Stream] = Registry("farflung.data", {"in_memory": "InMemory"}) | Registry(
    "farflung.streams", {"iterator": "iterator", "kafka": "kafka", "rate": "RateLimited"}
)
"""Streams by name; each is built anew for every replica. No other module of data imports
:mod:`farflung.streams`."""
