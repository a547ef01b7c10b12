"""What all replicas know of the window they are in, how one becomes the next, and rank 0's bases for all."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeAlias

import torch
from torch import Tensor

from farflung.codecs.blocks import working_dtype
from farflung.comm.collectives.segments import cut, others
from farflung.comm.staging import moved
from farflung.errors import ProtocolError
from farflung.reducers.gradiveq.layout import Layout, alike, groups, principal
from farflung.types import Channel, Payload, State, TensorSpec

__all__ = [
    "SharedBases",
    "Solve",
    "bases_of",
    "begun",
    "compressed",
    "confirmed",
    "shared_by",
    "solved",
    "taken",
]


Solve: TypeAlias = Callable[[int, Callable[[], Tensor]], Tensor]
"""Finds a basis from so many numbers, as a part of an exchange."""


def begun(seed: int, layout: Layout) -> State:
    """The state at the start."""
    return _sampling({"seed": seed, "layout": layout.state, "window": 0})


def bases_of(state: State) -> list[Tensor]:
    """The bases and, last, the means, in an order that is alike on all replicas."""
    return [*(state["bases"][name] for name in sorted(state["bases"])), state["means"]["all"]]


def taken(state: State, mean: Tensor, reuse: int | None) -> State:
    """One more mean is known; one that is not finite begins the sampling again.

    Args:
      state: of now.
      mean: flat, of all replicas.
      reuse: slices that share a basis.
    """
    layers = Layout.of_state(state["layout"]).layers
    slices = [layer.rows(mean, 0, layer.slices).to(working_dtype(mean.dtype)) for layer in layers]
    every = torch.cat([rows.reshape(-1) for rows in slices])
    if not every.isfinite().all():
        return _sampling(state)
    first = torch.cat([slices[group.layer][group.first] for group in groups(layers, reuse)])
    means, rows = state["means"], state["rows"]
    total = every + means["sum"].to(every.device) if "sum" in means else every
    rows = {**rows, f"{len(rows):06}": first}
    return {**state, "rows": rows, "means": {**means, "sum": total}}


def solved(state: State, reuse: int | None, left_out: float, solve: Solve) -> State:
    """All samples are there.

    Args:
      state: of now.
      reuse: slices that share a basis.
      left_out: share of the variance that bases need not explain.
      solve: finds each basis.
    """
    layers = Layout.of_state(state["layout"]).layers
    samples = [state["rows"][name] for name in sorted(state["rows"])]
    bases, start = {}, 0
    for group in groups(layers, reuse):
        numel = layers[group.layer].slice_numel
        found = partial(_principal, samples, start, numel, left_out)
        bases[group.name] = solve(len(samples) * numel, found)
        start += numel
    means = {"all": state["means"]["sum"] / len(samples)}
    return {**state, "phase": "confirm", "count": 0, "rows": {}, "means": means, "bases": bases}


def _principal(samples: Sequence[Tensor], start: int, numel: int, left_out: float) -> Tensor:
    device = samples[-1].device
    return principal(torch.stack([row.narrow(0, start, numel).to(device) for row in samples]), left_out)


def confirmed(state: State, said: list[float], size: int) -> State:
    """The hashes are known; the exchange that carried them is the first of those to be compressed."""
    return {**state, "phase": "compress" if alike(said, size) else "share", "count": 1}


def shared_by(state: State, received: list[Tensor]) -> State:
    """Rank 0's bases are here, in the order of :func:`bases_of`."""
    *bases, mean = received
    named = dict(zip(sorted(state["bases"]), bases, strict=True))
    return {**state, "phase": "compress", "means": {"all": mean}, "bases": named}


def compressed(state: State, votes: float, *, steps: float, size: int) -> State:
    """One more exchange is over; another window begins after ``steps``, or when most have voted for it."""
    count = state["count"] + 1
    if count >= steps or 2 * votes > size:
        return _sampling(state)
    return {**state, "count": count}


def _sampling(state: State) -> State:
    window = state["window"] + 1
    return {**state, "phase": "sample", "window": window, "count": 0, "rows": {}, "means": {}, "bases": {}}


class SharedBases:
    """The bases and means on their way from rank 0; they leave when this is made.

    Bases may be larger than the tensor that they are for, and no message may be; so they go in pieces as long as that.

    Args:
      channel: the exchange's.
      own: this rank's: bases of shape ``(K, d)``, and the flat mean; all ranks have equal K, and may have unlike d.
      most_columns: no basis has more.
      piece_numel: the most numbers in a message.
    """

    def __init__(self, channel: Channel, own: Sequence[Tensor], most_columns: int, piece_numel: int) -> None:
        self._channel, self._own = channel, own
        self._most_columns, self._piece_numel = most_columns, piece_numel
        self._hop = channel.hops(1)
        self._columns = torch.tensor([basis.shape[1] for basis in own[:-1]])
        if channel.rank == 0:
            self._send(self._columns, self._hop)

    async def finish(self) -> list[Tensor]:
        """Rank 0's, on all ranks.

        Raises:
          ProtocolError: they do not fit the own tensor.
        """
        if self._channel.rank:
            (self._columns,) = await self._receive(self._hop, self._columns)
        columns = self._columns.tolist()
        *bases, mean = self._own
        if not all(
            1 <= d <= min(self._most_columns, len(basis)) for d, basis in zip(columns, bases, strict=True)
        ):
            raise ProtocolError(
                f"rank 0 sent bases of {columns} columns: do all ranks run the same model and recipe?"
            )
        sizes = [d * len(basis) for d, basis in zip(columns, bases, strict=True)] + [len(mean)]
        pieces = cut(sum(sizes), math.ceil(sum(sizes) / self._piece_numel))
        hop = self._channel.hops(len(pieces))
        if self._channel.rank == 0:
            flat = torch.cat([tensor.reshape(-1) for tensor in self._own])
            for index, piece in enumerate(pieces):
                self._send(piece.of(flat), hop + index)
            return list(self._own)
        received = []
        for index, piece in enumerate(pieces):
            received += await self._receive(hop + index, mean.new_empty(piece.length))
        *flats, mean = torch.cat(received).split(sizes)
        return [*(flat.view(len(own), -1) for flat, own in zip(flats, bases, strict=True)), mean.clone()]

    def _send(self, tensor: Tensor, hop: int) -> None:
        for peer in others(self._channel):
            self._channel.send(Payload((tensor,)), peer, hop)

    async def _receive(self, hop: int, like: Tensor) -> list[Tensor]:
        payload = await self._channel.recv(0, hop, (TensorSpec.of(like),))
        return [moved(tensor, like.device) for tensor in payload.tensors()]
