"""The k entries of largest magnitude, exactly, without sorting all of them."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from farflung.codecs.blocks import blocks, scratch_for

__all__ = ["count_kept", "find_largest"]

SAMPLED = 17
"""One entry in so many is in the sample; odd, so as not to keep step with rows whose length is a power of two."""
SAMPLE_NUMEL = 1 << 16
"""At most. Our choice: enough that at a density of 1 % the sample's own threshold is off by a few percent."""
WHOLE_NUMEL = 1 << 14
"""Up to this many elements there is nothing to gain from a sample."""
ROW = 32
"""Rows of this length are looked at first, by their largest entries: at a density of 1 % three in four rows have
nothing to send.
"""


def count_kept(numel: int, density: float) -> int:
    """How many of ``numel`` entries a density keeps: the nearest whole number, but at least one."""
    return min(numel, max(1, round(density * numel)))


def find_largest(tensor: Tensor, k: int) -> Tensor:
    """Where the ``k`` entries of largest magnitude are.

    Of equal magnitudes the first ones are taken, so the choice is a function of the numbers alone. A NaN counts as
    infinite.

    On a CPU a threshold is guessed from a sample, low enough that hardly ever too few entries reach it; of those
    that do, the ``k`` largest are found exactly. Where too few do, all entries are looked at. Elsewhere every shape is
    known beforehand, so that the host does not wait for the device.

    Args:
      tensor: flat.
      k: 1 to the number of elements, or 0 where there are none.

    Returns:
      int64, shape ``(k,)``, ascending.
    """
    if k == 0 or k == tensor.numel():
        return torch.arange(k, device=tensor.device)
    if tensor.device.type != "cpu":
        return _exactly(_magnitudes(tensor), k)
    if tensor.numel() > WHOLE_NUMEL:
        candidates = _reaching(tensor, _guess(tensor, k), k)
        if len(candidates) >= k:
            return candidates[_exactly(_magnitudes(tensor[candidates]), k)]
    return _exactly(_magnitudes(tensor), k)


def _magnitudes(tensor: Tensor) -> Tensor:
    wide = tensor.abs() if tensor.dtype in (torch.float32, torch.float64) else tensor.float().abs_()
    return wide.nan_to_num_(nan=math.inf, posinf=math.inf)


def _exactly(magnitudes: Tensor, k: int) -> Tensor:
    """Where the k largest are, ascending, the first of equal ones."""
    numel = magnitudes.numel()
    if magnitudes.device.type == "cpu":
        smallest = magnitudes.kthvalue(numel - k + 1).values
        chosen = magnitudes > smallest
        equal = (magnitudes == smallest).nonzero().view(-1)
        chosen[equal[: k - int(chosen.count_nonzero())]] = True
        return chosen.nonzero().view(-1)
    smallest = magnitudes.topk(k, sorted=False).values.amin()
    above_mask, equal_mask = magnitudes > smallest, magnitudes == smallest
    num_equal = k - above_mask.sum()
    chosen = above_mask | (equal_mask & (equal_mask.cumsum(0) <= num_equal))
    # Each chosen entry writes its index into the next free place, all others into one place too many.
    places = torch.where(chosen, chosen.cumsum(0) - 1, k)
    indices = torch.empty(k + 1, dtype=torch.int64, device=magnitudes.device)
    return indices.scatter_(0, places, torch.arange(numel, device=magnitudes.device))[:k]


def _guess(tensor: Tensor, k: int) -> Tensor:
    """A threshold that a few more than k entries reach, from entries at even distances."""
    sample = _magnitudes(tensor[:: max(SAMPLED, tensor.numel() // SAMPLE_NUMEL | 1)])
    expected = k * len(sample) / tensor.numel()
    rank = min(len(sample), math.ceil(expected + 4 * math.sqrt(expected) + 4))
    guess = sample.kthvalue(len(sample) - rank + 1).values
    return guess.clamp_min(torch.finfo(guess.dtype).smallest_normal)


def _reaching(tensor: Tensor, threshold: Tensor, k: int) -> Tensor:
    """Where magnitudes are not below a threshold, ascending; about k entries are expected, on a CPU."""
    if 2 * ROW * k > tensor.numel():  # most rows have such an entry
        return _not_below(tensor.abs(), threshold)
    whole_numel = tensor.numel() // ROW * ROW
    highest = tensor.new_empty(whole_numel // ROW)
    scratch = scratch_for(tensor[:whole_numel], ROW, tensor.dtype)
    for start, stop in blocks(tensor[:whole_numel], ROW):
        piece = torch.abs(tensor[start:stop], out=scratch[: stop - start])
        torch.amax(piece.view(-1, ROW), 1, out=highest[start // ROW : stop // ROW])
    rows = _not_below(highest, threshold)
    inside = _not_below(tensor[:whole_numel].view(-1, ROW).index_select(0, rows).abs_().view(-1), threshold)
    row_entries = rows[inside // ROW].mul_(ROW).add_(inside % ROW)
    tail_entries = _not_below(tensor[whole_numel:].abs(), threshold).add_(whole_numel)
    return torch.cat((row_entries, tail_entries))


def _not_below(magnitudes: Tensor, threshold: Tensor) -> Tensor:
    """Where magnitudes reach a threshold, or are NaN."""
    return (magnitudes < threshold).logical_not_().nonzero().view(-1)
