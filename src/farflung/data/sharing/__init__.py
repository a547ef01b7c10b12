"""Sharing methods: samples that move between replicas."""

from typing import TYPE_CHECKING

from farflung.lazy import build_lazy_attributes
from farflung.spec import Registry
from farflung.types import Sharing

if TYPE_CHECKING:
    from farflung.data.sharing.injection import Injection
    from farflung.data.sharing.ownership import PermanentSharing
    from farflung.data.sharing.resharding import Resharding
else:
    __getattr__, __dir__ = build_lazy_attributes(
        __name__,
        {
            "injection": "Injection",
            "ownership": "PermanentSharing",
            "resharding": "Resharding",
        },
    )

__all__ = ["SHARINGS", "Injection", "NoSharing", "PermanentSharing", "Resharding"]


class NoSharing(Sharing):
    """Sharing that sends no samples.

    Args:
      seed: Seed, which is not used.
    """

    def __init__(self, seed: int = 0) -> None:
        del seed


SHARINGS: Registry[Sharing] = Registry(
    __name__,
    {
        "none": "NoSharing",
        "injection": "Injection",
        "resharding": "Resharding",
    },
)
"""Sharing methods by name; each is built anew for every replica, with a ``seed`` that is equal on all."""
