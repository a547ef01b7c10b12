"""What codecs have in common: defaults, checks of options, payloads of few entries."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from typing_extensions import override

from farflung.errors import ConfigError, ProtocolError, Unsupported
from farflung.types import Codec, CodecState, Payload, Seeds, TensorSpec

__all__ = [
    "BaseCodec",
    "Sparse",
    "Transformed",
    "accumulate",
    "check_codecs",
    "check_floating",
    "nested_state",
    "summed_specs",
    "with_nested_state",
]


class BaseCodec:
    """A biased codec of floating tensors that keeps nothing between steps; a member overrides what differs."""

    __slots__ = ()

    @property
    def unbiased(self) -> bool:
        return False

    @property
    def stateless(self) -> bool:
        return True

    @property
    def per_hop(self) -> bool:
        return False

    def init(self, spec: TensorSpec, seeds: Seeds) -> CodecState:
        """Returns an empty state.

        Raises:
          Unsupported: the tensor is not floating.
        """
        check_floating(type(self).__name__, spec)
        return CodecState()

    def encode(self, state: CodecState, grad: Tensor, *, step: int, count: int) -> tuple[Payload, CodecState]:
        raise NotImplementedError

    def decode(
        self, state: CodecState, payload: Payload, spec: TensorSpec, *, step: int, count: int
    ) -> Tensor:
        raise NotImplementedError

    def observe(self, state: CodecState, aggregate: Tensor, *, step: int) -> CodecState:
        return state

    def linear(self, state: CodecState) -> bool:
        return False


def check_codecs(name: str, *codecs: object) -> None:
    """Checks the codecs inside another.

    Raises:
      ConfigError: something else.
    """
    for codec in codecs:
        if not hasattr(codec, "observe"):
            raise ConfigError(f"{name} is made of codecs, not of {codec!r}")


def check_floating(name: str, spec: TensorSpec) -> None:
    """Checks that a tensor can be quantized.

    Raises:
      Unsupported: its numbers are not floating.
    """
    if not spec.dtype.is_floating_point:
        raise Unsupported(f"codec {name} needs floating gradients, not {spec.dtype}")


def nested_state(state: CodecState, name: str) -> CodecState:
    """Returns the state that another one holds by a name; an empty one where it holds none."""
    return CodecState(state.shared.get(name, {}), state.local.get(name, {}))


def with_nested_state(state: CodecState, name: str, inner: CodecState) -> CodecState:
    """Returns a state that holds another one by a name, unless that is empty."""
    if not inner.shared and not inner.local:
        return state
    return CodecState({**state.shared, name: inner.shared}, {**state.local, name: inner.local})


def summed_specs(codec: Codec, spec: TensorSpec) -> tuple[TensorSpec, ...]:
    """Returns the specs of the tensors that the payloads of a linear codec are summed as.

    A codec without a method ``summed_specs`` is not linear, or does not say: the result is empty.
    """
    method = getattr(codec, "summed_specs", None)
    return () if method is None else tuple(method(spec))


class Sparse(BaseCodec):
    """A codec whose payloads are added to a sum entry by entry, in a time that depends on the entries sent alone.

    A payload has values and their int32 indices, or the flat tensor alone.
    """

    __slots__ = ()

    @override
    def init(self, spec: TensorSpec, seeds: Seeds) -> CodecState:
        """Returns an empty state.

        Raises:
          Unsupported: the tensor is not floating, or has more entries than an int32 can name.
        """
        check_floating(type(self).__name__, spec)
        if spec.numel > torch.iinfo(torch.int32).max:
            raise Unsupported(
                f"codec {type(self).__name__} names entries by int32: {spec.numel} are too many for one bucket"
            )
        return CodecState()

    def add_entries(self, state: CodecState, sent: Sequence[Tensor], total: Tensor, alpha: float) -> None:
        """Adds ``alpha`` times the entries of a payload that is not dense to ``total``, in place.

        Raises:
          ProtocolError: an index out of range, seen on a CPU.
        """
        values, indices = sent
        if indices.device.type == "cpu" and len(indices):
            lowest, highest = map(int, indices.aminmax())
            if lowest < 0 or highest >= total.numel():
                entry = lowest if lowest < 0 else highest
                raise ProtocolError(
                    f"entry {entry} of {total.numel()}: do all ranks run the same model and recipe?"
                )
        total.view(-1).index_add_(0, indices, values.to(total.dtype), alpha=alpha)

    def add_sent(self, state: CodecState, payload: Payload, total: Tensor, alpha: float = 1.0) -> None:
        """Adds ``alpha`` times what is sent to ``total``, of the shape encoded, in place.

        Raises:
          ProtocolError: an index out of range, seen on a CPU.
        """
        tensors = tuple(payload.tensors())
        if len(tensors) > 1:
            self.add_entries(state, tensors, total, alpha)
        else:
            total.add_(tensors[0].view(total.shape), alpha=alpha)

    def accumulate(
        self, state: CodecState, payload: Payload, total: Tensor, *, step: int, count: int, alpha: float = 1.0
    ) -> None:
        """Adds ``alpha`` times what a payload decodes to; see :func:`accumulate`."""
        self.add_sent(state, payload, total, alpha)

    @override
    def decode(
        self, state: CodecState, payload: Payload, spec: TensorSpec, *, step: int, count: int
    ) -> Tensor:
        """Returns a tensor with zeros where nothing was sent.

        Raises:
          ProtocolError: an index out of range, seen on a CPU.
        """
        total = torch.zeros(spec.shape, dtype=spec.dtype, device=next(iter(payload.tensors())).device)
        self.accumulate(state, payload, total, step=step, count=count)
        return total

    def replace_large(self, state: CodecState, payload: Payload, like: Tensor) -> Payload:
        """Replaces a payload that is no smaller than the flat tensor it encodes by a dense one."""
        if payload.nbytes < like.nbytes:
            return payload
        dense = torch.zeros_like(like)
        self.add_sent(state, payload, dense)
        return Payload((dense,))


class Transformed(Sparse):
    """A codec that sends components of a linear transform, which are summed before one transform back."""

    __slots__ = ()

    def restore(self, state: CodecState, components: Tensor) -> Tensor:
        """Returns the tensor that components, or sums of them, stand for."""
        raise NotImplementedError

    @override
    def accumulate(
        self, state: CodecState, payload: Payload, total: Tensor, *, step: int, count: int, alpha: float = 1.0
    ) -> None:
        components = torch.zeros_like(total)
        self.add_sent(state, payload, components)
        total.add_(self.restore(state, components), alpha=alpha)


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
    """Adds ``alpha`` times what a payload decodes to, in place.

    Args:
      codec: any; one with a method ``accumulate``, as :class:`Sparse` has, does it without a dense tensor between.
      state: of the codec.
      payload: what it encoded.
      total: of the shape encoded.
      step: for the codec.
      count: for the codec.
      alpha: a factor.

    Raises:
      ProtocolError: an index out of range, seen on a CPU.
    """
    accumulate_sparse = getattr(codec, "accumulate", None)
    if accumulate_sparse is not None:
        accumulate_sparse(state, payload, total, step=step, count=count, alpha=alpha)
    else:
        total.add_(codec.decode(state, payload, TensorSpec.of(total), step=step, count=count), alpha=alpha)
