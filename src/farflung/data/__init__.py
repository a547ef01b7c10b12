"""Data sets: where they come from, how they are read, and how they are split among replicas."""

from farflung.data.catalog import CATALOG, Entry, entries, source_named
from farflung.data.datasets import Subset, TensorDataset
from farflung.data.download import fetch
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
from farflung.data.sharing import SHARINGS, Injection, NoSharing
from farflung.data.source import File, Location, Source, Which, cache_folder, data_folder, locate
from farflung.data.streams import STREAMS, InMemory, RateLimited

__all__ = [
    "CATALOG",
    "IID",
    "PARTITIONS",
    "SHARINGS",
    "STREAMS",
    "ByOrder",
    "Dirichlet",
    "Entry",
    "File",
    "InMemory",
    "Injection",
    "Labels",
    "Location",
    "NoSharing",
    "Partition",
    "RateLimited",
    "Share",
    "Source",
    "Subset",
    "TensorDataset",
    "Which",
    "by_label",
    "cache_folder",
    "data_folder",
    "describe",
    "dirichlet",
    "entries",
    "fetch",
    "iid",
    "in_order",
    "locate",
    "source_named",
]
