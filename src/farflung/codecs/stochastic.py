"""Stochastic rounding to a few levels: what QSGD and its relatives share."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from farflung.codecs.blocks import blocks, scratch_for, working_dtype
from farflung.seeding import derive

__all__ = ["from_levels", "generator_on", "to_levels"]


def generator_on(device: torch.device, seed: int, *labels: int | str) -> torch.Generator:
    """A generator on the tensors' own device, seeded by :func:`farflung.seeding.derive`."""
    return torch.Generator(device).manual_seed(derive(seed, *labels))


def to_levels(
    tensor: Tensor, norms: Tensor, levels: int, bucket_size: int, generator: torch.Generator | None
) -> Tensor:
    r"""Rounds each element to one of ``2 * levels + 1`` levels between minus and plus its bucket's norm.

    .. math:: l_i = \lfloor s v_i / \|v\| + u_i \rfloor, \quad u_i \sim U[0, 1)

    which rounds up with the probability that makes the expectation :math:`s v_i / \|v\|`; for negative numbers too,
    so the sign needs no case of its own. Without a generator :math:`u_i = 1/2`: to the nearest.

    Args:
      tensor: flat.
      norms: one for each bucket; no element is larger.
      levels: the paper's s, 1 to 127.
      bucket_size: elements that share a norm.
      generator: for u.

    Returns:
      uint8, :math:`l_i + s`.
    """
    codes = torch.empty(tensor.numel(), dtype=torch.uint8, device=tensor.device)
    dtype = working_dtype(tensor.dtype)
    # Of an infinite bucket the infinities alone reach the outer levels; a bucket of zeros stays zero.
    divisors = torch.where(norms > 0, norms.clamp_max(torch.finfo(dtype).max), 1.0)
    scratch = scratch_for(tensor, bucket_size, dtype)
    noise = torch.empty_like(scratch)
    for start, stop in blocks(tensor, bucket_size):
        x = scratch[: stop - start].copy_(tensor[start:stop])
        _by_bucket(x, divisors[start // bucket_size :], bucket_size, torch.Tensor.div_)
        x.mul_(levels)
        if generator is None:
            x.round_()
        else:
            x.add_(noise[: stop - start].uniform_(generator=generator)).floor_()
        # NaN is no integer, and 7 + 0.99999997 is 8 in float32.
        x.nan_to_num_(0.0).clamp_(-levels, levels).add_(levels)
        codes[start:stop].copy_(x)
    return codes


def from_levels(
    found: Tensor, norms: Tensor, levels: int, bucket_size: int, dtype: torch.dtype, count: int = 1
) -> Tensor:
    r""":math:`\|v\| l_i / s`, flat; nothing finite in a bucket whose norm is infinite or NaN.

    Args:
      found: :math:`l_i + s`, or the sum of ``count`` of them.
      norms: one for each bucket.
      levels: s.
      bucket_size: elements that share a norm.
      dtype: of the result.
      count: how many are summed in ``found``.
    """
    out = torch.empty(found.numel(), dtype=dtype, device=found.device)
    steps = norms / levels
    scratch = out if dtype == steps.dtype else scratch_for(found, bucket_size, steps.dtype)
    for start, stop in blocks(found, bucket_size):
        x = out[start:stop] if scratch is out else scratch[: stop - start]
        x.copy_(found[start:stop]).sub_(levels * count)
        _by_bucket(x, steps[start // bucket_size :], bucket_size, torch.Tensor.mul_)
        if scratch is not out:
            out[start:stop].copy_(x)
    return out


def _by_bucket(
    x: Tensor, factors: Tensor, bucket_size: int, apply: Callable[[Tensor, Tensor], Tensor]
) -> None:
    """Applies to each bucket of a flat piece its factor, in place."""
    even = x.numel() // bucket_size
    if even:
        apply(x[: even * bucket_size].view(even, bucket_size), factors[:even, None])
    if even * bucket_size < x.numel():
        apply(x[even * bucket_size :], factors[even])
