"""Sharing: samples that move between replicas."""

from collections.abc import Callable

from farflung.data.sharing.injection import Injection
from farflung.data.sharing.no_sharing import NoSharing
from farflung.data.sharing.resharding import Resharding
from farflung.types import Reshards, Sharing

__all__ = ["SHARINGS", "Injection", "NoSharing", "Resharding"]

SHARINGS: dict[str, Callable[..., Sharing | Reshards]] = {
    "none": NoSharing,
    "injection": Injection,
    "resharding": Resharding,
}
"""All of them by name; each is made anew for every replica, with a ``seed`` that is alike on all."""
