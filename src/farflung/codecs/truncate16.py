"""Truncation to the high 16 bits of a float32, Pipe-SGD's lighter compression."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from typing_extensions import override

from farflung.codecs.base import BaseCodec
from farflung.types import CodecState, Payload, TensorSpec

__all__ = ["Truncate16"]


@dataclass(frozen=True, slots=True)
class Truncate16(BaseCodec):
    r"""Codec that keeps sign, exponent and the first 7 bits of the mantissa: half the bytes.

    .. math:: C(g)_i = \operatorname{sign}(g_i)\, 2^{e_i} \lfloor 2^7 m_i \rfloor / 2^7

    Biased towards zero, by less than one part in :math:`2^7`. Not linear, since a sum of truncated numbers does not
    fit in 16 bits. Infinities are preserved. A NaN whose mantissa would be cut to zero keeps its quiet bit.

    float16 and bfloat16 are sent unchanged. Numbers of 64 bits are first rounded to 32, so numbers beyond the range
    of float32 become infinite.

    References: Li et al. 2018 (Pipe-SGD), "truncation"; the bit width, and types other than float32, are our reading.
    """

    can_requantize: ClassVar[bool] = True

    @override
    def encode(self, state: CodecState, grad: Tensor, *, step: int, count: int) -> tuple[Payload, CodecState]:
        """Returns an int16 tensor with the same number of elements."""
        flat = grad.reshape(-1)
        if _is_narrow(flat.dtype):
            return Payload((flat.view(torch.int16).clone(memory_format=torch.contiguous_format),)), state
        flat = flat.float()
        # The second half of each word: farflung supports little-endian machines only, as do its messages.
        # A tensor of one element counts as contiguous whatever its stride, so `contiguous` would not copy it.
        high = flat.view(torch.int16).view(flat.numel(), 2)[:, 1].clone(memory_format=torch.contiguous_format)
        # Testing for a NaN first is cheap on a CPU; on other devices it would synchronize.
        if flat.device.type != "cpu" or (flat.numel() and bool(flat.amax().isnan())):
            high = torch.where(flat.isnan(), high | 0x40, high)
        return Payload((high,)), state

    @override
    def decode(
        self, state: CodecState, payload: Payload, spec: TensorSpec, *, step: int, count: int
    ) -> Tensor:
        (high,) = payload.iter_tensors()
        wire_dtype = spec.dtype if _is_narrow(spec.dtype) else torch.bfloat16  # has exactly these bits
        return high.view(wire_dtype).to(spec.dtype).view(spec.shape)


def _is_narrow(dtype: torch.dtype) -> bool:
    return dtype in (torch.float16, torch.bfloat16)
