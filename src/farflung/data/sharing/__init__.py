"""Sharing: samples that move between replicas."""

from collections.abc import Callable

from farflung.data.sharing.injection import Injection
from farflung.data.sharing.no_sharing import NoSharing
from farflung.types import Sharing

__all__ = ["SHARINGS", "Injection", "NoSharing"]

SHARINGS: dict[str, Callable[..., Sharing]] = {
    "none": NoSharing,
    "injection": Injection,
}
"""All of them by name; each is made anew for every replica, with a ``seed`` that is alike on all."""
