"""Exact selection of the k entries of largest magnitude, without a full sort."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from farflung.codecs.blocks import allocate_scratch, iter_blocks

__all__ = ["count_kept", "find_largest"]

SAMPLE_STRIDE = 17
"""Distance of entries in the sample; odd, so that it is not in step with rows of a power-of-two length."""
SAMPLE_NUMEL = 1 << 16
"""Largest sample. Our choice: at a density of 1 % the threshold of the sample is off by a few percent."""
EXACT_NUMEL = 1 << 14
"""Number of elements up to which a sample saves no time."""
ROW_NUMEL = 32
"""Length of the rows whose maxima are tested first: at a density of 1 % three in four rows have no candidate."""


def count_kept(numel: int, density: float) -> int:
    """Counts the entries that a density keeps of ``numel``: rounded to the nearest, at least one."""
    return min(numel, max(1, round(density * numel)))


def find_largest(tensor: Tensor, k: int) -> Tensor:
    """Finds the indices of the ``k`` entries of largest magnitude.

    Among equal magnitudes the first entries are chosen, so the result depends on the numbers alone. A NaN counts as
    infinite.

    On a CPU a low threshold is guessed from a sample, and the ``k`` largest of the entries that reach it are
    selected exactly. If fewer than ``k`` entries reach it, all entries are searched. On other devices every shape
    is known in advance, so the host does not wait for the device.

    Args:
      tensor: Flat tensor.
      k: Number of entries, from 1; 0 if the tensor is empty.

    Returns:
      int64 indices of shape ``(k,)``, ascending.
    """
    if k == 0 or k == tensor.numel():
        return torch.arange(k, device=tensor.device)
    if tensor.device.type != "cpu":
        return _select_largest(_compute_magnitudes(tensor), k)
    if tensor.numel() > EXACT_NUMEL:
        candidates = _find_candidates(tensor, _estimate_threshold(tensor, k), k)
        if len(candidates) >= k:
            return candidates[_select_largest(_compute_magnitudes(tensor[candidates]), k)]
    return _select_largest(_compute_magnitudes(tensor), k)


def _compute_magnitudes(tensor: Tensor) -> Tensor:
    wide = tensor.abs() if tensor.dtype in (torch.float32, torch.float64) else tensor.float().abs_()
    return wide.nan_to_num_(nan=math.inf, posinf=math.inf)


def _select_largest(magnitudes: Tensor, k: int) -> Tensor:
    """Returns the indices of the k largest, ascending, the first among equal ones."""
    numel = magnitudes.numel()
    if magnitudes.device.type == "cpu":
        smallest = magnitudes.kthvalue(numel - k + 1).values
        mask = magnitudes > smallest
        equal = (magnitudes == smallest).nonzero().view(-1)
        mask[equal[: k - int(mask.count_nonzero())]] = True
        return mask.nonzero().view(-1)
    smallest = magnitudes.topk(k, sorted=False).values.amin()
    above_mask, equal_mask = magnitudes > smallest, magnitudes == smallest
    num_equal = k - above_mask.sum()
    mask = above_mask | (equal_mask & (equal_mask.cumsum(0) <= num_equal))
    # Each chosen entry writes its index to the next free place; the others write to an extra place.
    places = torch.where(mask, mask.cumsum(0) - 1, k)
    indices = torch.empty(k + 1, dtype=torch.int64, device=magnitudes.device)
    return indices.scatter_(0, places, torch.arange(numel, device=magnitudes.device))[:k]


def _estimate_threshold(tensor: Tensor, k: int) -> Tensor:
    """Guesses a threshold that slightly more than k entries reach, from evenly spaced entries."""
    sample = _compute_magnitudes(tensor[:: max(SAMPLE_STRIDE, tensor.numel() // SAMPLE_NUMEL | 1)])
    expected = k * len(sample) / tensor.numel()
    rank = min(len(sample), math.ceil(expected + 4 * math.sqrt(expected) + 4))
    guess = sample.kthvalue(len(sample) - rank + 1).values
    return guess.clamp_min(torch.finfo(guess.dtype).smallest_normal)


def _find_candidates(tensor: Tensor, threshold: Tensor, k: int) -> Tensor:
    """Finds the indices of entries that reach a threshold, ascending, on a CPU; expects about k."""
    if 2 * ROW_NUMEL * k > tensor.numel():  # most rows have a candidate
        return _find_reaching(tensor.abs(), threshold)
    whole_numel = tensor.numel() // ROW_NUMEL * ROW_NUMEL
    highest = tensor.new_empty(whole_numel // ROW_NUMEL)
    scratch = allocate_scratch(tensor[:whole_numel], ROW_NUMEL, tensor.dtype)
    for start, stop in iter_blocks(tensor[:whole_numel], ROW_NUMEL):
        piece = torch.abs(tensor[start:stop], out=scratch[: stop - start])
        torch.amax(piece.view(-1, ROW_NUMEL), 1, out=highest[start // ROW_NUMEL : stop // ROW_NUMEL])
    rows = _find_reaching(highest, threshold)
    inside = _find_reaching(
        tensor[:whole_numel].view(-1, ROW_NUMEL).index_select(0, rows).abs_().view(-1), threshold
    )
    row_entries = rows[inside // ROW_NUMEL].mul_(ROW_NUMEL).add_(inside % ROW_NUMEL)
    tail_entries = _find_reaching(tensor[whole_numel:].abs(), threshold).add_(whole_numel)
    return torch.cat((row_entries, tail_entries))


def _find_reaching(magnitudes: Tensor, threshold: Tensor) -> Tensor:
    """Finds the indices of magnitudes that reach a threshold or are NaN."""
    return (magnitudes < threshold).logical_not_().nonzero().view(-1)
