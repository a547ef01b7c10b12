"""Streams: where a replica's samples come from, and at what rate."""

from collections.abc import Callable

from farflung.data.streams.buffer import Buffer, Buffering
from farflung.data.streams.in_memory import InMemory
from farflung.data.streams.rate_limited import RateLimited
from farflung.data.streams.rates import PRINTED, RATE_SETS, Course, Rates, RateSet, courses, rates_in
from farflung.types import Stream

__all__ = [
    "PRINTED",
    "RATE_SETS",
    "STREAMS",
    "Buffer",
    "Buffering",
    "Course",
    "InMemory",
    "RateLimited",
    "RateSet",
    "Rates",
    "courses",
    "rates_in",
]

STREAMS: dict[str, Callable[..., Stream]] = {
    "in_memory": InMemory,
    "rate": RateLimited,
}
"""All of them by name; each is made anew for every replica."""
