"""Streams of arriving samples: at a given rate, from Apache Kafka, or from a user's iterator."""

from typing import TYPE_CHECKING

from farflung.lazy import build_lazy_attributes

if TYPE_CHECKING:
    from farflung.streams.buffer import Buffer
    from farflung.streams.iterators import iterator
    from farflung.streams.kafka_topic import kafka
    from farflung.streams.live import LiveStream
    from farflung.streams.messages import Decoder, as_messages
    from farflung.streams.rate_limited import RateLimited
    from farflung.streams.rates import Rates
else:
    __getattr__, __dir__ = build_lazy_attributes(
        __name__,
        {
            "buffer": "Buffer",
            "iterators": "iterator",
            "kafka_topic": "kafka",
            "live": "LiveStream",
            "messages": "Decoder as_messages",
            "rate_limited": "RateLimited",
            "rates": "Rates",
        },
    )

__all__ = [
    "Buffer",
    "Decoder",
    "LiveStream",
    "RateLimited",
    "Rates",
    "as_messages",
    "iterator",
    "kafka",
]
