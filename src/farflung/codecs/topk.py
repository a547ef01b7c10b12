"""Top-k sparsification."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from typing_extensions import override

from farflung.codecs.base import SparseCodec
from farflung.codecs.selection import count_kept, find_largest
from farflung.options import check_fraction
from farflung.types import CodecState, Payload

__all__ = ["TopK"]


@dataclass(frozen=True, slots=True)
class TopK(SparseCodec):
    r"""Codec that keeps the ``density`` fraction of entries with the largest magnitude.

    .. math:: [C(g)]_i = g_i \text{ if } i \in \mathrm{top}_k(|g|), \text{ else } 0

    Not linear: replicas send different entries, so payloads are gathered and decoded before summing. Biased: wrap
    it in :func:`error_feedback`.

    Among equal magnitudes the first entries are kept. A NaN counts as infinite, so non-finite entries are sent first,
    unchanged. If values and indices are no smaller than the dense tensor, the dense tensor is sent, with zeros for
    the dropped entries.

    Args:
      density: Fraction of entries sent, in (0, 1]; rounded to the nearest count, at least one entry.

    Raises:
      ConfigError: The density is out of range.

    References: Aji & Heafield 2017; Alistarh et al. 2018, Alg. 1.
    """

    density: float = 0.01

    def __post_init__(self) -> None:
        check_fraction("topk", "density", self.density)

    @override
    def encode(self, state: CodecState, grad: Tensor, *, step: int, count: int) -> tuple[Payload, CodecState]:
        """Returns the largest entries and their ascending int32 indices, or a dense payload if that is not larger."""
        flat = grad.reshape(-1)
        indices = find_largest(flat, count_kept(flat.numel(), self.density))
        payload = Payload((flat[indices], indices.to(torch.int32)))
        return self.densify_large(state, payload, flat), state
