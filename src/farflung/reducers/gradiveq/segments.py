"""A tensor as it travels: slices on their bases, then what is dense; whole, or around a ring."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import accumulate, pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from farflung.codecs.blocks import working_dtype
from farflung.comm.collectives.segments import sum_in_order
from farflung.comm.staging import on_device
from farflung.reducers.aggregation import Exchange
from farflung.reducers.gradiveq.layout import Layer, Layout, groups
from farflung.types import CodingCost, Payload, TensorSpec

__all__ = ["Coder", "Stretch", "ring"]


_ALIGNMENT = 64
"""Bytes; torch's own memory begins at a multiple."""


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


class _Run(NamedTuple):
    """Slices that share a basis.

    Args:
      number: of the first one through all layers.
      layer: theirs.
      first: of the layer's slices.
      last: behind the last one.
      mean: of their window, shape ``(slices, K)``.
      residual: of the same shape, or ``None``.
      basis: shape ``(K, d)``.
    """

    number: int
    layer: Layer
    first: int
    last: int
    mean: Tensor
    residual: Tensor | None
    basis: Tensor


class Coder:
    r"""Encodes stretches of one replica's tensor, and decodes their sums.

    .. math::
        q_i = U^\top (w_i g_i - w_i \mu), \qquad \hat g = \Big(U \sum_i q_i + \mu \sum_i w_i\Big) \Big/ \sum_i w_i

    so encoding is linear: the encoded tensors of all replicas are added as they are.

    Args:
      layout: where slices are.
      mean: :math:`\mu`, of all slices, flat in the order of the layers.
      bases: U by the names of their groups.
      reuse: slices that share one.
      tensor: flat, the numerator; overwritten by the mean as it is decoded.
      weight: :math:`w_i`.
      residual: what earlier exchanges have left out, in the order of ``mean``. It is added to the own slices, and
        overwritten by what is left out of them as they are encoded. ``None``: nothing is fed back.

    References: Yu et al. 2018, eq. (3) to (5); weights and residuals are ours, and the mean is each slice's own under
    reuse.
    """

    def __init__(
        self,
        layout: Layout,
        mean: Tensor,
        bases: Mapping[str, Tensor],
        reuse: int | None,
        tensor: Tensor,
        weight: float,
        residual: Tensor | None = None,
    ) -> None:
        self._layout, self._tensor, self._weight = layout, tensor, weight
        self.dtype = working_dtype(tensor.dtype)
        self._runs = tuple(_runs(layout, mean.to(tensor.device), bases, reuse, residual))
        self._sizes = [run.basis.shape[1] for run in self._runs for _ in range(run.first, run.last)]
        self._borders = list(accumulate(self._sizes, initial=0))
        self._squares: list[Tensor] = []

    def cut(self, count: int) -> list[Stretch]:
        """``count`` stretches of about as many bytes each, in order; they cover the tensor."""
        coded = self._borders[-1]
        total = coded + self._layout.dense_numel
        ends = [(0, 0)]
        for number in range(1, count + 1):
            wished = total * number // count
            if wished >= coded:
                ends.append((len(self._sizes), wished - coded))
            else:
                ends.append((_nearest(self._borders, wished), 0))
        return [Stretch(a, b, c, d) for (a, c), (b, d) in pairwise(ends)]

    def sent_numel(self, where: Stretch) -> int:
        """Numbers that a stretch travels as."""
        return self._borders[where.last] - self._borders[where.first] + where.stop - where.start

    def numel(self, where: Stretch) -> int:
        """Numbers of the dense tensor in a stretch."""
        sliced = sum((last - first) * run.layer.slice_numel for run, first, last in self._within(where))
        return sliced + where.stop - where.start

    def encode(self, where: Stretch) -> Tensor:
        """The own stretch, flat; shares no memory with the tensor."""
        parts = []
        for run, first, last in self._within(where):
            rows = run.layer.rows(self._tensor, first, last).to(self.dtype)
            among = slice(first - run.first, last - run.first)
            centred = rows - run.mean[among] * self._weight
            if run.residual is None:
                coded = centred @ run.basis
            else:
                fed = centred + run.residual[among]
                coded = fed @ run.basis
                run.residual[among] = (fed - coded @ run.basis.T).nan_to_num_(0.0, 0.0, 0.0)
            self._squares.append(torch.stack([_square(rows), _square(centred), _square(coded)]))
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
        at, by = 0, weight or 1.0
        for run, first, last in self._within(where):
            count, size = last - first, run.basis.shape[1]
            coded = _aligned(summed[at : at + count * size]).view(count, size)
            rows = (coded @ run.basis.T).add_(run.mean[first - run.first : last - run.first] * weight)
            run.layer.put(self._tensor, first, rows.div_(by))
            at += count * size
        for place in self._dense(where):
            place.copy_(summed[at : at + len(place)] / by)
            at += len(place)

    @property
    def loss(self) -> float | None:
        r""":math:`\|g - \hat g\| / \|g\|` of the own slices encoded so far; ``None`` where they are zeros.

        Found without decoding, for the columns of U are orthonormal, and a residual of the same window to them.
        """
        if not self._squares:
            return None
        own, centred, coded = torch.stack(self._squares).double().sum(dim=0).tolist()
        return None if own == 0.0 else float((max(centred - coded, 0.0) / own) ** 0.5)

    def _within(self, where: Stretch) -> Iterator[tuple[_Run, int, int]]:
        """Runs of slices in a stretch, with the slices of their layers that are."""
        for run in self._runs:
            first = max(where.first - run.number, 0) + run.first
            last = min(where.last - run.number + run.first, run.last)
            if first < last:
                yield run, first, last

    def _dense(self, where: Stretch) -> Iterator[Tensor]:
        """What is dense in a stretch, as views of the tensor."""
        at = 0
        for start, numel in self._layout.dense:
            first, last = max(where.start - at, 0), min(where.stop - at, numel)
            if first < last:
                yield self._tensor[start + first : start + last]
            at += numel


