"""Slices of layers on their bases, and a tensor's journey as such: whole, or segment by segment around a ring."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from farflung.codecs.blocks import working_dtype
from farflung.comm.collectives.segments import sum_in_order
from farflung.comm.staging import on_device
from farflung.reducers.aggregation import Exchange
from farflung.types import CodingCost, Payload, Placed, State, TensorSpec

__all__ = ["Coder", "Layer", "Layout", "Stretch", "ring"]


_ALIGNMENT = 64
"""Bytes; torch's own memory begins at a multiple."""
_AT_ONCE = 64
"""Positions that are written together, so that what is read with wide strides stays in the processor's cache."""


class Layer(NamedTuple):
    """A weight cut into slices of equal size.

    The numbers of a convolution are read in the order height, width, depth, filter, so entry ``(h, w, d, f)`` has the
    index ``((h * W + w) * D + d) * F + f``. A matrix of F outputs and P inputs is read as a kernel of P positions and
    depth 1. Slices are stretches of that order; zeros fill up the last one.

    Args:
      start: where its first element is in the flat tensor.
      filters: F.
      depth: D.
      positions: P, height times width for a convolution.
      slices: how many.

    References: Yu et al. 2018, section 2, with TensorFlow's order of a kernel's dimensions; there a slice is a multiple
    of F x D. Other sizes and matrices are our choice.
    """

    start: int
    filters: int
    depth: int
    positions: int
    slices: int

    @property
    def numel(self) -> int:
        return self.positions * self.depth * self.filters

    @property
    def slice_numel(self) -> int:
        """K, numbers in a slice."""
        return math.ceil(self.numel / self.slices)

    def rows(self, tensor: Tensor, first: int, last: int) -> Tensor:
        """Slices from ``first`` up to ``last`` (excluded) of the flat tensor, shape ``(last - first, K)``."""
        place, among = self._place(tensor, first, last)
        flat = place.reshape(-1)[among]
        missing = (last - first) * self.slice_numel - len(flat)
        flat = torch.cat((flat, flat.new_zeros(missing))) if missing else aligned(flat)
        return flat.view(last - first, self.slice_numel)

    def put(self, tensor: Tensor, first: int, rows: Tensor) -> None:
        """Writes slices from ``first`` on, shape ``(n, K)``, where they belong in the flat tensor."""
        place, among = self._place(tensor, first, first + len(rows))
        flat = rows.reshape(-1)[: among.stop - among.start]
        if len(flat) < place.numel():  # positions that other slices have a part of
            padded = place.reshape(-1)
            padded[among] = flat
            flat = padded
        for target, source in zip(place.split(_AT_ONCE), flat.view(place.shape).split(_AT_ONCE), strict=True):
            target.copy_(source)

    def _place(self, tensor: Tensor, first: int, last: int) -> tuple[Tensor, slice]:
        """The positions that slices lie in, a view of shape ``(positions, D, F)``, and which of their numbers."""
        begin, end = first * self.slice_numel, min(last * self.slice_numel, self.numel)
        plane = self.depth * self.filters
        first_position = begin // plane
        weights = tensor.narrow(0, self.start, self.numel).view(self.filters, self.depth, self.positions)
        return weights.permute(2, 1, 0)[first_position : math.ceil(end / plane)], slice(
            begin - first_position * plane, end - first_position * plane
        )


@dataclass(frozen=True, slots=True)
class Layout:
    """The weights of a flat tensor that are cut, and what stays dense.

    Args:
      layers: those that are cut.
      dense: first element and length of each stretch of all else.
    """

    layers: tuple[Layer, ...]
    dense: tuple[tuple[int, int], ...]

    @staticmethod
    def of(spec: TensorSpec, wished: int, *, matrices: bool = False) -> Layout:
        """Cuts each convolution, which is a parameter of three dimensions or more: torch's F, D and the kernel's sides.

        Args:
          spec: of the flat tensor.
          wished: K; a layer is cut into as many slices as come closest to it.
          matrices: whether parameters of two dimensions are cut too.
        """
        layers, dense = [], []
        for part in spec.parts or (Placed(spec.shape, 0),):
            if part.numel and len(part.shape) >= (2 if matrices else 3):
                filters, *dims = part.shape
                depth, positions = (1, dims[0]) if len(dims) == 1 else (dims[0], math.prod(dims[1:]))
                longest = math.ceil(part.numel / max(1, round(part.numel / wished)))
                layers.append(Layer(part.start, filters, depth, positions, math.ceil(part.numel / longest)))
            elif part.numel:
                dense.append((part.start, part.numel))
        return Layout(tuple(layers), tuple(dense))

    @staticmethod
    def of_state(state: State) -> Layout:
        return Layout(
            tuple(Layer(*layer) for layer in state["layers"]),
            tuple((start, numel) for start, numel in state["dense"]),
        )

    @property
    def state(self) -> dict[str, Any]:
        return {"layers": [list(layer) for layer in self.layers], "dense": [list(run) for run in self.dense]}

    @property
    def named(self) -> dict[str, Layer]:
        """The layers by what their bases and means are kept by."""
        return {f"{number:04}": layer for number, layer in enumerate(self.layers)}


