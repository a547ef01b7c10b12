"""What was not sent is added to what comes next."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor
from typing_extensions import override

from farflung.codecs.base import (
    BaseCodec,
    accumulate,
    check_codecs,
    check_floating,
    nested_state,
    summed_specs,
    with_nested_state,
)
from farflung.codecs.topk import TopK
from farflung.errors import ConfigError
from farflung.options import part_option
from farflung.trees import shares_memory
from farflung.types import Codec, CodecState, Payload, Seeds, TensorSpec

__all__ = ["ErrorFeedback", "error_feedback"]


@dataclass(frozen=True, slots=True)
class ErrorFeedback(BaseCodec):
    r"""Adds to each gradient what the codec left out of the ones before.

    .. math:: p_t = g_t + \beta e_t, \quad \text{send } C(p_t), \quad e_{t+1} = p_t - C(p_t)

    With a ``decay`` :math:`\beta` of 1 everything is sent in the end: the sum of what was decoded and the residual are
    the sum of the gradients. Below 1 what waits long is forgotten, as in a momentum. A codec that sends a step as it is
    leaves no residual behind, by the same equations; for a step that bypasses the codec there is :meth:`flush`.

    The residual is in units of the gradient, not of the update as in the paper, so a change of the learning rate
    makes no jump. It stays with its replica. What is not finite is sent and forgotten, so that it cannot come back.

    Args:
      codec: a contractive one, such as Top-k or sign.
      decay: :math:`\beta`, above 0 and at most 1.

    Raises:
      ConfigError: not a codec, or one whose errors would grow; a decay out of its range.

    References: Karimireddy et al. 2019, EF-SGD, Alg. 2; Sarfi et al. 2025 (SparseLoCo) for the decay.
    """

    codec: Codec = field(default_factory=TopK)
    decay: float = 1.0

    stateless: ClassVar[bool] = False

    def __post_init__(self) -> None:
        check_codecs("error_feedback", self.codec)
        if isinstance(self.codec, ErrorFeedback):
            raise ConfigError("error_feedback around error_feedback keeps the same residual twice: use one")
        part_option("error_feedback", "decay", self.decay)
        if getattr(self.codec, "expands", False):
            raise ConfigError(
                "error_feedback around randomk makes its errors grow by n/k: use randomk(unbiased=False)"
            )

    @override
    def init(self, spec: TensorSpec, seeds: Seeds) -> CodecState:
        """Returns the codec's state, and a residual of zero.

        Raises:
          Unsupported: the tensor is not floating.
        """
        check_floating("error_feedback", spec)
        return _state_of(torch.zeros(spec.shape, dtype=spec.dtype), self.codec.init(spec, seeds))

    @override
    def encode(self, state: CodecState, grad: Tensor, *, step: int, count: int) -> tuple[Payload, CodecState]:
        """Encodes the sum of gradient and residual."""
        residual = grad.add(state.local["residual"].to(grad.device), alpha=self.decay)
        payload, inner = self.codec.encode(nested_state(state, "codec"), residual, step=step, count=count)
        if any(shares_memory(tensor, residual) for tensor in payload.tensors()):
            residual = residual.clone()
        accumulate(self.codec, inner, payload, residual, step=step, count=count, alpha=-1.0)
        return payload, _state_of(residual.nan_to_num_(0.0, 0.0, 0.0), inner)

    def flush(self, state: CodecState, grad: Tensor) -> tuple[Tensor, CodecState]:
        """Returns gradient and residual, for a step that is sent as it is, and a state that keeps nothing of them."""
        residual = state.local["residual"]
        return grad.add(residual.to(grad.device), alpha=self.decay), with_residual(
            state, torch.zeros_like(residual, device=grad.device)
        )

    @override
    def decode(
        self, state: CodecState, payload: Payload, spec: TensorSpec, *, step: int, count: int
    ) -> Tensor:
        return self.codec.decode(nested_state(state, "codec"), payload, spec, step=step, count=count)

    def accumulate(
        self, state: CodecState, payload: Payload, total: Tensor, *, step: int, count: int, alpha: float = 1.0
    ) -> None:
        """Adds what the codec decodes."""
        inner = nested_state(state, "codec")
        accumulate(self.codec, inner, payload, total, step=step, count=count, alpha=alpha)

    @override
    def observe(self, state: CodecState, aggregate: Tensor, *, step: int) -> CodecState:
        inner = self.codec.observe(nested_state(state, "codec"), aggregate, step=step)
        return with_nested_state(state, "codec", inner)

    def summed_specs(self, spec: TensorSpec) -> tuple[TensorSpec, ...]:
        """Returns those of the codec inside."""
        return summed_specs(self.codec, spec)

    @override
    def linear(self, state: CodecState) -> bool:
        return self.codec.linear(nested_state(state, "codec"))


def _state_of(residual: Tensor, inner: CodecState) -> CodecState:
    return with_nested_state(CodecState({}, {"residual": residual}), "codec", inner)


def with_residual(state: CodecState, residual: Tensor) -> CodecState:
    """Returns the state with another residual."""
    return CodecState(state.shared, {**state.local, "residual": residual})


def error_feedback(codec: Codec | None = None, decay: float = 1.0) -> ErrorFeedback:
    """:class:`ErrorFeedback` around a codec; around Top-k where none is given."""
    return ErrorFeedback(TopK() if codec is None else codec, decay)
