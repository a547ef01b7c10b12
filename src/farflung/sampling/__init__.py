"""Samplers: choose a replica's samples and their weights."""

from typing import TYPE_CHECKING

from farflung.lazy import build_lazy_attributes
from farflung.spec import Registry
from farflung.types import Sampler

if TYPE_CHECKING:
    from farflung.sampling.bacc import Bacc
    from farflung.sampling.balanced import BalancedSampler, compute_balanced_counts
    from farflung.sampling.gain import Gain
    from farflung.sampling.grouped_importance import GroupedImportance
    from farflung.sampling.rules import DrawRule
    from farflung.sampling.scoring import ScoringSampler
    from farflung.sampling.uniform import UniformSampler
else:
    __getattr__, __dir__ = build_lazy_attributes(
        __name__,
        {
            "bacc": "Bacc",
            "balanced": "BalancedSampler compute_balanced_counts",
            "gain": "Gain",
            "grouped_importance": "GroupedImportance",
            "rules": "DrawRule",
            "scoring": "ScoringSampler",
            "uniform": "UniformSampler",
        },
    )

__all__ = [
    "SAMPLERS",
    "Bacc",
    "BalancedSampler",
    "DrawRule",
    "Gain",
    "GroupedImportance",
    "ScoringSampler",
    "UniformSampler",
    "compute_balanced_counts",
]

SAMPLERS: Registry[Sampler] = Registry(
    __name__,
    {
        "balanced": "BalancedSampler",
        "grouped_importance": "GroupedImportance",
        "uniform": "UniformSampler",
    },
)
"""Registry of samplers by name; each is built from its seed."""
