"""Eight bits for each number, scaled by the largest nearby: Pipe-SGD's stronger compression."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import Tensor
from typing_extensions import override

from farflung.codecs.base import BaseCodec, check_floating
from farflung.codecs.blocks import bucket_norms
from farflung.codecs.stochastic import from_levels, generator_on, to_levels
from farflung.options import choice_option, whole_option
from farflung.types import CodecState, Payload, Seeds, TensorSpec

__all__ = ["Int8"]

LEVELS = 127


@dataclass(frozen=True, slots=True)
class Int8(BaseCodec):
    r"""Scales each bucket by its largest magnitude and rounds to 8 bits: a quarter of the bytes.

    .. math::
        s = \max_{i \in \text{bucket}} |g_i|, \quad
        q_i = \operatorname{round}(127\, g_i / s), \quad C(g)_i = q_i\, s / 127

    Rounding to the nearest is biased, and contractive: an error is at most half a step, and never more than the
    number itself. It keeps no state, so it may run on every hop of a collective, as in Pipe-SGD, each segment with
    scales of its own. Stochastic rounding is unbiased; its seed makes it a codec with state.

    A bucket that holds an infinity or a NaN decodes to nothing finite, since its scale says nothing about the other
    numbers; the infinity itself stays what it is.

    Args:
      rounding: ``"nearest"`` or ``"stochastic"``.
      bucket_size: numbers that share a scale. With 4,096 scales add a thousandth to the bytes.

    Raises:
      ConfigError: another rounding, or a bucket of no numbers.

    References: Li et al. 2018 (Pipe-SGD), scalar quantization; bit width, rounding and buckets are our reading. One
    scale for tensors of unlike size leaves nothing of the smaller ones. Bytes hold :math:`q_i + 127`, our choice.
    """

    rounding: Literal["nearest", "stochastic"] = "nearest"
    bucket_size: int = 4096

    def __post_init__(self) -> None:
        choice_option("int8", "rounding", self.rounding, ("nearest", "stochastic"))
        whole_option("int8", "bucket_size", self.bucket_size, 1)

    @property
    @override
    def unbiased(self) -> bool:
        return self.rounding == "stochastic"

    @property
    @override
    def stateless(self) -> bool:
        """With rounding to the nearest."""
        return self.rounding == "nearest"

    @property
    @override
    def per_hop(self) -> bool:
        """With rounding to the nearest."""
        return self.stateless

    @override
    def init(self, spec: TensorSpec, seeds: Seeds) -> CodecState:
        """A seed for stochastic rounding, else nothing.

        Raises:
          Unsupported: the tensor is not floating.
        """
        check_floating("int8", spec)
        return CodecState() if self.stateless else CodecState(local={"seed": seeds.own})

    @override
    def encode(self, state: CodecState, grad: Tensor, *, step: int, count: int) -> tuple[Payload, CodecState]:
        """A uint8 tensor of as many elements, and the scale of each bucket."""
        flat = grad.reshape(-1)
        noise = None if self.stateless else generator_on(flat.device, state.local["seed"], step, count)
        scales = bucket_norms(flat, self.bucket_size, "max")
        return Payload((to_levels(flat, scales, LEVELS, self.bucket_size, noise), scales)), state

    @override
    def decode(
        self, state: CodecState, payload: Payload, spec: TensorSpec, *, step: int, count: int
    ) -> Tensor:
        """Multiples of a 127th of each bucket's scale."""
        codes, scales = payload.tensors()
        return from_levels(codes, scales, LEVELS, self.bucket_size, spec.dtype).view(spec.shape)
