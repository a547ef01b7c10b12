"""Data sets: their sources, loaders, and partitions among replicas."""

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
        describe,
    )
    from farflung.data.sharing import SHARINGS, Injection, MovingSharing, NoSharing, Resharding
    from farflung.data.source import File, Location, Source, Which, cache_folder, data_folder, fetch, locate
    from farflung.data.streams import STREAMS
else:
    __getattr__, __dir__ = lazy(
        __name__,
        {
            "catalog": "CATALOG Entry entries source_named",
            "datasets": "Holding InMemory Subset TensorDataset",
            "partition": "IID PARTITIONS ByOrder Dirichlet Labels Partition Share describe",
            "sharing": "SHARINGS Injection MovingSharing NoSharing Resharding",
            "source": "File Location Source Which cache_folder data_folder fetch locate",
            "streams": "STREAMS",
        },
    )

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
    "Holding",
    "InMemory",
    "Injection",
    "Labels",
    "Location",
    "MovingSharing",
    "NoSharing",
    "Partition",
    "Resharding",
    "Share",
    "Source",
    "Subset",
    "TensorDataset",
    "Which",
    "cache_folder",
    "data_folder",
    "describe",
    "entries",
    "fetch",
    "locate",
    "source_named",
]
