"""Streams: where a replica's samples come from, and at what rate."""

from collections.abc import Callable

from farflung.data.streams.buffer import Buffer, Buffering
from farflung.data.streams.followed import files
from farflung.data.streams.in_memory import InMemory
from farflung.data.streams.in_turn import in_turn
from farflung.data.streams.kafka import kafka
from farflung.data.streams.live import LiveStream, MessageSource, Reach, Record
from farflung.data.streams.messages import Decoder, as_messages
from farflung.data.streams.publishing import FileOutlet, KafkaOutlet, Outlet, Published, publish
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
    "Decoder",
    "FileOutlet",
    "InMemory",
    "KafkaOutlet",
    "LiveStream",
    "MessageSource",
    "Outlet",
    "Published",
    "RateLimited",
    "RateSet",
    "Rates",
    "Reach",
    "Record",
    "as_messages",
    "courses",
    "files",
    "in_turn",
    "kafka",
    "publish",
    "rates_in",
]

STREAMS: dict[str, Callable[..., Stream]] = {
    "files": files,
    "in_memory": InMemory,
    "kafka": kafka,
    "rate": RateLimited,
}
"""All of them by name; each is made anew for every replica."""
