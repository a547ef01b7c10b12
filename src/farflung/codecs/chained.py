"""Composition of codecs: each encodes the payload of the codec before it."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor
from typing_extensions import override

from farflung.codecs.base import (
    BaseCodec,
    accumulate,
    check_codecs,
    get_nested_state,
    list_summed_specs,
    with_nested_state,
)
from farflung.codecs.int8 import Int8
from farflung.codecs.topk import TopK
from farflung.errors import Unsupported
from farflung.seeding import derive_seed
from farflung.trees import has_only_seeds, map_tensors
from farflung.types import Codec, CodecState, Payload, Seeds, TensorSpec

__all__ = ["Chain", "chain"]


@dataclass(frozen=True, slots=True)
class Chain(BaseCodec):
    r"""Codec that encodes each floating tensor in the payload of a first codec with a second one.

    .. math:: C(g) = D_1(D_2(E_2(E_1(g))))

    It is unbiased if both codecs are and the first decodes its floating tensors linearly, as all codecs here do.

    The payload is that of the first codec, with an empty tensor in place of each floating one, followed by the
    payloads of the second codec in order. An empty tensor of shape ``(0, *shape)`` carries the shape without bytes.

    The second codec keeps no state but seeds, since the tensors of one payload do not correspond to those of the
    next. For error feedback, wrap the whole chain.

    Args:
      first: Codec of the gradient.
      second: Codec of the floating tensors in the first payload.

    Raises:
      ConfigError: An argument is not a codec.
    """

    first: Codec = field(default_factory=TopK)
    second: Codec = field(default_factory=Int8)

    def __post_init__(self) -> None:
        check_codecs("chain", self.first, self.second)

    @property
    @override
    def is_unbiased(self) -> bool:
        return self.first.is_unbiased and self.second.is_unbiased

    @property
    @override
    def is_stateless(self) -> bool:
        return self.first.is_stateless and self.second.is_stateless

    @property
    @override
    def can_requantize(self) -> bool:
        return self.first.can_requantize and self.second.can_requantize

    @override
    def init(self, spec: TensorSpec, seeds: Seeds) -> CodecState:
        """Returns the state of the first codec and seeds for the second.

        Raises:
          Unsupported: The second codec keeps more than seeds, or a codec cannot encode the tensor.
        """
        if not has_only_seeds(self.second.init(spec, seeds)):
            raise Unsupported(
                f"chain: {self.second!r} keeps more than seeds between steps: put it around the chain"
            )
        state = CodecState()
        if not self.second.is_stateless:
            state = CodecState({"seed": seeds.shared}, {"seed": seeds.local})
        return with_nested_state(state, "first", self.first.init(spec, seeds))

    @override
    def encode(self, state: CodecState, grad: Tensor, *, step: int, count: int) -> tuple[Payload, CodecState]:
        """Encodes with the first codec, then each floating tensor of its payload with a fresh state of the second."""
        payload, inner = self.first.encode(get_nested_state(state, "first"), grad, step=step, count=count)
        encoded: list[Tensor | Payload] = []

        def encode_floating(tensor: Tensor) -> Tensor:
            if not tensor.is_floating_point():
                return tensor
            second_state = self._build_second_state(state, TensorSpec.from_tensor(tensor), len(encoded))
            encoded.append(self.second.encode(second_state, tensor, step=step, count=count)[0])
            return tensor.new_empty((0, *tensor.shape))

        tree = map_tensors(payload, encode_floating)
        return Payload((tree, *encoded)), with_nested_state(state, "first", inner)

    @override
    def decode(
        self, state: CodecState, payload: Payload, spec: TensorSpec, *, step: int, count: int
    ) -> Tensor:
        inner_payload = self._decode_second(state, payload, step, count)
        return self.first.decode(
            get_nested_state(state, "first"), inner_payload, spec, step=step, count=count
        )

    def accumulate(
        self, state: CodecState, payload: Payload, total: Tensor, *, step: int, count: int, alpha: float = 1.0
    ) -> None:
        inner_payload = self._decode_second(state, payload, step, count)
        inner = get_nested_state(state, "first")
        accumulate(self.first, inner, inner_payload, total, step=step, count=count, alpha=alpha)

    @override
    def update_state(self, state: CodecState, aggregate: Tensor, *, step: int) -> CodecState:
        inner = self.first.update_state(get_nested_state(state, "first"), aggregate, step=step)
        return with_nested_state(state, "first", inner)

    def list_summed_specs(self, spec: TensorSpec) -> tuple[TensorSpec, ...]:
        """Returns the specs of the second codec for each tensor that the first one sums."""
        parts = [
            list_summed_specs(self.second, inner_spec) for inner_spec in list_summed_specs(self.first, spec)
        ]
        return tuple(summed for part in parts for summed in part) if all(parts) else ()

    @override
    def is_linear(self, state: CodecState) -> bool:
        second = self._build_second_state(state, TensorSpec((1,)), 0)
        return self.first.is_linear(get_nested_state(state, "first")) and self.second.is_linear(second)

    def _decode_second(self, state: CodecState, payload: Payload, step: int, count: int) -> Payload:
        """Returns the first codec's payload with its floating tensors decoded."""
        tree, *encoded = payload.parts
        assert isinstance(tree, Payload)
        indexed_payloads = enumerate(encoded)

        def decode_floating(tensor: Tensor) -> Tensor:
            if not tensor.is_floating_point():
                return tensor
            index, part = next(indexed_payloads)
            assert isinstance(part, Payload)
            spec = TensorSpec(tuple(tensor.shape[1:]), tensor.dtype)
            second_state = self._build_second_state(state, spec, index)
            return self.second.decode(second_state, part, spec, step=step, count=count)

        return map_tensors(tree, decode_floating)

    def _build_second_state(self, state: CodecState, spec: TensorSpec, index: int) -> CodecState:
        if self.second.is_stateless:
            return CodecState()
        shared, local = state.shared["seed"], state.local["seed"]
        return self.second.init(
            spec, Seeds(derive_seed(shared, "chain", index), derive_seed(local, "chain", index))
        )


def chain(first: Codec | None = None, *codecs: Codec) -> Codec:
    """Returns codecs chained in order, or a single one unchanged; by default Top-k followed by 8 bits."""
    if first is None:
        return Chain()
    codec = first
    for successor in codecs:
        codec = Chain(codec, successor)
    return codec
