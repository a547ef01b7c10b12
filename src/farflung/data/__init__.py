"""Data sets: where they come from, how they are read, and how they are split among replicas."""

from typing import TYPE_CHECKING

from farflung.lazy import lazy

if TYPE_CHECKING:
    from farflung.data.catalog import CATALOG, Entry, entries, source_named
    from farflung.data.datasets import Holding, Subset, TensorDataset
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
    from farflung.data.streams.followed import files
    from farflung.data.streams.in_memory import InMemory
    from farflung.data.streams.in_turn import in_turn
    from farflung.data.streams.kafka import kafka
    from farflung.data.streams.live import LiveStream, MessageSource, Reach, Records
    from farflung.data.streams.messages import Decoder, as_messages
    from farflung.data.streams.publishing import FileOutlet, KafkaOutlet, Outlet, Published, publish
    from farflung.data.streams.rate_limited import RateLimited
    from farflung.data.streams.rates import PRINTED, RATE_SETS, RateCourse, Rates, RateSet, courses, rates_in
else:
    __getattr__, __dir__ = lazy(__name__)

__all__ = [
    "CATALOG",
    "IID",
    "PARTITIONS",
    "PRINTED",
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
    "FileOutlet",
    "Holding",
    "InMemory",
    "Injection",
    "KafkaOutlet",
    "Labels",
    "LiveStream",
    "Location",
    "MessageSource",
    "NoSharing",
    "Outlet",
    "Partition",
    "Published",
    "RateCourse",
    "RateLimited",
    "RateSet",
    "Rates",
    "Reach",
    "Records",
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
    "files",
    "iid",
    "in_order",
    "in_turn",
    "kafka",
    "locate",
    "publish",
    "rates_in",
    "source_named",
]
