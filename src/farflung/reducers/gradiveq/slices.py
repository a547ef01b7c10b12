"""Slices of layers in their bases, and their exchange: as a whole, or in segments around a ring."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from farflung.codecs.blocks import get_working_dtype
from farflung.comm.collectives.segments import sum_in_order
from farflung.comm.staging import copy_to_device
from farflung.reducers.aggregation import CodecExchange
from farflung.types import ParameterSpan, Payload, State, TensorSpec

__all__ = ["EncodedSegment", "Layout", "SliceCoder", "SlicedLayer", "reduce_ring"]


_ALIGNMENT = 64
"""Alignment in bytes of torch's own memory."""
_WRITE_POSITIONS = 64
"""Number of positions written together, so that strided reads stay in the processor's cache."""
_CHUNK_SLICES = 256
"""Number of slices coded together on a CPU, so that they stay in its cache between operations."""


class SlicedLayer(NamedTuple):
    """A weight cut into slices of equal size.

    The numbers of a convolution are read in the order height, width, depth, filter, so entry ``(h, w, d, f)`` has the
    index ``((h * W + w) * D + d) * F + f``. A matrix of F outputs and P inputs is read as a kernel of P positions and
    depth 1. Slices are consecutive in that order; the last one is padded with zeros.

    Args:
      start: Index of its first element in the flat tensor.
      filters: F.
      depth: D.
      positions: P, height times width for a convolution.
      num_slices: Number of slices.

    References: Yu et al. 2018, section 2, with TensorFlow's order of a kernel's dimensions; there a slice is a multiple
    of F x D. Other sizes and matrices are our choice.
    """

    start: int
    filters: int
    depth: int
    positions: int
    num_slices: int

    @property
    def numel(self) -> int:
        return self.positions * self.depth * self.filters

    @property
    def slice_numel(self) -> int:
        """Size K of a slice."""
        return math.ceil(self.numel / self.num_slices)

    def read_slices(self, tensor: Tensor, first: int, last: int) -> Tensor:
        """Reads slices ``first`` to ``last`` (excluded) of the flat tensor, shape ``(last - first, K)``."""
        view, span = self._view_slices(tensor, first, last)
        flat = view.reshape(-1)[span]
        padding = (last - first) * self.slice_numel - len(flat)
        flat = torch.cat((flat, flat.new_zeros(padding))) if padding else align(flat)
        return flat.view(last - first, self.slice_numel)

    def write_slices(self, tensor: Tensor, first: int, rows: Tensor) -> None:
        """Writes slices from ``first`` on, shape ``(n, K)``, to their places in the flat tensor."""
        view, span = self._view_slices(tensor, first, first + len(rows))
        flat = rows.reshape(-1)[: span.stop - span.start]
        if len(flat) < view.numel():  # positions shared with other slices
            padded = view.reshape(-1)
            padded[span] = flat
            flat = padded
        for target, source in zip(
            view.split(_WRITE_POSITIONS), flat.view(view.shape).split(_WRITE_POSITIONS), strict=True
        ):
            target.copy_(source)

    def _view_slices(self, tensor: Tensor, first: int, last: int) -> tuple[Tensor, slice]:
        """Returns a view ``(positions, D, F)`` around the slices, and their range in the flattened view."""
        begin, end = first * self.slice_numel, min(last * self.slice_numel, self.numel)
        plane = self.depth * self.filters
        first_position = begin // plane
        weights = tensor.narrow(0, self.start, self.numel).view(self.filters, self.depth, self.positions)
        return weights.permute(2, 1, 0)[first_position : math.ceil(end / plane)], slice(
            begin - first_position * plane, end - first_position * plane
        )


@dataclass(frozen=True, slots=True)
class Layout:
    """Weights of a flat tensor that are cut into slices, and its dense parts.

    Args:
      layers: Weights that are cut.
      dense: First element and length of each other range.
    """

    layers: tuple[SlicedLayer, ...]
    dense: tuple[tuple[int, int], ...]

    @staticmethod
    def from_spec(spec: TensorSpec, slice_size: int, *, matrices: bool = False) -> Layout:
        """Cuts each convolution into slices of about ``slice_size`` weights; other parameters are dense parts.

        A convolution has three or more dimensions: torch's F, D and the sides of the kernel.

        Args:
          spec: Spec of the flat tensor.
          slice_size: Desired K; a layer is cut into the number of slices that comes closest.
          matrices: If True, cut parameters of two dimensions too.
        """
        layers, dense = [], []
        for part in spec.spans or (ParameterSpan(spec.shape, 0),):
            if part.numel and len(part.shape) >= (2 if matrices else 3):
                filters, *dims = part.shape
                depth, positions = (1, dims[0]) if len(dims) == 1 else (dims[0], math.prod(dims[1:]))
                longest = math.ceil(part.numel / max(1, round(part.numel / slice_size)))
                layers.append(
                    SlicedLayer(part.start, filters, depth, positions, math.ceil(part.numel / longest))
                )
            elif part.numel:
                dense.append((part.start, part.numel))
        return Layout(tuple(layers), tuple(dense))

    @staticmethod
    def from_state(state: State) -> Layout:
        return Layout(
            tuple(SlicedLayer(*layer) for layer in state["layers"]),
            tuple((start, numel) for start, numel in state["dense"]),
        )

    @property
    def state(self) -> dict[str, Any]:
        return {"layers": [list(layer) for layer in self.layers], "dense": [list(run) for run in self.dense]}

    @property
    def layers_by_name(self) -> dict[str, SlicedLayer]:
        """Layers by the names of their bases and means."""
        return {f"{number:04}": layer for number, layer in enumerate(self.layers)}


