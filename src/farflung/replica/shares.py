"""A step's samples where they are shares that other replicas go through too."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch

from farflung.seeding import RandomState, derive
from farflung.types import Batch

__all__ = ["apart", "together"]


def apart(
    samples: Batch, shares: Sequence[int], own: RandomState, seed: int, device: torch.device
) -> Iterator[Batch]:
    """Each share by itself, and while it is the last that was given, under a random state that is the share's.

    Args:
      samples: shares as long as each other.
      shares: their numbers; none: the samples are the replica's own, and given whole.
      own: the replica's random state, for those.
      seed: alike on all replicas, and unlike others of the run.
      device: where a model draws random numbers.
    """
    if not shares:
        own.install()
        yield samples
        return
    each = zip(samples.inputs.chunk(len(shares)), samples.targets.chunk(len(shares)), strict=True)
    for share, (inputs, targets) in zip(shares, each, strict=True):
        RandomState(derive(seed, share), device).install()
        yield Batch(inputs, targets)


def together(parts: Iterable[Batch]) -> Batch:
    """One batch of several; a single one as it is."""
    first, *others = parts
    if not others:
        return first
    return Batch(
        torch.cat([part.inputs for part in (first, *others)]),
        torch.cat([part.targets for part in (first, *others)]),
    )
