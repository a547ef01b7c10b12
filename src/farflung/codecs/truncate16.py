"""Truncation to the high 16 bits of a float32, Pipe-SGD's lighter compression."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from farflung.errors import Unsupported
from farflung.types import CodecState, Payload, Seeds, TensorSpec

__all__ = ["Truncate16"]


@dataclass(frozen=True, slots=True)
class Truncate16:
    r"""Keeps sign, exponent and the first 7 bits of the mantissa: half the bytes.

    .. math:: C(g)_i = \operatorname{sign}(g_i)\, 2^{e_i} \lfloor 2^7 m_i \rfloor / 2^7

    Biased towards zero, by less than one part in :math:`2^7`. Not linear: the sum of truncated numbers does not fit
    in 16 bits again. A NaN whose mantissa would be cut to zero keeps its quiet bit, so it stays a NaN.

    References: Li et al. 2018 (Pipe-SGD), "truncation"; the bit width is our reading.
    """

    unbiased: ClassVar[bool] = False
    stateless: ClassVar[bool] = True

    def init(self, spec: TensorSpec, seeds: Seeds) -> CodecState:
        """No state.

        Raises:
          Unsupported: the tensor is not float32.
        """
        del seeds
        if spec.dtype != torch.float32:
            raise Unsupported(f"codec truncate16 needs float32 gradients, not {spec.dtype}")
        return CodecState()

    def encode(self, state: CodecState, grad: Tensor, *, step: int, count: int) -> tuple[Payload, CodecState]:
        """An int16 tensor of as many elements."""
        del step, count
        words = grad.contiguous().view(torch.int32)
        high = (words >> 16).to(torch.int16)
        return Payload((torch.where(grad.isnan(), high | 0x40, high),)), state

    def decode(
        self, state: CodecState, payload: Payload, spec: TensorSpec, *, step: int, count: int
    ) -> Tensor:
        """Zeros in the low 16 bits."""
        del state, step, count
        (high,) = payload.tensors()
        return (high.to(torch.int32) << 16).view(torch.float32).reshape(spec.shape)

    def observe(self, state: CodecState, aggregate: Tensor, *, step: int) -> CodecState:
        """Learns nothing."""
        del aggregate, step
        return state

    def linear(self, state: CodecState) -> bool:
        """Never."""
        del state
        return False