class EncodedSegment(NamedTuple):
    """Segment of the encoded tensor that ends on slice borders.

    Args:
      first_slice: First slice, counted through all layers.
      last_slice: Slice behind the last one.
      dense_start: First number of the dense part.
      dense_stop: Number behind its last one.
    """

    first_slice: int
    last_slice: int
    dense_start: int
    dense_stop: int


class SliceCoder:
    r"""Encoder of segments of one replica's tensor, and decoder of their sums.

    .. math::
        q_i = U^\top (w_i g_i - w_i \mu), \qquad \hat g = \Big(U \sum_i q_i + \mu \sum_i w_i\Big) \Big/ \sum_i w_i

    Encoding is linear, so the encoded tensors of all replicas are summed without decoding.

    Args:
      layout: Layout of the slices.
      means: :math:`\mu` of each layer by its name, shape ``(slices, K)``.
      bases: U of each layer, shape ``(K, d)``.
      tensor: Flat numerator, overwritten by the mean as it is decoded.
      weight: :math:`w_i`.
      residual: Flat tensor that receives the residual of encoded slices, with zeros for non-finite numbers; None
        discards it.

    References: Yu et al. 2018, eq. (3) to (5); weights and ``residual`` are our choice.
    """

    def __init__(
        self,
        layout: Layout,
        means: Mapping[str, Tensor],
        bases: Mapping[str, Tensor],
        tensor: Tensor,
        weight: float,
        residual: Tensor | None = None,
    ) -> None:
        self._layout, self._tensor, self._weight, self._residual = layout, tensor, weight, residual
        self.dtype = get_working_dtype(tensor.dtype)
        self._layers = [
            (layer, means[name].to(tensor.device), align(bases[name].to(tensor.device)))
            for name, layer in layout.layers_by_name.items()
        ]
        self._sizes = [basis.shape[1] for layer, _, basis in self._layers for _ in range(layer.num_slices)]
        self._borders = list(accumulate(self._sizes, initial=0))
        self._squares: list[Tensor] = []

    def split(self, count: int) -> list[EncodedSegment]:
        """Splits the tensor into ``count`` consecutive segments of about equal bytes."""
        coded = self._borders[-1]
        total = coded + sum(numel for _, numel in self._layout.dense)
        ends = [(0, 0)]
        for number in range(1, count + 1):
            target_numel = total * number // count
            if target_numel >= coded:
                ends.append((len(self._sizes), target_numel - coded))
            else:
                border = np.abs(np.array(self._borders) - target_numel).argmin()  # the first one of two
                ends.append((int(border), 0))
        return [EncodedSegment(a, b, c, d) for (a, c), (b, d) in pairwise(ends)]

    def count_encoded(self, segment: EncodedSegment) -> int:
        """Counts the numbers of an encoded segment."""
        return (
            self._borders[segment.last_slice]
            - self._borders[segment.first_slice]
            + segment.dense_stop
            - segment.dense_start
        )

    def count_dense(self, segment: EncodedSegment) -> int:
        """Counts the numbers of the dense tensor in a segment."""
        sliced = sum(
            min(last * layer.slice_numel, layer.numel) - first * layer.slice_numel
            for layer, first, last, _, _ in self._iter_layers(segment)
        )
        return sliced + segment.dense_stop - segment.dense_start

    def encode(self, segment: EncodedSegment) -> Tensor:
        """Encodes this rank's segment as a new flat tensor; records squares, and the residual if it is kept."""
        parts = []
        for layer, first, last, mean, basis in self._iter_layers(segment):
            rows = layer.read_slices(self._tensor, first, last).to(self.dtype)
            centred = rows - (mean if self._weight == 1.0 else mean * self._weight)
            coded = centred @ basis
            self._squares.append(
                torch.stack([_compute_square(rows), _compute_square(centred), _compute_square(coded)])
            )
            if self._residual is not None:
                layer.write_slices(
                    self._residual, first, centred.sub_(coded @ basis.T).nan_to_num_(0.0, 0.0, 0.0)
                )
            parts.append(coded.view(-1))
        parts += [place.to(self.dtype) for place in self._iter_dense(segment)]
        return torch.cat(parts) if parts else self._tensor.new_empty(0, dtype=self.dtype)

    def decode(self, summed: Tensor, segment: EncodedSegment, weight: float) -> None:
        """Writes the mean of a segment to its place in the tensor.

        Args:
          summed: Sum of all replicas' encoded segments.
          segment: Segment to decode.
          weight: Sum of all weights; if it is 0, nothing is added or divided.
        """
        position, weight_sum = 0, weight or 1.0
        for layer, first, last, mean, basis in self._iter_layers(segment):
            count, size = last - first, basis.shape[1]
            coded = align(summed[position : position + count * size]).view(count, size)
            layer.write_slices(self._tensor, first, (coded @ basis.T).add_(mean * weight).div_(weight_sum))
            position += count * size
        for place in self._iter_dense(segment):
            place.copy_(summed[position : position + len(place)] / weight_sum)
            position += len(place)

    @property
    def relative_error(self) -> float | None:
        r""":math:`\|g - \hat g\| / \|g\|` of the slices encoded so far; None if they are zero.

        The columns of U are orthonormal, so it needs no decoding.
        """
        if not self._squares:
            return None
        total, centred, coded = torch.stack(self._squares).double().sum(dim=0).tolist()
        return None if total == 0.0 else float((max(centred - coded, 0.0) / total) ** 0.5)

    def _iter_layers(self, segment: EncodedSegment) -> Iterator[tuple[SlicedLayer, int, int, Tensor, Tensor]]:
        """Yields chunks of each layer in a segment: first and last slice, their means, and the basis."""
        is_on_cpu, number = self._tensor.device.type == "cpu", 0
        for layer, mean, basis in self._layers:
            begin = max(segment.first_slice - number, 0)
            end = min(segment.last_slice - number, layer.num_slices)
            for first in range(begin, end, _CHUNK_SLICES if is_on_cpu else layer.num_slices):
                last = min(first + _CHUNK_SLICES, end) if is_on_cpu else end
                yield layer, first, last, mean[first:last], basis
            number += layer.num_slices

    def _iter_dense(self, segment: EncodedSegment) -> Iterator[Tensor]:
        """Yields the dense parts of a segment, as views of the tensor."""
        position = 0
        for start, numel in self._layout.dense:
            first, last = max(segment.dense_start - position, 0), min(segment.dense_stop - position, numel)
            if first < last:
                yield self._tensor[start + first : start + last]
            position += numel