class Stretch(NamedTuple):
    """A segment of the encoded tensor, with its borders on slice borders.

    Args:
      first: slice, counted through all layers.
      last: slice behind its last one.
      start: of what is dense, the first number.
      stop: the number behind its last one.
    """

    first: int
    last: int
    start: int
    stop: int


class Coder:
    r"""Encodes stretches of one replica's tensor, and decodes their sums.

    .. math::
        q_i = U^\top (w_i g_i - w_i \mu), \qquad \hat g = \Big(U \sum_i q_i + \mu \sum_i w_i\Big) \Big/ \sum_i w_i

    so encoding is linear: the encoded tensors of all replicas are added as they are.

    Args:
      layout: where slices are.
      means: :math:`\mu` of each layer by its name, shape ``(slices, K)``.
      bases: U of each layer, shape ``(K, d)``.
      tensor: flat, the numerator; overwritten by the mean as it is decoded.
      weight: :math:`w_i`.
      left: flat, as long as the tensor; takes what is left out of the slices that are encoded, and zeros where that is
        not finite. ``None``: it is lost.

    References: Yu et al. 2018, eq. (3) to (5); weights and ``left`` are our choice.
    """

    def __init__(
        self,
        layout: Layout,
        means: Mapping[str, Tensor],
        bases: Mapping[str, Tensor],
        tensor: Tensor,
        weight: float,
        left: Tensor | None = None,
    ) -> None:
        self._layout, self._tensor, self._weight, self._left = layout, tensor, weight, left
        self.dtype = working_dtype(tensor.dtype)
        self._layers = [
            (layer, means[name].to(tensor.device), aligned(bases[name].to(tensor.device)))
            for name, layer in layout.named.items()
        ]
        self._sizes = [basis.shape[1] for layer, _, basis in self._layers for _ in range(layer.slices)]
        self._borders = list(accumulate(self._sizes, initial=0))
        self._squares: list[Tensor] = []

    def cut(self, count: int) -> list[Stretch]:
        """``count`` stretches of about as many bytes each, in order; they cover the tensor."""
        coded = self._borders[-1]
        total = coded + sum(numel for _, numel in self._layout.dense)
        ends = [(0, 0)]
        for number in range(1, count + 1):
            target_numel = total * number // count
            if target_numel >= coded:
                ends.append((len(self._sizes), target_numel - coded))
            else:
                nearest = np.abs(np.array(self._borders) - target_numel).argmin()  # the first one of two
                ends.append((int(nearest), 0))
        return [Stretch(a, b, c, d) for (a, c), (b, d) in pairwise(ends)]

    def sent_numel(self, where: Stretch) -> int:
        """Numbers that a stretch travels as."""
        return self._borders[where.last] - self._borders[where.first] + where.stop - where.start

    def numel(self, where: Stretch) -> int:
        """Numbers of the dense tensor in a stretch."""
        sliced = sum(
            min(last * layer.slice_numel, layer.numel) - first * layer.slice_numel
            for layer, first, last, _, _ in self._within(where)
        )
        return sliced + where.stop - where.start

    def encode(self, where: Stretch) -> Tensor:
        """The own stretch, flat; shares no memory with the tensor."""
        parts = []
        for layer, first, last, mean, basis in self._within(where):
            rows = layer.rows(self._tensor, first, last).to(self.dtype)
            centred = rows - mean * self._weight
            coded = centred @ basis
            self._squares.append(torch.stack([_square(rows), _square(centred), _square(coded)]))
            if self._left is not None:
                layer.put(self._left, first, centred.sub_(coded @ basis.T).nan_to_num_(0.0, 0.0, 0.0))
            parts.append(coded.view(-1))
        parts += [place.to(self.dtype) for place in self._dense(where)]
        return torch.cat(parts) if parts else self._tensor.new_empty(0, dtype=self.dtype)

    def decode(self, summed: Tensor, where: Stretch, weight: float) -> None:
        """Writes the mean of a stretch in the tensor's place.

        Args:
          summed: of all replicas' encoded stretches.
          where: the stretch.
          weight: the sum of all weights; where it is 0 nothing is added or divided.
        """
        position, weight_sum = 0, weight or 1.0
        for layer, first, last, mean, basis in self._within(where):
            count, size = last - first, basis.shape[1]
            coded = aligned(summed[position : position + count * size]).view(count, size)
            layer.put(self._tensor, first, (coded @ basis.T).add_(mean * weight).div_(weight_sum))
            position += count * size
        for place in self._dense(where):
            place.copy_(summed[position : position + len(place)] / weight_sum)
            position += len(place)

    @property
    def loss(self) -> float | None:
        r""":math:`\|g - \hat g\| / \|g\|` of the own slices encoded so far; ``None`` where they are zeros.

        Found without decoding, for the columns of U are orthonormal.
        """
        if not self._squares:
            return None
        total, centred, coded = torch.stack(self._squares).double().sum(dim=0).tolist()
        return None if total == 0.0 else float((max(centred - coded, 0.0) / total) ** 0.5)

    def _within(self, where: Stretch) -> Iterator[tuple[Layer, int, int, Tensor, Tensor]]:
        """Layers in a stretch: which of their slices are, the means of these, and the basis."""
        number = 0
        for layer, mean, basis in self._layers:
            first, last = max(where.first - number, 0), min(where.last - number, layer.slices)
            if first < last:
                yield layer, first, last, mean[first:last], basis
            number += layer.slices

    def _dense(self, where: Stretch) -> Iterator[Tensor]:
        """What is dense in a stretch, as views of the tensor."""
        position = 0
        for start, numel in self._layout.dense:
            first, last = max(where.start - position, 0), min(where.stop - position, numel)
            if first < last:
                yield self._tensor[start + first : start + last]
            position += numel


