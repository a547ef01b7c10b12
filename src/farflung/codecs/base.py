"""What codecs have alike: those that learn nothing, checks of options, payloads of few entries."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from typing_extensions import override

from farflung.errors import ConfigError, ProtocolError, Unsupported
from farflung.types import Codec, CodecState, Payload, TensorSpec

__all__ = [
    "Fixed",
    "Sparse",
    "Transformed",
    "accumulate",
    "add_dense",
    "add_entries",
    "codec_option",
    "density_option",
    "floating",
    "indexable",
    "make_codec",
    "summed_specs",
]


class Fixed:
    """A codec that learns nothing from what was aggregated."""

    __slots__ = ()

    def observe(self, state: CodecState, aggregate: Tensor, *, step: int) -> CodecState:
        del aggregate, step
        return state


def make_codec(name: str) -> Codec:
    """Returns a codec with its default options, imported when it is needed."""
    from farflung.codecs import CODECS

    return CODECS[name]()


def density_option(name: str, density: object) -> None:
    """A fraction kept.

    Raises:
      ConfigError: outside (0, 1].
    """
    if isinstance(density, bool) or not isinstance(density, int | float) or not 0 < density <= 1:
        raise ConfigError(f"{name}: density {density!r} must be above 0 and at most 1")


def codec_option(name: str, codec: object) -> None:
    """A codec inside another.

    Raises:
      ConfigError: something else.
    """
    if not hasattr(codec, "observe"):
        raise ConfigError(f"{name} is made of codecs, not of {codec!r}")


def floating(name: str, spec: TensorSpec) -> None:
    """A tensor that can be quantised.

    Raises:
      Unsupported: its numbers are not floating.
    """
    if not spec.dtype.is_floating_point:
        raise Unsupported(f"codec {name} needs floating gradients, not {spec.dtype}")


def indexable(name: str, spec: TensorSpec) -> None:
    """A tensor whose entries an int32 can name.

    Raises:
      Unsupported: it is larger, or not floating.
    """
    floating(name, spec)
    if spec.numel > torch.iinfo(torch.int32).max:
        raise Unsupported(f"codec {name} names entries by int32: {spec.numel} are too many for one bucket")


def summed_specs(codec: Codec, spec: TensorSpec) -> tuple[TensorSpec, ...]:
    """Returns the specs of the tensors that the payloads of a linear codec are summed as.

    A codec without a method ``summed_specs`` is not linear, or does not say: the result is empty.
    """
    method = getattr(codec, "summed_specs", None)
    return () if method is None else tuple(method(spec))


class Sparse(Fixed):
    """A codec whose payloads are added to a sum entry by entry, in a time that depends on the entries sent alone."""

    __slots__ = ()

    def accumulate(
        self, state: CodecState, payload: Payload, total: Tensor, *, step: int, count: int, alpha: float = 1.0
    ) -> None:
        """Adds ``alpha`` times the entries sent to ``total``, of the shape encoded, in place.

        Raises:
          ProtocolError: an index out of range, seen on a CPU.
        """
        raise NotImplementedError

    def decode(
        self, state: CodecState, payload: Payload, spec: TensorSpec, *, step: int, count: int
    ) -> Tensor:
        """Zeros where nothing was sent.

        Raises:
          ProtocolError: an index out of range, seen on a CPU.
        """
        total = torch.zeros(spec.shape, dtype=spec.dtype, device=next(iter(payload.tensors())).device)
        self.accumulate(state, payload, total, step=step, count=count)
        return total

    def or_dense(
        self, state: CodecState, payload: Payload, like: Tensor, *, step: int, count: int
    ) -> Payload:
        """Replaces a payload that is no smaller than the tensor it encodes by the flat tensor that it decodes to."""
        if payload.nbytes < like.nbytes:
            return payload
        dense = self.decode(state, payload, TensorSpec.of(like), step=step, count=count)
        return Payload((dense.view(-1),))


class Transformed(Sparse):
    """A codec that sends components of a linear transform, which are summed before one transform back."""

    __slots__ = ()

    def add_components(self, state: CodecState, payload: Payload, total: Tensor) -> None:
        """Adds the components sent to ``total``, of the shape encoded, in place.

        Raises:
          ProtocolError: an index out of range, seen on a CPU.
        """
        raise NotImplementedError

    def restored(self, state: CodecState, components: Tensor) -> Tensor:
        """What components, or sums of them, stand for."""
        raise NotImplementedError

    @override
    def accumulate(
        self, state: CodecState, payload: Payload, total: Tensor, *, step: int, count: int, alpha: float = 1.0
    ) -> None:
        del step, count
        components = torch.zeros_like(total)
        self.add_components(state, payload, components)
        total.add_(self.restored(state, components), alpha=alpha)


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
    entry_by_entry = getattr(codec, "accumulate", None)
    if entry_by_entry is not None:
        entry_by_entry(state, payload, total, step=step, count=count, alpha=alpha)
    else:
        total.add_(codec.decode(state, payload, TensorSpec.of(total), step=step, count=count), alpha=alpha)


def add_dense(total: Tensor, parts: Sequence[Tensor], alpha: float) -> bool:
    """Adds ``alpha`` times a payload of :meth:`Sparse.or_dense` to ``total`` if it is dense; whether it is."""
    if len(parts) > 1:
        return False
    total.add_(parts[0].view(total.shape), alpha=alpha)
    return True


def add_entries(total: Tensor, values: Tensor, indices: Tensor, alpha: float) -> None:
    """Adds ``alpha`` times ``values`` at ``indices`` of the flat form of ``total``.

    Raises:
      ProtocolError: an index out of range, seen on a CPU.
    """
    if indices.device.type == "cpu" and len(indices):
        low, high = map(int, indices.aminmax())
        if low < 0 or high >= total.numel():
            raise ProtocolError(
                f"entry {low if low < 0 else high} of {total.numel()}: do all ranks run the same model and recipe?"
            )
    total.view(-1).index_add_(0, indices, values.to(total.dtype), alpha=alpha)
