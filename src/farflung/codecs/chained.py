"""One codec on another's payload."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from farflung.codecs.base import accumulate, codec_option, summed_specs
from farflung.codecs.int8 import Int8
from farflung.codecs.topk import TopK
from farflung.errors import Unsupported
from farflung.seeding import derive
from farflung.trees import only_seeds, rebuilt
from farflung.types import Codec, CodecState, Payload, Seeds, TensorSpec

__all__ = ["Chain", "chain"]


@dataclass(frozen=True, slots=True)
class Chain:
    r"""The second codec encodes each floating tensor in the payload of the first, such as Top-k's values.

    .. math:: C(g) = D_1(D_2(E_2(E_1(g))))

    It is unbiased if both are, where the first decodes its floating tensors linearly, as all codecs here do.

    The payload is the first's, with an empty tensor in place of each floating one, then what the second made of
    these in order. An empty tensor of shape ``(0, *shape)`` says what decoding needs to know, and moves no byte.

    The second codec keeps nothing between steps but its seeds: what the tensors of one payload leave behind has no
    place in the next. For error feedback, wrap the whole chain.

    Args:
      first: makes the payload.
      second: encodes its floating tensors.

    Raises:
      ConfigError: not codecs.
    """

    first: Codec = field(default_factory=TopK)
    second: Codec = field(default_factory=Int8)

    def __post_init__(self) -> None:
        codec_option("chain", self.first)
        codec_option("chain", self.second)

    @property
    def unbiased(self) -> bool:
        return self.first.unbiased and self.second.unbiased

    @property
    def stateless(self) -> bool:
        return self.first.stateless and self.second.stateless

    @property
    def per_hop(self) -> bool:
        return self.first.per_hop and self.second.per_hop

    def init(self, spec: TensorSpec, seeds: Seeds) -> CodecState:
        """The first codec's, and seeds for the second.

        Raises:
          Unsupported: the second keeps more than seeds, or either cannot encode such a tensor.
        """
        if not only_seeds(self.second.init(TensorSpec((1,), spec.dtype), seeds)):
            raise Unsupported(
                f"chain: {self.second!r} keeps more than seeds between steps: put it around the chain"
            )
        inner = self.first.init(spec, seeds)
        if self.stateless:
            return CodecState()
        return CodecState(
            {"first": inner.shared, "seed": seeds.shared}, {"first": inner.local, "seed": seeds.own}
        )

    def encode(self, state: CodecState, grad: Tensor, *, step: int, count: int) -> tuple[Payload, CodecState]:
        """The first codec's payload without its floating tensors, and these encoded."""
        payload, inner = self.first.encode(self._inner(state), grad, step=step, count=count)
        encoded: list[Tensor | Payload] = []

        def without(tensor: Tensor) -> Tensor:
            if not tensor.is_floating_point():
                return tensor
            own = self._second(state, TensorSpec.of(tensor), len(encoded))
            encoded.append(self.second.encode(own, tensor, step=step, count=count)[0])
            return tensor.new_empty((0, *tensor.shape))

        tree = rebuilt(payload, without)
        return Payload((tree, *encoded)), self._with(state, inner)

    def decode(
        self, state: CodecState, payload: Payload, spec: TensorSpec, *, step: int, count: int
    ) -> Tensor:
        """Decodes the floating tensors, then the first's payload."""
        whole = self._of_first(state, payload, step=step, count=count)
        return self.first.decode(self._inner(state), whole, spec, step=step, count=count)

    def accumulate(
        self, state: CodecState, payload: Payload, total: Tensor, *, step: int, count: int, alpha: float = 1.0
    ) -> None:
        """As the first codec does, with the floating tensors decoded."""
        whole = self._of_first(state, payload, step=step, count=count)
        accumulate(self.first, self._inner(state), whole, total, step=step, count=count, alpha=alpha)

    def observe(self, state: CodecState, aggregate: Tensor, *, step: int) -> CodecState:
        """The first codec's."""
        return self._with(state, self.first.observe(self._inner(state), aggregate, step=step))

    def summed_specs(self, spec: TensorSpec) -> tuple[TensorSpec, ...]:
        """Those of what the second makes of each tensor of the first."""
        parts = [summed_specs(self.second, each) for each in summed_specs(self.first, spec)]
        return tuple(each for part in parts for each in part) if all(parts) else ()

    def linear(self, state: CodecState) -> bool:
        return self.first.linear(self._inner(state)) and self.second.linear(
            self._second(state, TensorSpec((1,)), 0)
        )

    def _of_first(self, state: CodecState, payload: Payload, *, step: int, count: int) -> Payload:
        """The first codec's payload with its floating tensors."""
        tree, *parts = payload.parts
        assert isinstance(tree, Payload)
        place = 0

        def back(tensor: Tensor) -> Tensor:
            nonlocal place
            if not tensor.is_floating_point():
                return tensor
            encoded, dense = parts[place], TensorSpec(tuple(tensor.shape[1:]), tensor.dtype)
            assert isinstance(encoded, Payload)
            own = self._second(state, dense, place)
            place += 1
            return self.second.decode(own, encoded, dense, step=step, count=count)

        return rebuilt(tree, back)

    def _inner(self, state: CodecState) -> CodecState:
        return state if self.stateless else CodecState(state.shared["first"], state.local["first"])

    def _with(self, state: CodecState, inner: CodecState) -> CodecState:
        if self.stateless:
            return state
        return CodecState({**state.shared, "first": inner.shared}, {**state.local, "first": inner.local})

    def _second(self, state: CodecState, spec: TensorSpec, place: int) -> CodecState:
        if self.second.stateless:
            return CodecState()
        shared, own = state.shared["seed"], state.local["seed"]
        return self.second.init(spec, Seeds(derive(shared, "chain", place), derive(own, "chain", place)))


def chain(first: Codec | None = None, *others: Codec) -> Codec:
    """:class:`Chain` of two codecs or more, each on the payload of those before it; Top-k, then 8 bits by default."""
    if first is None:
        return Chain()
    whole = first
    for other in others:
        whole = Chain(whole, other)
    return whole
