"""The largest entries alone."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from typing_extensions import override

from farflung.codecs.base import Sparse
from farflung.codecs.selection import count_kept, find_largest
from farflung.options import part_option
from farflung.types import CodecState, Payload

__all__ = ["TopK"]


@dataclass(frozen=True, slots=True)
class TopK(Sparse):
    r"""Keeps the ``density`` fraction of entries with the largest magnitude.

    .. math:: [C(g)]_i = g_i \text{ if } i \in \mathrm{top}_k(|g|), \text{ else } 0

    Not linear: payloads of different replicas name different entries, so they are gathered and decoded before
    summing. Biased: wrap in :func:`error_feedback`.

    Of equal magnitudes the first are kept. A NaN counts as infinite, so whatever is not finite is sent first, as it
    is. Where values with their indices would be no smaller than the dense tensor, that is sent, with zeros for what
    is dropped.

    Args:
      density: fraction of entries sent, in (0, 1], to the nearest whole number; at least one entry is sent.

    Raises:
      ConfigError: a density out of its range.

    References: Aji & Heafield 2017; Alistarh et al. 2018, Alg. 1.
    """

    density: float = 0.01

    def __post_init__(self) -> None:
        part_option("topk", "density", self.density)

    @override
    def encode(self, state: CodecState, grad: Tensor, *, step: int, count: int) -> tuple[Payload, CodecState]:
        """Values, and their int32 indices in ascending order."""
        flat = grad.reshape(-1)
        indices = find_largest(flat, count_kept(flat.numel(), self.density))
        payload = Payload((flat[indices], indices.to(torch.int32)))
        return self.replace_large(state, payload, flat), state
