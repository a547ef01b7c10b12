"""Streams: where a replica's samples come from, and at what rate."""

from collections.abc import Callable
from typing import NoReturn

from farflung.data.streams.in_memory import InMemory, RateLimited
from farflung.data.streams.iterator import iterator
from farflung.data.streams.kafka import kafka
from farflung.errors import ConfigError
from farflung.types import Stream

__all__ = ["STREAMS", "InMemory", "RateLimited", "iterator", "kafka"]


def _files(*_: object, **__: object) -> NoReturn:
    raise ConfigError(
        "stream files: gone; read them in a function of your own and give iterator('module:function') (docs/streams.md)"
    )


STREAMS: dict[str, Callable[..., Stream]] = {
    "files": _files,
    "in_memory": InMemory,
    "iterator": iterator,
    "kafka": kafka,
    "rate": RateLimited,
}
"""All of them by name; each is made anew for every replica."""
