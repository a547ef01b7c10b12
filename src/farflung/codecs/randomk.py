"""Random-k sparsification with indices that all replicas share."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from typing_extensions import override

from farflung.codecs.base import SparseCodec
from farflung.codecs.selection import count_kept
from farflung.options import check_fraction
from farflung.seeding import derive_seed
from farflung.types import CodecState, Payload, Seeds, TensorSpec

__all__ = ["RandomK"]


@dataclass(frozen=True, slots=True)
class RandomK(SparseCodec):
    r"""Codec that sends a random ``density`` fraction of the entries, chosen by a shared seed.

    .. math:: [C(g)]_i = \frac{n}{k}\, g_i \text{ if } i \in S_t, \text{ else } 0

    :math:`S_t` is equal on all replicas and new at every step, so payloads need no indices and can be summed:
    the codec is linear. Each entry is in it with probability k/n, so the factor n/k makes it unbiased, with
    :math:`E \|C(g) - g\|_2^2 = (n / k - 1) \|g\|_2^2`. Without the factor it is contractive, for
    :func:`error_feedback`.

    :math:`S_t` is a walk of k steps of a random stride around the n entries, in place of one of all
    :math:`\binom nk` sets. This is our choice: it takes k operations instead of n and has the same error.
    Non-finite entries are sent when they are chosen.

    Args:
      density: k/n, in (0, 1]; rounded to the nearest k, at least one entry.
      unbiased: If True, multiply by n/k.

    Raises:
      ConfigError: The density is out of range.

    References: Wangni et al. 2018; Vogels et al. 2019, section 4.3 (Random K with a shared seed).
    """

    density: float = 0.01
    unbiased: bool = True

    is_stateless: ClassVar[bool] = False

    def __post_init__(self) -> None:
        check_fraction("randomk", "density", self.density)

    @property
    @override
    def is_unbiased(self) -> bool:
        return self.unbiased

    @property
    def is_expansive(self) -> bool:
        """Returns True if entries are sent enlarged, so that errors would grow by n/k with error feedback."""
        return self.unbiased and self.density < 1

    @override
    def init(self, spec: TensorSpec, seeds: Seeds) -> CodecState:
        """Returns a state with the shared seed.

        Raises:
          Unsupported: The tensor is not floating, or has more entries than int32 indices allow.
        """
        SparseCodec.init(self, spec, seeds)
        return CodecState(shared={"seed": seeds.shared})

    @override
    def encode(self, state: CodecState, grad: Tensor, *, step: int, count: int) -> tuple[Payload, CodecState]:
        flat = grad.reshape(-1)
        indices = self._draw_indices(state, flat.numel(), step, flat.device)
        values = flat[indices]
        if self.unbiased and len(indices):
            values.mul_(flat.numel() / len(indices))
        return Payload((values,)), state

    @override
    def accumulate(
        self, state: CodecState, payload: Payload, total: Tensor, *, step: int, count: int, alpha: float = 1.0
    ) -> None:
        (values,) = payload.iter_tensors()
        indices = self._draw_indices(state, total.numel(), step, values.device)
        total.view(-1).index_add_(0, indices, values, alpha=alpha)

    def list_summed_specs(self, spec: TensorSpec) -> tuple[TensorSpec, ...]:
        return (TensorSpec((count_kept(spec.numel, self.density),), spec.dtype),)

    @override
    def is_linear(self, state: CodecState) -> bool:
        return True

    def _draw_indices(self, state: CodecState, numel: int, step: int, device: torch.device) -> Tensor:
        rng = random.Random(derive_seed(state.shared["seed"], step))
        first = rng.randrange(max(numel, 1))
        stride = 1
        while numel > 2:  # a stride coprime to n, so that no entry is drawn twice
            stride = rng.randrange(1, numel)
            if math.gcd(stride, numel) == 1:
                break
        places = torch.arange(count_kept(numel, self.density), device=device)
        return places.mul_(stride).add_(first).remainder_(max(numel, 1))