def _runs(
    layout: Layout, mean: Tensor, bases: Mapping[str, Tensor], reuse: int | None, residual: Tensor | None
) -> Iterator[_Run]:
    number, offsets = 0, layout.offsets
    for group in groups(layout.layers, reuse):
        layer = layout.layers[group.layer]
        start, count = offsets[group.layer] + group.first * layer.slice_numel, group.last - group.first
        place, shape = slice(start, start + count * layer.slice_numel), (count, layer.slice_numel)
        own = mean[place].view(shape)
        left = None if residual is None else residual[place].view(shape)
        basis = _aligned(bases[group.name].to(mean.device))
        yield _Run(number, layer, group.first, group.last, own, left, basis)
        number += count


def _nearest(borders: Sequence[int], wished: int) -> int:
    """The number of the border closest to a place, the lower one of two."""
    after = bisect_left(borders, wished)
    if after and wished - borders[after - 1] <= borders[after] - wished:
        return after - 1
    return after


def _aligned(tensor: Tensor) -> Tensor:
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
    after, before = (rank + 1) % size, (rank - 1) % size
    hop = channel.hops(2 * (size - 1))
    places = coder.cut(size)

    def encode(where: Stretch) -> Tensor:
        cost = CodingCost("encode", method, coder.numel(where))
        return channel.compute(cost, partial(coder.encode, where))

    def decode(summed: Tensor, where: Stretch) -> None:
        cost = CodingCost("decode", method, coder.numel(where))
        channel.compute(cost, partial(coder.decode, summed, where, float(sides[0])))

    async def received(where: Stretch, at: int, *more: Tensor) -> list[Tensor]:
        expect = (TensorSpec((coder.sent_numel(where),), coder.dtype), *map(TensorSpec.of, more))
        coded, *rest = (await channel.recv(before, at, expect)).tensors()
        return [*on_device(Payload((coded,)), device).tensors(), *rest]

    riding = {rank: side}
    summed = encode(places[rank])
    for k in range(size - 1):
        sending, receiving = (rank - k) % size, (rank - k - 1) % size
        channel.send(Payload((summed, riding[sending])), after, hop + k)
        own = encode(places[receiving])
        came, riding[receiving] = await received(places[receiving], hop + k, side)
        summed = channel.compute(CodingCost("add", "", own.numel()), partial(torch.add, came, own))

    sides = sum_in_order([riding[each] for each in range(size)])
    hop += size - 1
    for k in range(size - 1):
        complete = (rank + 1 - k) % size
        channel.send(Payload((summed,)), after, hop + k)
        decode(summed, places[complete])
        (summed,) = await received(places[(rank - k) % size], hop + k)
    decode(summed, places[(rank + 2) % size])
    return sides
