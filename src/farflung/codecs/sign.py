"""Sign compression: one bit for each number."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from typing_extensions import override

from farflung.codecs.base import BaseCodec
from farflung.codecs.bits import pack, unpack
from farflung.codecs.blocks import compute_bucket_norms
from farflung.codecs.stochastic import from_level_codes
from farflung.options import check_integer
from farflung.types import CodecState, Payload, TensorSpec

__all__ = ["Sign"]


@dataclass(frozen=True, slots=True)
class Sign(BaseCodec):
    r"""Codec that sends the sign of each number and the mean magnitude.

    .. math:: C(g) = \frac{\|g\|_1}{n} \operatorname{sign}(g)

    Biased: wrap it in :func:`error_feedback`. Contractive:
    :math:`\|C(g) - g\|_2^2 = (1 - \|g\|_1^2 / n \|g\|_2^2) \|g\|_2^2`. Not linear. Zero counts as positive, which
    does not change the error. An infinity makes its whole bucket infinite, a NaN makes it NaN.

    Args:
      bucket_size: Number of elements that share a mean magnitude; None for the whole tensor.

    Raises:
      ConfigError: The bucket size is below 1.

    References: Karimireddy et al. 2019, EF-signSGD, Alg. 1, with :math:`\|p\|_1 / d` for each tensor; here for each
    flat bucket, or each ``bucket_size`` elements of it.
    """

    bucket_size: int | None = None

    def __post_init__(self) -> None:
        if self.bucket_size is not None:
            check_integer("sign", "bucket_size", self.bucket_size, 1)

    @override
    def encode(self, state: CodecState, grad: Tensor, *, step: int, count: int) -> tuple[Payload, CodecState]:
        """Returns eight signs in a byte, and the mean magnitude of each bucket."""
        flat = grad.reshape(-1)
        size = self.bucket_size or max(flat.numel(), 1)
        means = compute_bucket_norms(flat, size, "mean")
        return Payload((pack((flat >= 0).view(torch.uint8), 1), means)), state

    @override
    def decode(
        self, state: CodecState, payload: Payload, spec: TensorSpec, *, step: int, count: int
    ) -> Tensor:
        packed, means = payload.iter_tensors()
        signs = unpack(packed, 1, spec.numel).mul_(2)
        size = self.bucket_size or max(spec.numel, 1)
        return from_level_codes(signs, means, 1, size, spec.dtype).view(spec.shape)
