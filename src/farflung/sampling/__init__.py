"""Samplers: which samples a replica takes, and with what weights."""

from collections.abc import Callable

from farflung.sampling.uniform import Uniform
from farflung.types import Sampler

__all__ = ["SAMPLERS", "Uniform"]

SAMPLERS: dict[str, Callable[[int], Sampler]] = {
    "uniform": Uniform,
}
"""All of them by name; each is made from its seed."""