def align(tensor: Tensor) -> Tensor:
    """Returns the tensor if its memory is aligned as torch's own, else a copy; products round equally then."""
    return tensor if tensor.data_ptr() % _ALIGNMENT == 0 else tensor.clone()


def _compute_square(rows: Tensor) -> Tensor:
    return torch.dot(rows.reshape(-1), rows.reshape(-1))


async def reduce_ring(
    exchange: CodecExchange, coder: SliceCoder, method: str, device: torch.device
) -> Tensor:
    """Writes the mean to the tensor; returns the sum of the metadata.

    On a hop of the first half a rank encodes its own segment while the neighbor's partial sum is in transit, and
    adds the two. On a hop of the second half it decodes a segment while the next one is in transit.

    The metadata goes around in the first half and is summed in rank order. So the sum of the weights is known before
    anything is decoded, which is our choice, since the paper's nodes have equal weights.

    Args:
      exchange: Exchange with the metadata.
      coder: Coder of this rank's tensor, with bases equal on all ranks.
      method: Name of the arithmetic for coding costs.
      device: Device of the tensor.

    References: Yu et al. 2018, Algorithm 1; borders on slice borders, at about equal bytes, are our choice.
    """
    channel, metadata = exchange.channel, exchange.metadata
    rank, size = channel.rank, channel.size
    next_rank, previous_rank = (rank + 1) % size, (rank - 1) % size
    hop = channel.reserve_hops(2 * (size - 1))
    segments = coder.split(size)

    def encode(segment: EncodedSegment) -> Tensor:
        channel.charge("encode", coder.count_dense(segment), method)
        return coder.encode(segment)

    def decode(summed: Tensor, segment: EncodedSegment) -> None:
        channel.charge("decode", coder.count_dense(segment), method)
        coder.decode(summed, segment, float(total_metadata[0]))

    async def receive(segment: EncodedSegment, segment_hop: int, *extras: Tensor) -> list[Tensor]:
        expect = (
            TensorSpec((coder.count_encoded(segment),), coder.dtype),
            *map(TensorSpec.from_tensor, extras),
        )
        coded, *extra = (await channel.recv(previous_rank, segment_hop, expect)).iter_tensors()
        return [*copy_to_device(Payload((coded,)), device).iter_tensors(), *extra]

    metadata_by_rank = {rank: metadata}
    summed = encode(segments[rank])
    for k in range(size - 1):
        sending, receiving = (rank - k) % size, (rank - k - 1) % size
        channel.send(Payload((summed, metadata_by_rank[sending])), next_rank, hop + k)
        local = encode(segments[receiving])
        incoming, metadata_by_rank[receiving] = await receive(segments[receiving], hop + k, metadata)
        channel.charge("add", local.numel())
        summed = torch.add(incoming, local)

    total_metadata = sum_in_order([metadata_by_rank[sender] for sender in range(size)])
    hop += size - 1
    for k in range(size - 1):
        complete = (rank + 1 - k) % size
        channel.send(Payload((summed,)), next_rank, hop + k)
        decode(summed, segments[complete])
        (summed,) = await receive(segments[(rank - k) % size], hop + k)
    decode(summed, segments[(rank + 2) % size])
    return total_metadata
