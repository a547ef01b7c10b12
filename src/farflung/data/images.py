"""Transforms of image batches: scaling, and random shift and flip.

The random ones draw from torch's global random state, a number of values that depends on the batch size alone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

__all__ = ["Compose", "Normalize", "RandomFlip", "RandomShift"]


@dataclass(frozen=True, slots=True)
class Normalize:
    """Transform of bytes to floats of about zero mean and unit spread: ``(x / 255 - mean) / std`` per channel.

    Args:
      mean: Mean per channel, in units of 0 to 1.
      std: Standard deviation per channel, in units of 0 to 1.
    """

    mean: tuple[float, ...]
    std: tuple[float, ...]

    def __call__(self, images: Tensor) -> Tensor:
        """Returns ``images`` of shape ``(n, channels, height, width)``, uint8, as float32."""
        scale = torch.tensor([1.0 / (255.0 * s) for s in self.std])
        shift = torch.tensor([m / s for m, s in zip(self.mean, self.std, strict=True)])
        return images.to(torch.float32).mul_(scale[:, None, None]).sub_(shift[:, None, None])


@dataclass(frozen=True, slots=True)
class RandomShift:
    """Transform that shifts each image by up to ``pixels`` in both directions, padded with 0 (the usual padded crop).

    Args:
      pixels: Largest shift.
    """

    pixels: int

    def __call__(self, images: Tensor) -> Tensor:
        """Returns shifted copies of ``images``, shape ``(n, channels, height, width)``."""
        n, _, height, width = images.shape
        padded = F.pad(images, (self.pixels,) * 4)
        windows = padded.unfold(2, height, 1).unfold(3, width, 1)
        rows, columns = torch.randint(2 * self.pixels + 1, (2, n))
        return windows[torch.arange(n), :, rows, columns]


@dataclass(frozen=True, slots=True)
class RandomFlip:
    """Transform that mirrors each image left to right with probability one half."""

    def __call__(self, images: Tensor) -> Tensor:
        """Returns ``images`` of shape ``(n, channels, height, width)``, some mirrored."""
        mirrored = torch.rand(len(images)) < 0.5
        return torch.where(mirrored[:, None, None, None], images.flip(-1), images)


class Compose:
    """Sequence of transforms, applied in order.

    Args:
      steps: Functions of a batch of inputs.
    """

    def __init__(self, *steps: Callable[[Tensor], Tensor]) -> None:
        self.steps = steps

    def __call__(self, images: Tensor) -> Tensor:
        """Returns ``images`` after every transform."""
        for step in self.steps:
            images = step(images)
        return images
