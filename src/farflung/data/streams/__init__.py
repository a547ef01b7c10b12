"""Streams: where a replica's samples come from, and at what rate."""

from collections.abc import Callable

from farflung.data.streams.followed import files
from farflung.data.streams.in_memory import InMemory
from farflung.data.streams.kafka import kafka
from farflung.data.streams.rate_limited import RateLimited
from farflung.types import Stream

__all__ = ["STREAMS", "InMemory", "RateLimited", "files", "kafka"]

STREAMS: dict[str, Callable[..., Stream]] = {
    "files": files,
    "in_memory": InMemory,
    "kafka": kafka,
    "rate": RateLimited,
}
"""All of them by name; each is made anew for every replica."""
