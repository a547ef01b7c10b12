"""Samplers: choose a replica's samples and their weights."""

from typing import TYPE_CHECKING

from farflung.lazy import lazy
from farflung.spec import Registry
from farflung.types import Sampler

if TYPE_CHECKING:
    from farflung.sampling.bacc import Bacc
    from farflung.sampling.balanced import Balanced, balanced_counts
    from farflung.sampling.gain import Gain
    from farflung.sampling.grouped_importance import GroupedImportance
    from farflung.sampling.rules import Rule
    from farflung.sampling.scoring import ScoringSampler
    from farflung.sampling.uniform import Uniform
else:
    __getattr__, __dir__ = lazy(
        __name__,
        {
            "bacc": "Bacc",
            "balanced": "Balanced balanced_counts",
            "gain": "Gain",
            "grouped_importance": "GroupedImportance",
            "rules": "Rule",
            "scoring": "ScoringSampler",
            "uniform": "Uniform",
        },
    )

__all__ = [
    "SAMPLERS",
    "Bacc",
    "Balanced",
    "Gain",
    "GroupedImportance",
    "Rule",
    "ScoringSampler",
    "Uniform",
    "balanced_counts",
]

SAMPLERS: Registry[Sampler] = Registry(
    __name__,
    {
        "balanced": "Balanced",
        "grouped_importance": "GroupedImportance",
        "uniform": "Uniform",
    },
)
"""Registry of samplers by name; each is built from its seed."""
