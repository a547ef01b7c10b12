"""Data sets: where they come from, how they are read, and how they are split among replicas."""

from typing import TYPE_CHECKING

from farflung.lazy import lazy

if TYPE_CHECKING:
    from farflung.data.catalog import CATALOG, Entry, entries, source_named
    from farflung.data.datasets import Holding, InMemory, Subset, TensorDataset
    from farflung.data.partition import (
        IID,
        PARTITIONS,
        ByOrder,
        Dirichlet,
        Labels,
        Partition,
        Share,
        by_label,
        describe,
        dirichlet,
        iid,
        in_order,
    )
    from farflung.data.sharing import SHARINGS, Injection, NoSharing, Resharding
    from farflung.data.source import File, Location, Source, Which, cache_folder, data_folder, fetch, locate
    from farflung.data.streams import STREAMS
    from farflung.data.streams.buffer import Buffer, Buffering
    from farflung.data.streams.iterator import iterator
    from farflung.data.streams.kafka import kafka
    from farflung.data.streams.live import LiveStream
    from farflung.data.streams.messages import Decoder, as_messages
    from farflung.data.streams.rate_limited import RateLimited
    from farflung.data.streams.rates import RATE_SETS, RateCourse, Rates, RateSet, courses
else:
    __getattr__, __dir__ = lazy(
        __name__,
        {
            "catalog": "CATALOG Entry entries source_named",
            "datasets": "Holding InMemory Subset TensorDataset",
            "partition": (
                "IID PARTITIONS ByOrder Dirichlet Labels Partition Share by_label describe dirichlet iid in_order"
            ),
            "sharing": "SHARINGS Injection NoSharing Resharding",
            "source": "File Location Source Which cache_folder data_folder fetch locate",
            "streams": "STREAMS",
            "streams.buffer": "Buffer Buffering",
            "streams.iterator": "iterator",
            "streams.kafka": "kafka",
            "streams.live": "LiveStream",
            "streams.messages": "Decoder as_messages",
            "streams.rate_limited": "RateLimited",
            "streams.rates": "RATE_SETS RateCourse Rates RateSet courses",
        },
    )

__all__ = [
    "CATALOG",
    "IID",
    "PARTITIONS",
    "RATE_SETS",
    "SHARINGS",
    "STREAMS",
    "Buffer",
    "Buffering",
    "ByOrder",
    "Decoder",
    "Dirichlet",
    "Entry",
    "File",
    "Holding",
    "InMemory",
    "Injection",
    "Labels",
    "LiveStream",
    "Location",
    "NoSharing",
    "Partition",
    "RateCourse",
    "RateLimited",
    "RateSet",
    "Rates",
    "Resharding",
    "Share",
    "Source",
    "Subset",
    "TensorDataset",
    "Which",
    "as_messages",
    "by_label",
    "cache_folder",
    "courses",
    "data_folder",
    "describe",
    "dirichlet",
    "entries",
    "fetch",
    "iid",
    "in_order",
    "iterator",
    "kafka",
    "locate",
    "source_named",
]
