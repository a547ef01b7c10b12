"""Streams: where a replica's samples come from, and at what rate."""

from collections.abc import Callable

from farflung.data.streams.in_memory import InMemory
from farflung.data.streams.rate_limited import RateLimited
from farflung.types import Stream

__all__ = ["STREAMS", "InMemory", "RateLimited"]

STREAMS: dict[str, Callable[..., Stream]] = {
    "in_memory": InMemory,
    "rate": RateLimited,
}
"""All of them by name; each is made anew for every replica."""
