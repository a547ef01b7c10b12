"""The codec that changes nothing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from farflung.codecs.base import Fixed
from farflung.types import CodecState, Payload, Seeds, TensorSpec

__all__ = ["Identity"]


@dataclass(frozen=True, slots=True)
class Identity(Fixed):
    """Sends the dense tensor.

    .. math:: C(g) = g
    """

    unbiased: ClassVar[bool] = True
    stateless: ClassVar[bool] = True
    per_hop: ClassVar[bool] = True

    def init(self, spec: TensorSpec, seeds: Seeds) -> CodecState:
        del spec, seeds
        return CodecState()

    def encode(self, state: CodecState, grad: Tensor, *, step: int, count: int) -> tuple[Payload, CodecState]:
        del step, count
        return Payload((grad,)), state

    def decode(
        self, state: CodecState, payload: Payload, spec: TensorSpec, *, step: int, count: int
    ) -> Tensor:
        del state, spec, step, count
        (grad,) = payload.tensors()
        return grad

    def summed_specs(self, spec: TensorSpec) -> tuple[TensorSpec, ...]:
        """The tensor's own."""
        return (spec,)

    def linear(self, state: CodecState) -> bool:
        del state
        return True
