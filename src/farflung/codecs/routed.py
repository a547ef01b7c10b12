"""Codecs that send parts of a bucket by unlike codecs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from farflung.seeding import derive
from farflung.types import Codec, CodecState, Payload, Seeds, State, TensorSpec

__all__ = ["Route", "Routed", "join", "take"]


class Route(NamedTuple):
    """What one codec has to do with a bucket."""

    name: str
    codec: Codec
    state: CodecState
    runs: Sequence[Sequence[int]]
    """First element and length of each run of elements that go this way."""


class Routed:
    """What :class:`BySize` and :class:`ByRole` share: each has codecs by name, and a state that says who sends what.

    A codec reducer carries each route by itself, so that what is sent dense is summed on its way although the rest
    is gathered. Inside another codec the payload holds one payload for each route.
    """

    __slots__ = ()

    @property
    def codecs(self) -> Mapping[str, Codec]:
        """The codecs there may be routes to."""
        raise NotImplementedError

    @property
    def unbiased(self) -> bool:
        """If all are."""
        return all(codec.unbiased for codec in self.codecs.values())

    @property
    def stateless(self) -> bool:
        """Never: the state says who sends what."""
        return False

    @property
    def per_hop(self) -> bool:
        """Never: a segment of a collective does not say what it is a part of."""
        return False

    def encode(self, state: CodecState, grad: Tensor, *, step: int, count: int) -> tuple[Payload, CodecState]:
        """One payload for each route."""
        payloads, states = [], {}
        for route in self.routes(state):
            part = take(grad.reshape(-1), route.runs)
            payload, states[route.name] = route.codec.encode(route.state, part, step=step, count=count)
            payloads.append(payload)
        return Payload(tuple(payloads)), self.with_states(state, states)

    def decode(
        self, state: CodecState, payload: Payload, spec: TensorSpec, *, step: int, count: int
    ) -> Tensor:
        """Each route's part in its place."""
        flat: Tensor | None = None
        for route, part in zip(self.routes(state), payload.parts, strict=True):
            assert isinstance(part, Payload)
            numel = sum(length for _, length in route.runs)
            dense = TensorSpec((numel,), spec.dtype)
            decoded = route.codec.decode(route.state, part, dense, step=step, count=count)
            if numel == spec.numel:
                return decoded.view(spec.shape)
            flat = decoded.new_empty(spec.numel) if flat is None else flat
            join(flat, route.runs, decoded)
        return torch.zeros(spec.shape, dtype=spec.dtype) if flat is None else flat.view(spec.shape)

    def observe(self, state: CodecState, aggregate: Tensor, *, step: int) -> CodecState:
        """Each codec learns from its own part."""
        flat = aggregate.reshape(-1)
        states = {
            route.name: route.codec.observe(route.state, take(flat, route.runs), step=step)
            for route in self.routes(state)
        }
        return self.with_states(state, states)

    def linear(self, state: CodecState) -> bool:
        """If those that have something to send are."""
        return all(route.codec.linear(route.state) for route in self.routes(state))

    def routes(self, state: CodecState) -> list[Route]:
        """The codecs that have something to send, in the order of their payloads."""
        return [
            Route(name, self.codecs[name], CodecState(kept["codec"], state.local[name]), kept["runs"])
            for name, kept in sorted(state.shared.items())
        ]

    def with_states(self, state: CodecState, states: Mapping[str, CodecState]) -> CodecState:
        """The same routes with new states of their codecs."""
        shared: State = {
            name: {"runs": kept["runs"], "codec": states[name].shared} for name, kept in state.shared.items()
        }
        return CodecState(shared, {name: states[name].local for name in shared})

    def route_to(
        self, specs: Mapping[str, TensorSpec], runs: Mapping[str, list[list[int]]], seeds: Seeds
    ) -> CodecState:
        """A state with these routes, each codec's own state fresh."""
        states = {
            name: self.codecs[name].init(spec, Seeds(derive(seeds.shared, name), derive(seeds.own, name)))
            for name, spec in specs.items()
        }
        shared: State = {name: {"runs": runs[name], "codec": own.shared} for name, own in states.items()}
        return CodecState(shared, {name: states[name].local for name in shared})


def take(flat: Tensor, runs: Sequence[Sequence[int]]) -> Tensor:
    """The elements of some runs of a flat tensor; a view where they are one run."""
    pieces = [flat[start : start + length] for start, length in runs]
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces)


def join(flat: Tensor, runs: Sequence[Sequence[int]], part: Tensor) -> None:
    """Puts back what :func:`take` took, unless it is still there."""
    if len(runs) == 1 and part.data_ptr() == flat[runs[0][0] :].data_ptr():
        return
    begin = 0
    for start, length in runs:
        flat[start : start + length] = part[begin : begin + length]
        begin += length
