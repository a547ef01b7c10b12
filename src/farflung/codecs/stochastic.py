"""Stochastic rounding to a few levels, shared by QSGD and its relatives."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from farflung.codecs.blocks import allocate_scratch, get_working_dtype, iter_blocks
from farflung.seeding import derive_seed

__all__ = ["create_device_generator", "from_level_codes", "to_level_codes"]


def create_device_generator(device: torch.device, seed: int, *labels: int | str) -> torch.Generator:
    """Returns a generator on ``device``, seeded by :func:`farflung.seeding.derive_seed`."""
    return torch.Generator(device).manual_seed(derive_seed(seed, *labels))


def to_level_codes(
    tensor: Tensor, norms: Tensor, levels: int, bucket_size: int, generator: torch.Generator | None
) -> Tensor:
    r"""Rounds each element to a level; returns its number, 0 at minus the bucket's norm to ``2 * levels`` at plus.

    .. math:: l_i = \lfloor s v_i / \|v\| + u_i \rfloor, \quad u_i \sim U[0, 1)

    This rounds up with the probability that makes the expectation :math:`s v_i / \|v\|`, for negative numbers too.
    The sign needs no special case. Without a generator :math:`u_i = 1/2`, which rounds to the nearest level.

    Args:
      tensor: Flat tensor.
      norms: Norm of each bucket; no element is larger.
      levels: s of the paper, 1 to 127.
      bucket_size: Number of elements that share a norm.
      generator: Generator of u; None rounds to the nearest level.

    Returns:
      :math:`l_i + s` as uint8.
    """
    codes = torch.empty(tensor.numel(), dtype=torch.int8, device=tensor.device)
    dtype = get_working_dtype(tensor.dtype)
    # Testing for finite norms is cheap on a CPU; on other devices it would synchronize.
    is_finite = norms.device.type == "cpu" and bool(norms.isfinite().all())
    # In an infinite bucket only infinities reach the outer levels; a bucket of zeros stays zero.
    divisors = torch.where(norms > 0, norms.clamp_max(torch.finfo(dtype).max), 1.0)
    scratch = allocate_scratch(tensor, bucket_size, dtype)
    noise = torch.empty_like(scratch)
    for start, stop in iter_blocks(tensor, bucket_size):
        x = scratch[: stop - start]
        _apply_to_buckets(torch.div, tensor[start:stop], divisors[start // bucket_size :], bucket_size, x)
        x.mul_(levels)
        if generator is None:
            x.round_()
        else:
            x.add_(noise[: stop - start].uniform_(generator=generator)).floor_()
            x.clamp_max_(levels)  # 7 + 0.99999997 is 8 in float32
        if not is_finite:
            x.nan_to_num_(0.0).clamp_(-levels, levels)  # NaN is no integer
        codes[start:stop].copy_(x).add_(levels)  # modulo 256, which is exact as uint8
    return codes.view(torch.uint8)


def from_level_codes(
    codes: Tensor, norms: Tensor, levels: int, bucket_size: int, dtype: torch.dtype, count: int = 1
) -> Tensor:
    r"""Returns :math:`\|v\| l_i / s`, flat; no entry is finite in a bucket whose norm is infinite or NaN.

    Args:
      codes: :math:`l_i + s`, or the sum of ``count`` such codes.
      norms: Norm of each bucket.
      levels: s of the paper.
      bucket_size: Number of elements that share a norm.
      dtype: Dtype of the result.
      count: Number of codes summed.
    """
    result = torch.empty(codes.numel(), dtype=dtype, device=codes.device)
    steps = norms / levels
    scratch = result if dtype == steps.dtype else allocate_scratch(codes, bucket_size, steps.dtype)
    for start, stop in iter_blocks(codes, bucket_size):
        x = result[start:stop] if scratch is result else scratch[: stop - start]
        x.copy_(codes[start:stop]).sub_(levels * count)
        _apply_to_buckets(torch.mul, x, steps[start // bucket_size :], bucket_size, x)
        if scratch is not result:
            result[start:stop].copy_(x)
    return result


def _apply_to_buckets(
    apply: Callable[..., Tensor], x: Tensor, factors: Tensor, bucket_size: int, result: Tensor
) -> None:
    """Applies the factor of each bucket to a flat piece, and writes to ``result``."""
    num_buckets = x.numel() // bucket_size
    numel = num_buckets * bucket_size
    if num_buckets:
        rows = (num_buckets, bucket_size)
        apply(x[:numel].view(rows), factors[:num_buckets, None], out=result[:numel].view(rows))
    if numel < x.numel():
        apply(x[numel:], factors[num_buckets : num_buckets + 1], out=result[numel:])
