"""The largest entries alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from typing_extensions import override

from farflung.codecs.base import Sparse, add_dense, add_entries, density_option, indexable
from farflung.codecs.selection import kept, largest
from farflung.types import CodecState, Payload, Seeds, TensorSpec

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

    unbiased: ClassVar[bool] = False
    stateless: ClassVar[bool] = True
    per_hop: ClassVar[bool] = False

    def __post_init__(self) -> None:
        density_option("topk", self.density)

    def init(self, spec: TensorSpec, seeds: Seeds) -> CodecState:
        """No state.

        Raises:
          Unsupported: the tensor is not floating, or has more entries than an int32 can name.
        """
        del seeds
        indexable("topk", spec)
        return CodecState()

    def encode(self, state: CodecState, grad: Tensor, *, step: int, count: int) -> tuple[Payload, CodecState]:
        """Values, and their int32 indices in ascending order."""
        flat = grad.reshape(-1)
        indices = largest(flat, kept(flat.numel(), self.density))
        payload = Payload((flat[indices], indices.to(torch.int32)))
        return self.or_dense(state, payload, flat, step=step, count=count), state

    @override
    def accumulate(
        self, state: CodecState, payload: Payload, total: Tensor, *, step: int, count: int, alpha: float = 1.0
    ) -> None:
        del state, step, count
        parts = tuple(payload.tensors())
        if add_dense(total, parts, alpha):
            return
        values, indices = parts
        add_entries(total, values, indices, alpha)

    def linear(self, state: CodecState) -> bool:
        """Never: each replica names entries of its own."""
        del state
        return False
