"""Data sets: their sources, loaders, and partitions among replicas."""

from typing import TYPE_CHECKING

from farflung.lazy import build_lazy_attributes

if TYPE_CHECKING:
    from farflung.data.catalog import CATALOG, Entry, list_entries, lookup_source
    from farflung.data.datasets import Holding, InMemory, Subset, TensorDataset
    from farflung.data.partition import (
        IID,
        PARTITIONS,
        ByOrder,
        Dirichlet,
        Labels,
        Partition,
        Share,
        describe_parts,
    )
    from farflung.data.sharing import SHARINGS, Injection, NoSharing, PermanentSharing, Resharding
    from farflung.data.source import (
        File,
        Location,
        Source,
        Variant,
        fetch,
        get_cache_folder,
        get_data_folder,
        locate,
    )
    from farflung.data.streams import STREAMS
else:
    __getattr__, __dir__ = build_lazy_attributes(
        __name__,
        {
            "catalog": "CATALOG Entry list_entries lookup_source",
            "datasets": "Holding InMemory Subset TensorDataset",
            "partition": "IID PARTITIONS ByOrder Dirichlet Labels Partition Share describe_parts",
            "sharing": "SHARINGS Injection PermanentSharing NoSharing Resharding",
            "source": "File Location Source Variant get_cache_folder get_data_folder fetch locate",
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
    "NoSharing",
    "Partition",
    "PermanentSharing",
    "Resharding",
    "Share",
    "Source",
    "Subset",
    "TensorDataset",
    "Variant",
    "describe_parts",
    "fetch",
    "get_cache_folder",
    "get_data_folder",
    "list_entries",
    "locate",
    "lookup_source",
]
