"""Identity codec: the gradient is sent unchanged."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor
from typing_extensions import override

from farflung.codecs.base import BaseCodec
from farflung.types import CodecState, Payload, Seeds, TensorSpec

__all__ = ["Identity"]


@dataclass(frozen=True, slots=True)
class Identity(BaseCodec):
    """Codec that sends the dense tensor.

    .. math:: C(g) = g
    """

    is_unbiased: ClassVar[bool] = True
    can_requantize: ClassVar[bool] = True

    @override
    def init(self, spec: TensorSpec, seeds: Seeds) -> CodecState:
        return CodecState()

    @override
    def encode(self, state: CodecState, grad: Tensor, *, step: int, count: int) -> tuple[Payload, CodecState]:
        return Payload((grad,)), state

    @override
    def decode(
        self, state: CodecState, payload: Payload, spec: TensorSpec, *, step: int, count: int
    ) -> Tensor:
        (grad,) = payload.iter_tensors()
        return grad

    def list_summed_specs(self, spec: TensorSpec) -> tuple[TensorSpec, ...]:
        return (spec,)

    @override
    def is_linear(self, state: CodecState) -> bool:
        return True
