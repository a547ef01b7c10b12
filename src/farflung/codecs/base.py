"""Shared parts of codecs: defaults, checks of options, and sparse payloads."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from typing_extensions import override

from farflung.errors import ConfigError, ProtocolError, Unsupported
from farflung.types import Codec, CodecState, Payload, Seeds, TensorSpec

__all__ = [
    "BaseCodec",
    "SparseCodec",
    "TransformCodec",
    "accumulate",
    "check_codecs",
    "check_floating",
    "get_nested_state",
    "list_summed_specs",
    "with_nested_state",
]


class BaseCodec:
    """Biased codec of floating tensors without state; subclasses override what differs."""

    __slots__ = ()

    @property
    def is_unbiased(self) -> bool:
        return False

    @property
    def is_stateless(self) -> bool:
        return True

    @property
    def can_requantize(self) -> bool:
        return False

    def init(self, spec: TensorSpec, seeds: Seeds) -> CodecState:
        """Checks that the tensor is floating, and returns an empty state.

        Raises:
          Unsupported: The tensor is not floating.
        """
        check_floating(type(self).__name__, spec)
        return CodecState()

    def encode(self, state: CodecState, grad: Tensor, *, step: int, count: int) -> tuple[Payload, CodecState]:
        raise NotImplementedError

    def decode(
        self, state: CodecState, payload: Payload, spec: TensorSpec, *, step: int, count: int
    ) -> Tensor:
        raise NotImplementedError

    def update_state(self, state: CodecState, aggregate: Tensor, *, step: int) -> CodecState:
        return state

    def is_linear(self, state: CodecState) -> bool:
        return False


def check_codecs(name: str, *codecs: object) -> None:
    """Checks that the parts of a composed codec are codecs.

    Raises:
      ConfigError: A part is not a codec.
    """
    for codec in codecs:
        if not hasattr(codec, "update_state"):
            raise ConfigError(f"{name} is made of codecs, not of {codec!r}")


def check_floating(name: str, spec: TensorSpec) -> None:
    """Checks that the numbers of a tensor are floating.

    Raises:
      Unsupported: The dtype is not floating.
    """
    if not spec.dtype.is_floating_point:
        raise Unsupported(f"codec {name} needs floating gradients, not {spec.dtype}")


def get_nested_state(state: CodecState, name: str) -> CodecState:
    """Returns the state that ``state`` holds under ``name``; empty if there is none."""
    return CodecState(state.shared.get(name, {}), state.local.get(name, {}))


def with_nested_state(state: CodecState, name: str, inner: CodecState) -> CodecState:
    """Returns ``state`` with ``inner`` under ``name``, or unchanged if ``inner`` is empty."""
    if not inner.shared and not inner.local:
        return state
    return CodecState({**state.shared, name: inner.shared}, {**state.local, name: inner.local})


def list_summed_specs(codec: Codec, spec: TensorSpec) -> tuple[TensorSpec, ...]:
    """Returns the specs of the tensors that payloads of a linear codec are summed as.

    The result is empty if the codec has no method ``list_summed_specs``.
    """
    method = getattr(codec, "list_summed_specs", None)
    return () if method is None else tuple(method(spec))


class SparseCodec(BaseCodec):
    """Codec whose payloads are added to a sum entry by entry, in time proportional to the entries sent.

    A payload has values and their int32 indices, or only the flat dense tensor.
    """

    __slots__ = ()

    @override
    def init(self, spec: TensorSpec, seeds: Seeds) -> CodecState:
        """Checks that the tensor is floating and fits int32 indices, and returns an empty state.

        Raises:
          Unsupported: The tensor is not floating, or has more entries than int32 indices allow.
        """
        check_floating(type(self).__name__, spec)
        if spec.numel > torch.iinfo(torch.int32).max:
            raise Unsupported(
                f"codec {type(self).__name__} names entries by int32: {spec.numel} are too many for one bucket"
            )
        return CodecState()

    def add_entries(self, state: CodecState, tensors: Sequence[Tensor], total: Tensor, alpha: float) -> None:
        """Adds ``alpha`` times the entries of a sparse payload to ``total``, in place.

        Raises:
          ProtocolError: An index is out of range; checked on a CPU only.
        """
        values, indices = tensors
        if indices.device.type == "cpu" and len(indices):
            lowest, highest = map(int, indices.aminmax())
            if lowest < 0 or highest >= total.numel():
                entry = lowest if lowest < 0 else highest
                raise ProtocolError(
                    f"entry {entry} of {total.numel()}: do all ranks run the same model and recipe?"
                )
        total.view(-1).index_add_(0, indices, values.to(total.dtype), alpha=alpha)

    def add_payload(self, state: CodecState, payload: Payload, total: Tensor, alpha: float = 1.0) -> None:
        """Adds ``alpha`` times a payload to ``total``, which has the shape of the encoded tensor, in place.

        Raises:
          ProtocolError: An index is out of range; checked on a CPU only.
        """
        tensors = tuple(payload.iter_tensors())
        if len(tensors) > 1:
            self.add_entries(state, tensors, total, alpha)
        else:
            total.add_(tensors[0].view(total.shape), alpha=alpha)

    def accumulate(
        self, state: CodecState, payload: Payload, total: Tensor, *, step: int, count: int, alpha: float = 1.0
    ) -> None:
        """Adds ``alpha`` times the decoded payload to ``total``; see :func:`accumulate`."""
        self.add_payload(state, payload, total, alpha)

    @override
    def decode(
        self, state: CodecState, payload: Payload, spec: TensorSpec, *, step: int, count: int
    ) -> Tensor:
        """Returns the decoded tensor, with zeros for entries that were not sent.

        Raises:
          ProtocolError: An index is out of range; checked on a CPU only.
        """
        total = torch.zeros(spec.shape, dtype=spec.dtype, device=next(iter(payload.iter_tensors())).device)
        self.accumulate(state, payload, total, step=step, count=count)
        return total

    def densify_large(self, state: CodecState, payload: Payload, flat: Tensor) -> Payload:
        """Returns a dense payload if the sparse one is no smaller than the flat tensor that it encodes."""
        if payload.nbytes < flat.nbytes:
            return payload
        dense = torch.zeros_like(flat)
        self.add_payload(state, payload, dense)
        return Payload((dense,))


class TransformCodec(SparseCodec):
    """Sparse codec that sends components of a linear transform; decoding and :meth:`accumulate` transform them back."""

    __slots__ = ()

    def invert(self, state: CodecState, components: Tensor) -> Tensor:
        """Returns the tensor that components, or sums of them, represent."""
        raise NotImplementedError

    @override
    def accumulate(
        self, state: CodecState, payload: Payload, total: Tensor, *, step: int, count: int, alpha: float = 1.0
    ) -> None:
        components = torch.zeros_like(total)
        self.add_payload(state, payload, components)
        total.add_(self.invert(state, components), alpha=alpha)


def accumulate(
    codec: Codec,
    state: CodecState,
    payload: Payload,
    total: Tensor,
    *,
    step: int,
    count: int,
    alpha: float = 1.0,
) -> None:
    """Adds ``alpha`` times the decoded payload to ``total``, in place.

    Args:
      codec: Any codec. A codec with a method ``accumulate``, such as :class:`SparseCodec`, needs no dense copy.
      state: State of the codec.
      payload: Payload that the codec has encoded.
      total: Sum, with the shape of the encoded tensor.
      step: Step passed to the codec.
      count: Number of summed replicas, passed to the codec.
      alpha: Factor of the payload.

    Raises:
      ProtocolError: An index is out of range; checked on a CPU only.
    """
    accumulate_sparse = getattr(codec, "accumulate", None)
    if accumulate_sparse is not None:
        accumulate_sparse(state, payload, total, step=step, count=count, alpha=alpha)
    else:
        total.add_(
            codec.decode(state, payload, TensorSpec.from_tensor(total), step=step, count=count), alpha=alpha
        )