def aligned(tensor: Tensor) -> Tensor:
    """The tensor where torch's own memory could be: elsewhere products may round in another way."""
    return tensor if tensor.data_ptr() % _ALIGNMENT == 0 else tensor.clone()


def _square(rows: Tensor) -> Tensor:
    return torch.dot(rows.reshape(-1), rows.reshape(-1))


async def ring(exchange: Exchange, coder: Coder, method: str, device: torch.device) -> Tensor:
    """Writes the mean in the tensor's place; returns the sum of the sides.

    On a hop of the first half a rank encodes its own segment while the neighbour's partial sum of it is on its way,
    and adds the two; on one of the second half it decodes what it has while the next comes.

    The sides go around in the first half, one on each hop, and are added in rank order; so the sum of the weights is
    there before anything is decoded, which is our choice, since the paper's nodes weigh alike.

    Args:
      exchange: whose side it is.
      coder: of the own tensor, with its equal bases on all ranks.
      method: what the costs of its arithmetic are called by.
      device: of the tensor.

    References: Yu et al. 2018, Algorithm 1; borders on slice borders, at about equal bytes, are our choice.
    """
    channel, side = exchange.channel, exchange.side
    rank, size = channel.rank, channel.size
    next_rank, previous_rank = (rank + 1) % size, (rank - 1) % size
    hop = channel.hops(2 * (size - 1))
    segments = coder.cut(size)

    def encode(segment: Stretch) -> Tensor:
        cost = CodingCost("encode", method, coder.numel(segment))
        return channel.compute(cost, partial(coder.encode, segment))

    def decode(summed: Tensor, segment: Stretch) -> None:
        cost = CodingCost("decode", method, coder.numel(segment))
        channel.compute(cost, partial(coder.decode, summed, segment, float(sides[0])))

    async def receive(segment: Stretch, segment_hop: int, *extras: Tensor) -> list[Tensor]:
        expect = (TensorSpec((coder.sent_numel(segment),), coder.dtype), *map(TensorSpec.of, extras))
        coded, *extra = (await channel.recv(previous_rank, segment_hop, expect)).tensors()
        return [*on_device(Payload((coded,)), device).tensors(), *extra]

    metadata_by_rank = {rank: side}
    summed = encode(segments[rank])
    for k in range(size - 1):
        sending, receiving = (rank - k) % size, (rank - k - 1) % size
        channel.send(Payload((summed, metadata_by_rank[sending])), next_rank, hop + k)
        local = encode(segments[receiving])
        incoming, metadata_by_rank[receiving] = await receive(segments[receiving], hop + k, side)
        summed = channel.compute(CodingCost("add", "", local.numel()), partial(torch.add, incoming, local))

    sides = sum_in_order([metadata_by_rank[sender] for sender in range(size)])
    hop += size - 1
    for k in range(size - 1):
        complete = (rank + 1 - k) % size
        channel.send(Payload((summed,)), next_rank, hop + k)
        decode(summed, segments[complete])
        (summed,) = await receive(segments[(rank - k) % size], hop + k)
    decode(summed, segments[(rank + 2) % size])
    return sides
