"""Streams: where a replica's samples come from, and at what rate."""

from typing import NoReturn

from farflung.errors import ConfigError
from farflung.spec import Registry
from farflung.types import Stream

__all__ = ["STREAMS"]


def _files(*_: object, **__: object) -> NoReturn:
    raise ConfigError(
        "stream files: gone; read them in a function of your own and give iterator('module:function') (docs/streams.md)"
    )


STREAMS: Registry[Stream] = Registry(
    "farflung.data",
    {
        "files": _files,
        "in_memory": "InMemory",
        "iterator": "iterator",
        "kafka": "kafka",
        "rate": "RateLimited",
    },
)
"""All of them by name; each is made anew for every replica."""
