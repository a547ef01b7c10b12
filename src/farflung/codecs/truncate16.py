"""Truncation to the high 16 bits of a float32, Pipe-SGD's lighter compression."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from farflung.codecs.base import Fixed
from farflung.errors import Unsupported
from farflung.types import CodecState, Payload, Seeds, TensorSpec

__all__ = ["Truncate16"]


@dataclass(frozen=True, slots=True)
class Truncate16(Fixed):
    r"""Keeps sign, exponent and the first 7 bits of the mantissa: half the bytes.

    .. math:: C(g)_i = \operatorname{sign}(g_i)\, 2^{e_i} \lfloor 2^7 m_i \rfloor / 2^7

    Biased towards zero, by less than one part in :math:`2^7`. Not linear: the sum of truncated numbers does not fit
    in 16 bits again. Infinities stay; a NaN whose mantissa would be cut to zero keeps its quiet bit, so it stays a
    NaN.

    References: Li et al. 2018 (Pipe-SGD), "truncation"; the bit width is our reading.
    """

    unbiased: ClassVar[bool] = False
    stateless: ClassVar[bool] = True
    per_hop: ClassVar[bool] = True

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
        flat = grad.reshape(-1)
        # The second half of each word: farflung runs on little-endian machines, as its messages do.
        # A single one counts as contiguous whatever its stride, so `contiguous` would leave it two apart.
        high = flat.view(torch.int16).view(flat.numel(), 2)[:, 1].clone(memory_format=torch.contiguous_format)
        # Asking first whether there is a NaN is cheap on a CPU; elsewhere the answer would have to be waited for.
        if flat.device.type != "cpu" or (flat.numel() and bool(flat.amax().isnan())):
            high = torch.where(flat.isnan(), high | 0x40, high)
        return Payload((high,)), state

    def decode(
        self, state: CodecState, payload: Payload, spec: TensorSpec, *, step: int, count: int
    ) -> Tensor:
        """Zeros in the low 16 bits."""
        del state, step, count
        (high,) = payload.tensors()
        return high.view(torch.bfloat16).to(torch.float32).view(spec.shape)  # bfloat16 is just these bits

    def linear(self, state: CodecState) -> bool:
        del state
        return False
