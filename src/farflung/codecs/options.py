"""Checks of what codecs are made with."""

from __future__ import annotations

import torch

from farflung.errors import ConfigError, Unsupported
from farflung.types import TensorSpec

__all__ = [
    "codec_option",
    "density_option",
    "floating",
    "indexable",
]


def density_option(name: str, density: object) -> None:
    """A fraction kept.

    Raises:
      ConfigError: outside (0, 1].
    """
    if isinstance(density, bool) or not isinstance(density, int | float) or not 0 < density <= 1:
        raise ConfigError(f"{name}: density {density!r} must be above 0 and at most 1")


def codec_option(name: str, codec: object) -> None:
    """A codec inside another.

    Raises:
      ConfigError: something else.
    """
    if not hasattr(codec, "observe"):
        raise ConfigError(f"{name} is made of codecs, not of {codec!r}")


def floating(name: str, spec: TensorSpec) -> None:
    """A tensor that can be quantised.

    Raises:
      Unsupported: its numbers are not floating.
    """
    if not spec.dtype.is_floating_point:
        raise Unsupported(f"codec {name} needs floating gradients, not {spec.dtype}")


def indexable(name: str, spec: TensorSpec) -> None:
    """A tensor whose entries an int32 can name.

    Raises:
      Unsupported: it is larger, or not floating.
    """
    floating(name, spec)
    if spec.numel > torch.iinfo(torch.int32).max:
        raise Unsupported(f"codec {name} names entries by int32: {spec.numel} are too many for one bucket")
