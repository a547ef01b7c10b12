"""Error feedback: the residual of an encoding is added to the next gradient."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
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
    get_nested_state,
    list_summed_specs,
    with_nested_state,
)
from farflung.codecs.chained import Chain
from farflung.codecs.routed import RoutedCodec
from farflung.codecs.topk import TopK
from farflung.errors import ConfigError
from farflung.options import check_fraction
from farflung.trees import has_shared_memory
from farflung.types import Codec, CodecState, Payload, Seeds, TensorSpec

__all__ = ["ErrorFeedback", "error_feedback", "has_residual"]


@dataclass(frozen=True, slots=True)
class ErrorFeedback(BaseCodec):
    r"""Codec that adds to each gradient the residual of the ones before.

    .. math:: p_t = g_t + \beta e_t, \quad \text{send } C(p_t), \quad e_{t+1} = p_t - C(p_t)

    With a ``decay`` :math:`\beta` of 1 everything is sent eventually: decoded tensors and residual sum to the
    gradients. Below 1 old residuals fade, as in a momentum. A codec that sends a step unchanged leaves no residual,
    by the same equations; for a step that bypasses the codec use :meth:`flush`.

    The residual is in units of the gradient, not of the update as in the paper, so a new learning rate does not
    rescale it. It stays on its replica. Non-finite entries are sent and cleared, so they do not return.

    Args:
      codec: Contractive codec, such as Top-k or sign.
      decay: :math:`\beta`, above 0 and at most 1.

    Raises:
      ConfigError: Not a codec, one whose errors would grow or that keeps what it does not send itself, also as a part,
        or a decay out of range.

    References: Karimireddy et al. 2019, EF-SGD, Alg. 2; Sarfi et al. 2025 (SparseLoCo) for the decay.
    """

    codec: Codec = field(default_factory=TopK)
    decay: float = 1.0

    is_stateless: ClassVar[bool] = False
    keeps_residual: ClassVar[bool] = True
    """True for a codec that adds what it has not sent to later gradients."""

    def __post_init__(self) -> None:
        check_codecs("error_feedback", self.codec)
        check_fraction("error_feedback", "decay", self.decay)
        for part in _iter_parts(self.codec):
            name = type(part).__name__
            if getattr(part, "keeps_residual", False):
                raise ConfigError(f"error_feedback around {name} keeps the same residual twice: use one")
            if getattr(part, "is_expansive", False):
                raise ConfigError(
                    f"error_feedback around {name} makes its errors grow with each step: use "
                    "randomk(unbiased=False), or qsgd(norm='max')"
                )

    @override
    def init(self, spec: TensorSpec, seeds: Seeds) -> CodecState:
        """Returns the state of the codec and a zero residual.

        Raises:
          Unsupported: The tensor is not floating.
        """
        check_floating("error_feedback", spec)
        return _build_state(torch.zeros(spec.shape, dtype=spec.dtype), self.codec.init(spec, seeds))

    @override
    def encode(self, state: CodecState, grad: Tensor, *, step: int, count: int) -> tuple[Payload, CodecState]:
        """Encodes the sum of gradient and residual."""
        residual = grad.add(state.local["residual"].to(grad.device), alpha=self.decay)
        payload, inner = self.codec.encode(get_nested_state(state, "codec"), residual, step=step, count=count)
        if any(has_shared_memory(tensor, residual) for tensor in payload.iter_tensors()):
            residual = residual.clone()
        accumulate(self.codec, inner, payload, residual, step=step, count=count, alpha=-1.0)
        return payload, _build_state(residual.nan_to_num_(0.0, 0.0, 0.0), inner)

    def flush(self, state: CodecState, grad: Tensor) -> tuple[Tensor, CodecState]:
        """Returns gradient plus residual, for a step sent unencoded, and a state with a zero residual."""
        residual = state.local["residual"]
        return grad.add(residual.to(grad.device), alpha=self.decay), with_residual(
            state, torch.zeros_like(residual, device=grad.device)
        )

    @override
    def decode(
        self, state: CodecState, payload: Payload, spec: TensorSpec, *, step: int, count: int
    ) -> Tensor:
        return self.codec.decode(get_nested_state(state, "codec"), payload, spec, step=step, count=count)

    def accumulate(
        self, state: CodecState, payload: Payload, total: Tensor, *, step: int, count: int, alpha: float = 1.0
    ) -> None:
        inner = get_nested_state(state, "codec")
        accumulate(self.codec, inner, payload, total, step=step, count=count, alpha=alpha)

    @override
    def update_state(self, state: CodecState, aggregate: Tensor, *, step: int) -> CodecState:
        inner = self.codec.update_state(get_nested_state(state, "codec"), aggregate, step=step)
        return with_nested_state(state, "codec", inner)

    def list_summed_specs(self, spec: TensorSpec) -> tuple[TensorSpec, ...]:
        return list_summed_specs(self.codec, spec)

    @override
    def is_linear(self, state: CodecState) -> bool:
        return self.codec.is_linear(get_nested_state(state, "codec"))


def has_residual(codec: Codec) -> bool:
    """Returns True if a codec or a part of it adds what it has not sent to later gradients."""
    return any(getattr(part, "keeps_residual", False) for part in _iter_parts(codec))


def _iter_parts(codec: Codec) -> Iterator[Codec]:
    """Yields a codec and those that it is composed of."""
    yield codec
    inner: Iterable[Codec] = codec.codecs.values() if isinstance(codec, RoutedCodec) else ()
    if isinstance(codec, Chain):
        inner = (codec.first, codec.second)
    for part in inner:
        yield from _iter_parts(part)


def _build_state(residual: Tensor, inner: CodecState) -> CodecState:
    return with_nested_state(CodecState({}, {"residual": residual}), "codec", inner)


def with_residual(state: CodecState, residual: Tensor) -> CodecState:
    """Returns ``state`` with a new residual."""
    return CodecState(state.shared, {**state.local, "residual": residual})


def error_feedback(codec: Codec | None = None, decay: float = 1.0) -> ErrorFeedback:
    """Returns :class:`ErrorFeedback` around a codec, by default Top-k."""
    return ErrorFeedback(TopK() if codec is None else codec, decay)
