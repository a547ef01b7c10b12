"""The streams that a recipe takes by name."""

from __future__ import annotations

from farflung.spec import Registry
from farflung.types import Stream

__all__ = ["STREAMS"]

STREAMS: Registry[Stream] = Registry("farflung.data", {"in_memory": "InMemory"}) | Registry(
    "farflung.streams", {"iterator": "iterator", "kafka": "kafka", "rate": "RateLimited"}
)
"""All of them by name; each is made anew for every replica. Nothing else here names :mod:`farflung.streams`."""
