"""Codecs that encode the parts of a bucket with different codecs: by size, or by the role of weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor
from typing_extensions import override

from farflung.codecs.base import (
    BaseCodec,
    check_codecs,
    get_nested_state,
    list_summed_specs,
    with_nested_state,
)
from farflung.codecs.identity import Identity
from farflung.codecs.int8 import Int8
from farflung.options import check_integer
from farflung.seeding import derive_seed
from farflung.types import Codec, CodecState, ParameterSpan, Payload, Seeds, TensorSpec

__all__ = [
    "ByRole",
    "BySize",
    "CodecRoute",
    "RoutedCodec",
    "by_role",
    "by_size",
    "gather_runs",
    "scatter_runs",
]


class CodecRoute(NamedTuple):
    """Part of a bucket that one codec encodes."""

    name: str
    codec: Codec
    state: CodecState
    runs: Sequence[Sequence[int]]
    """First element and length of each run of elements of this route."""


class RoutedCodec(BaseCodec):
    """Base of :class:`BySize` and :class:`ByRole`: codecs by name, and a state with the codec of each part.

    A codec reducer reduces each route separately, so dense routes are summed by the collective while others are
    gathered. Inside another codec the payload holds one payload for each route. The state records the elements of
    each route; a segment of a collective does not know its position in the bucket.
    """

    __slots__ = ()

    is_stateless: ClassVar[bool] = False

    @property
    def codecs(self) -> Mapping[str, Codec]:
        """Codecs of all possible routes, by name."""
        raise NotImplementedError

    def split_spec(self, spec: TensorSpec) -> Mapping[str, tuple[TensorSpec, list[list[int]]]]:
        """Returns by route in use the spec of its flat tensor, and its runs of elements as ``[start, numel]``."""
        raise NotImplementedError

    @property
    @override
    def is_unbiased(self) -> bool:
        return all(codec.is_unbiased for codec in self.codecs.values())

    @override
    def init(self, spec: TensorSpec, seeds: Seeds) -> CodecState:
        """Returns the runs of elements of each route, and the state of its codec."""
        parts = self.split_spec(spec)
        state = CodecState({"runs": {name: runs for name, (_, runs) in parts.items()}})
        route_seeds = {
            name: Seeds(derive_seed(seeds.shared, name), derive_seed(seeds.local, name)) for name in parts
        }
        states = {name: self.codecs[name].init(part, route_seeds[name]) for name, (part, _) in parts.items()}
        return self.with_states(state, states)

    @override
    def encode(self, state: CodecState, grad: Tensor, *, step: int, count: int) -> tuple[Payload, CodecState]:
        """Encodes each route separately."""
        payloads, states = [], {}
        for route in self.list_routes(state):
            part = gather_runs(grad.reshape(-1), route.runs)
            payload, states[route.name] = route.codec.encode(route.state, part, step=step, count=count)
            payloads.append(payload)
        return Payload(tuple(payloads)), self.with_states(state, states)

    @override
    def decode(
        self, state: CodecState, payload: Payload, spec: TensorSpec, *, step: int, count: int
    ) -> Tensor:
        """Decodes each route into its place."""
        flat = torch.empty(spec.numel, dtype=spec.dtype, device=next(payload.iter_tensors()).device)
        for route, part in zip(self.list_routes(state), payload.parts, strict=True):
            assert isinstance(part, Payload)
            dense = TensorSpec((sum(length for _, length in route.runs),), spec.dtype)
            decoded = route.codec.decode(route.state, part, dense, step=step, count=count)
            if dense.numel == spec.numel:
                return decoded.view(spec.shape)
            scatter_runs(flat, route.runs, decoded)
        return flat.view(spec.shape)

    @override
    def update_state(self, state: CodecState, aggregate: Tensor, *, step: int) -> CodecState:
        flat = aggregate.reshape(-1)
        states = {
            route.name: route.codec.update_state(route.state, gather_runs(flat, route.runs), step=step)
            for route in self.list_routes(state)
        }
        return self.with_states(state, states)

    def list_summed_specs(self, spec: TensorSpec) -> tuple[TensorSpec, ...]:
        """Returns the specs of all routes if every codec has some."""
        parts = [
            list_summed_specs(self.codecs[name], part) for name, (part, _) in self.split_spec(spec).items()
        ]
        return tuple(summed for part in parts for summed in part) if all(parts) else ()

    @override
    def is_linear(self, state: CodecState) -> bool:
        return all(route.codec.is_linear(route.state) for route in self.list_routes(state))

    def list_routes(self, state: CodecState) -> list[CodecRoute]:
        """Lists the routes in use, in the order of their payloads."""
        return [
            CodecRoute(name, self.codecs[name], get_nested_state(state, name), runs)
            for name, runs in sorted(state.shared["runs"].items())
        ]

    def with_states(self, state: CodecState, states: Mapping[str, CodecState]) -> CodecState:
        """Returns ``state`` with new states of its codecs."""
        for name, inner in states.items():
            state = with_nested_state(state, name, inner)
        return state


def gather_runs(flat: Tensor, runs: Sequence[Sequence[int]]) -> Tensor:
    """Returns the elements of the runs of a flat tensor; a view if there is one run."""
    pieces = [flat[start : start + length] for start, length in runs]
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces)


def scatter_runs(flat: Tensor, runs: Sequence[Sequence[int]], part: Tensor) -> None:
    """Writes elements back to their runs ``[start, numel]`` of ``flat``, unless ``part`` is a view of it."""
    if len(runs) == 1 and part.data_ptr() == flat[runs[0][0] :].data_ptr():
        return
    begin = 0
    for start, length in runs:
        flat[start : start + length] = part[begin : begin + length]
        begin += length


@dataclass(frozen=True, slots=True)
class BySize(RoutedCodec):
    """Codec that encodes a tensor of at least ``numel`` elements with one codec and a smaller one with another.

    Rounding a small tensor costs more accuracy than it saves bytes: Alistarh et al. 2017 leave tensors below 10,000
    elements unchanged.

    Args:
      small: Codec of tensors with fewer than ``numel`` elements.
      large: Codec of all others.
      numel: Smallest number of elements of a large tensor.

    Raises:
      ConfigError: An argument is not a codec, or the number is negative.
    """

    small: Codec = field(default_factory=Identity)
    large: Codec = field(default_factory=Int8)
    numel: int = 10_000

    def __post_init__(self) -> None:
        check_codecs("by_size", self.small, self.large)
        check_integer("by_size", "numel", self.numel, 0)

    @property
    @override
    def codecs(self) -> Mapping[str, Codec]:
        return {"small": self.small, "large": self.large}

    @override
    def split_spec(self, spec: TensorSpec) -> Mapping[str, tuple[TensorSpec, list[list[int]]]]:
        size = "large" if spec.numel >= self.numel else "small"
        return {size: (spec, [[0, spec.numel]])}


def by_size(small: Codec | None = None, large: Codec | None = None, numel: int = 10_000) -> BySize:
    """Returns a :class:`BySize`; by default small tensors are dense and large ones have 8 bits."""
    return BySize(Identity() if small is None else small, Int8() if large is None else large, numel)


@dataclass(frozen=True, slots=True)
class ByRole(RoutedCodec):
    """Codec that encodes convolution weights with one codec and matrices with another, and sends all else dense.

    The role follows from the dimensions: three or more are a convolution weight, two a matrix, fewer a bias or a
    normalization. :attr:`farflung.types.TensorSpec.spans` lists the parameters of a bucket; a tensor without spans
    is one part. The parts of one role are one tensor for their codec.

    Args:
      convolution: Codec of convolution weights.
      other: Codec of matrices.

    Raises:
      ConfigError: An argument is not a codec.

    References: Yu et al. 2018 (GradiVeQ) compress convolutions alone; Vogels et al. 2019 and Lin et al. 2018 leave
    vectors dense.
    """

    convolution: Codec = field(default_factory=Int8)
    other: Codec = field(default_factory=Identity)

    def __post_init__(self) -> None:
        check_codecs("by_role", self.convolution, self.other)

    @property
    @override
    def codecs(self) -> Mapping[str, Codec]:
        return {"convolution": self.convolution, "dense": Identity(), "other": self.other}

    @override
    def split_spec(self, spec: TensorSpec) -> Mapping[str, tuple[TensorSpec, list[list[int]]]]:
        """Returns routes ``convolution``, ``other`` (matrices) and ``dense``: specs, and runs ``[start, numel]``."""
        parts: dict[str, list[ParameterSpan]] = {}
        runs: dict[str, list[list[int]]] = {}
        for part in spec.spans or (ParameterSpan(spec.shape, 0),):
            role = ("dense", "dense", "other", "convolution")[min(len(part.shape), 3)]
            if isinstance(self.codecs[role], Identity):  # all dense parts form one route
                role = "dense"
            role_runs = runs.setdefault(role, [])
            start = sum(length for _, length in role_runs)
            parts.setdefault(role, []).append(ParameterSpan(part.shape, start))
            if role_runs and sum(role_runs[-1]) == part.start:
                role_runs[-1][1] += part.numel
            else:
                role_runs.append([part.start, part.numel])
        return {
            role: (TensorSpec((sum(part.numel for part in placed),), spec.dtype, tuple(placed)), runs[role])
            for role, placed in parts.items()
        }


def by_role(convolution: Codec | None = None, other: Codec | None = None) -> ByRole:
    """Returns a :class:`ByRole`; by default convolution weights have 8 bits and matrices are dense."""
    return ByRole(Int8() if convolution is None else convolution, Identity() if other is None else other)
