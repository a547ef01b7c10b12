"""Entries drawn at random, the same on all replicas."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from typing_extensions import override

from farflung.codecs.base import Sparse
from farflung.codecs.selection import count_kept
from farflung.options import part_option
from farflung.seeding import derive
from farflung.types import CodecState, Payload, Seeds, TensorSpec

__all__ = ["RandomK"]


@dataclass(frozen=True, slots=True)
class RandomK(Sparse):
    r"""Sends a random ``density`` fraction of the entries; which ones, a shared seed says.

    .. math:: [C(g)]_i = \frac{n}{k}\, g_i \text{ if } i \in S_t, \text{ else } 0

    :math:`S_t` is the same on all replicas and new at every step, so payloads name no indices and may be summed:
    linear. Each entry is in it with probability k/n, so with the factor n/k it is unbiased, with
    :math:`E \|C(g) - g\|_2^2 = (n / k - 1) \|g\|_2^2`; without the factor it is contractive, for
    :func:`error_feedback`.

    :math:`S_t` is k steps of a random length around the n entries from a random one on, in place of one of all
    :math:`\binom nk` sets: our choice, since it takes k operations instead of n and leaves the error above as it is.
    What is not finite is sent when its turn comes.

    Args:
      density: k/n, in (0, 1], to the nearest whole k; at least one entry is sent.
      unbiased: whether to multiply by n/k.

    Raises:
      ConfigError: a density out of its range.

    References: Wangni et al. 2018; Vogels et al. 2019, section 4.3 (Random K with a shared seed).
    """

    density: float = 0.01
    unbiased: bool = True

    stateless: ClassVar[bool] = False

    def __post_init__(self) -> None:
        part_option("randomk", "density", self.density)

    @property
    def expands(self) -> bool:
        """Whether entries are sent larger than they are, so that with error feedback errors would grow by n/k."""
        return self.unbiased and self.density < 1

    @override
    def init(self, spec: TensorSpec, seeds: Seeds) -> CodecState:
        """The shared seed.

        Raises:
          Unsupported: the tensor is not floating, or has more entries than an int32 can name.
        """
        Sparse.init(self, spec, seeds)
        return CodecState(shared={"seed": seeds.shared})

    @override
    def encode(self, state: CodecState, grad: Tensor, *, step: int, count: int) -> tuple[Payload, CodecState]:
        flat = grad.reshape(-1)
        indices = self._indices(state, flat.numel(), step, flat.device)
        values = flat[indices]
        if self.unbiased and len(indices):
            values.mul_(flat.numel() / len(indices))
        return Payload((values,)), state

    @override
    def accumulate(
        self, state: CodecState, payload: Payload, total: Tensor, *, step: int, count: int, alpha: float = 1.0
    ) -> None:
        (values,) = payload.tensors()
        indices = self._indices(state, total.numel(), step, values.device)
        total.view(-1).index_add_(0, indices, values, alpha=alpha)

    def summed_specs(self, spec: TensorSpec) -> tuple[TensorSpec, ...]:
        """That of the values."""
        return (TensorSpec((count_kept(spec.numel, self.density),), spec.dtype),)

    @override
    def linear(self, state: CodecState) -> bool:
        return True

    def _indices(self, state: CodecState, numel: int, step: int, device: torch.device) -> Tensor:
        rng = random.Random(derive(state.shared["seed"], step))
        first = rng.randrange(max(numel, 1))
        stride = 1
        while numel > 2:  # one that shares no factor with n, so that no entry comes twice
            stride = rng.randrange(1, numel)
            if math.gcd(stride, numel) == 1:
                break
        places = torch.arange(count_kept(numel, self.density), device=device)
        return places.mul_(stride).add_(first).remainder_(max(numel, 1))
