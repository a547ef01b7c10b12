"""8-bit quantization with one scale for each bucket: Pipe-SGD's stronger compression."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import Tensor
from typing_extensions import override

from farflung.codecs.base import BaseCodec, check_floating
from farflung.codecs.blocks import compute_bucket_norms
from farflung.codecs.stochastic import create_device_generator, from_level_codes, to_level_codes
from farflung.options import check_choice, check_integer
from farflung.types import CodecState, Payload, Seeds, TensorSpec

__all__ = ["Int8"]

LEVELS = 127


@dataclass(frozen=True, slots=True)
class Int8(BaseCodec):
    r"""Codec that scales each bucket by its largest magnitude and rounds to 8 bits: a quarter of the bytes.

    .. math::
        s = \max_{i \in \text{bucket}} |g_i|, \quad
        q_i = \operatorname{round}(127\, g_i / s), \quad C(g)_i = q_i\, s / 127

    Rounding to the nearest is biased and contractive: an error is at most half a step, and at most the number
    itself. It keeps no state, so it can run on every hop of a collective, as in Pipe-SGD, with scales for each
    segment. Stochastic rounding is unbiased; its seed is a state.

    A bucket with an infinity or a NaN decodes to non-finite numbers, since its scale does not describe the others.
    The infinity itself is preserved.

    Args:
      rounding: ``"nearest"`` or ``"stochastic"``.
      bucket_size: Number of elements that share a scale; with 4,096, scales add a thousandth to the bytes.

    Raises:
      ConfigError: The rounding is unknown, or the bucket size is below 1.

    References: Li et al. 2018 (Pipe-SGD), scalar quantization; bit width, rounding and buckets are our reading. One
    scale for tensors of different magnitude loses the smaller ones. Bytes hold :math:`q_i + 127`, our choice.
    """

    rounding: Literal["nearest", "stochastic"] = "nearest"
    bucket_size: int = 4096

    def __post_init__(self) -> None:
        check_choice("int8", "rounding", self.rounding, ("nearest", "stochastic"))
        check_integer("int8", "bucket_size", self.bucket_size, 1)

    @property
    @override
    def is_unbiased(self) -> bool:
        return self.rounding == "stochastic"

    @property
    @override
    def is_stateless(self) -> bool:
        """Returns True for rounding to the nearest."""
        return self.rounding == "nearest"

    @property
    @override
    def can_requantize(self) -> bool:
        return self.is_stateless

    @override
    def init(self, spec: TensorSpec, seeds: Seeds) -> CodecState:
        """Returns a state with a seed for stochastic rounding, else an empty one.

        Raises:
          Unsupported: The tensor is not floating.
        """
        check_floating("int8", spec)
        return CodecState() if self.is_stateless else CodecState(local={"seed": seeds.local})

    @override
    def encode(self, state: CodecState, grad: Tensor, *, step: int, count: int) -> tuple[Payload, CodecState]:
        """Returns a uint8 tensor with the same number of elements, and the scale of each bucket."""
        flat = grad.reshape(-1)
        noise = (
            None
            if self.is_stateless
            else create_device_generator(flat.device, state.local["seed"], step, count)
        )
        scales = compute_bucket_norms(flat, self.bucket_size, "max")
        return Payload((to_level_codes(flat, scales, LEVELS, self.bucket_size, noise), scales)), state

    @override
    def decode(
        self, state: CodecState, payload: Payload, spec: TensorSpec, *, step: int, count: int
    ) -> Tensor:
        codes, scales = payload.iter_tensors()
        return from_level_codes(codes, scales, LEVELS, self.bucket_size, spec.dtype).view(spec.shape)
