"""Iteration over a large tensor in cache-sized pieces, and norms of its buckets."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Literal

import torch
from torch import Tensor

__all__ = ["Norm", "allocate_scratch", "compute_bucket_norms", "get_working_dtype", "iter_blocks"]

Norm = Literal["l2", "max", "mean"]
"""Norm of a bucket; ``mean`` is the mean magnitude."""

BLOCK_NUMEL = 1 << 19
"""Our choice: a float32 block and its scratch fit in 4 MiB of cache, and Python's share of the time is small."""


def iter_blocks(tensor: Tensor, bucket_size: int = 1) -> Iterator[tuple[int, int]]:
    """Yields first and last (excluded) element of consecutive pieces of a flat tensor.

    On a CPU a piece fits in the cache, so that several operations on it read memory once. On other devices pieces
    are as large as possible, since each operation costs a launch.

    Args:
      tensor: Flat tensor.
      bucket_size: Size of a bucket. A piece is several buckets or lies inside one; the last may be shorter.
    """
    numel, is_on_cpu = tensor.numel(), tensor.device.type == "cpu"
    if bucket_size > BLOCK_NUMEL:
        span, size = bucket_size, BLOCK_NUMEL if is_on_cpu else bucket_size
    else:
        span = size = BLOCK_NUMEL // bucket_size * bucket_size if is_on_cpu else max(numel, 1)
    for first in range(0, numel, span):
        last = min(first + span, numel)
        for start in range(first, last, size):
            yield start, min(start + size, last)


def get_working_dtype(dtype: torch.dtype) -> torch.dtype:
    """Returns the dtype of computations: float64 for float64, else float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def allocate_scratch(tensor: Tensor, bucket_size: int, dtype: torch.dtype) -> Tensor:
    """Allocates memory for the longest of a tensor's :func:`iter_blocks`, which is the first."""
    numel = next((stop - start for start, stop in iter_blocks(tensor, bucket_size)), 0)
    return torch.empty(numel, dtype=dtype, device=tensor.device)


def compute_bucket_norms(tensor: Tensor, bucket_size: int, norm: Norm) -> Tensor:
    """Computes the norm of every ``bucket_size`` elements of a flat tensor; the last bucket may be shorter.

    Returns:
      Tensor of shape ``(ceil(n / bucket_size),)``, float32 or float64; NaN for a bucket that holds one.
    """
    numel = tensor.numel()
    dtype = get_working_dtype(tensor.dtype)
    norms = torch.empty(math.ceil(numel / bucket_size), dtype=dtype, device=tensor.device)
    scratch = allocate_scratch(tensor, bucket_size, dtype)
    partial: list[Tensor] = []

    def reduce(rows: Tensor, count: int) -> Tensor:
        """Returns the norm of each row; for a mean over ``count``, the row's share of it."""
        # The sum of large numbers may be infinite although their mean is finite.
        return _REDUCE[norm](rows.div_(count) if norm == "mean" else rows, -1)

    for start, stop in iter_blocks(tensor, bucket_size):
        piece = tensor[start:stop].to(dtype)
        if norm != "l2":
            piece = torch.abs(piece, out=scratch[: stop - start])
        first, num_buckets = start // bucket_size, (stop - start) // bucket_size
        if num_buckets:
            rows = piece[: num_buckets * bucket_size].view(num_buckets, bucket_size)
            norms[first : first + num_buckets] = reduce(rows, bucket_size)
        if tail_numel := (stop - start) % bucket_size:
            last = (stop - 1) // bucket_size
            end = min((last + 1) * bucket_size, numel)
            partial.append(reduce(piece[-tail_numel:], end - last * bucket_size))
            if stop == end:
                norms[last] = _REDUCE[norm](torch.stack(partial), -1)
                partial.clear()
    return norms


def _compute_l2_norm(rows: Tensor, dim: int) -> Tensor:
    norms: Tensor = torch.linalg.vector_norm(rows, dim=dim)
    return norms


_REDUCE: dict[Norm, Callable[[Tensor, int], Tensor]] = {
    "l2": _compute_l2_norm,
    "max": torch.amax,
    "mean": torch.sum,
}
