"""Samplers: which samples a replica takes, and with what weights."""

from collections.abc import Callable

from farflung.sampling.bacc import Bacc
from farflung.sampling.gain import Gain
from farflung.sampling.grouped_importance import GroupedImportance
from farflung.sampling.rules import Rule
from farflung.sampling.uniform import InShares, Uniform
from farflung.types import Sampler

__all__ = ["SAMPLERS", "Bacc", "Gain", "GroupedImportance", "InShares", "Rule", "Uniform"]

SAMPLERS: dict[str, Callable[[int], Sampler]] = {
    "grouped_importance": GroupedImportance,
    "uniform": Uniform,
}
"""All of them by name; each is made from its seed."""
