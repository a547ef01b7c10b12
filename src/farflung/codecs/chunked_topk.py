"""Top-k of each chunk, with values of a few bits."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F
from typing_extensions import override

from farflung.codecs.base import SparseCodec
from farflung.codecs.bits import pack, pack_indices, unpack, unpack_indices
from farflung.codecs.selection import count_kept
from farflung.options import check_fraction, check_integer
from farflung.types import CodecState, Payload

__all__ = ["ChunkedTopK"]


@dataclass(frozen=True, slots=True)
class ChunkedTopK(SparseCodec):
    r"""Codec that keeps the ``density`` fraction of each chunk with the largest magnitude, in ``bits`` bits each.

    An index counts from the start of its chunk: with chunks of 4096 it takes 12 bits instead of 32. Each part of a
    model gets a share of the entries sent, however small its magnitudes are.

    One bit of an entry is its sign. The others name one of :math:`2^{b - 1}` classes of equal width between the
    smallest and the largest magnitude sent. An entry decodes to the mean of its sign and class, which is sent too.
    With 2 bits and a density of 1/64 a number takes 0.22 bits.

    Not linear. Biased and contractive: wrap it in :func:`error_feedback`. A NaN counts as infinite, so non-finite
    entries are sent first, and decode to non-finite numbers. If the payload is no smaller than the dense tensor, the
    dense tensor is sent, with zeros for the dropped entries.

    Args:
      density: Fraction of each chunk sent, in (0, 1]; rounded to the nearest count, at least one entry.
      chunk: Number of entries in a chunk, at most 65536; the last chunk is padded with zeros.
      bits: Bits of an entry, 1 to 4; None sends the values unchanged.

    Raises:
      ConfigError: An option is out of range.

    References: Sarfi et al. 2025 (SparseLoCo), with chunks of 64 x 64 of a matrix and of 4096 of a vector. Chunks
    of the flat tensor, and classes of equal width, are our choice.
    """

    density: float = 1 / 64
    chunk: int = 4096
    bits: int | None = 2

    def __post_init__(self) -> None:
        check_fraction("chunked_topk", "density", self.density)
        check_integer("chunked_topk", "chunk", self.chunk, 1, 1 << 16)
        if self.bits is not None:
            check_integer("chunked_topk", "bits", self.bits, 1, 4)

    @override
    def encode(self, state: CodecState, grad: Tensor, *, step: int, count: int) -> tuple[Payload, CodecState]:
        """Returns indices in two tensors, then values, or codes and the means that they represent."""
        flat = grad.reshape(-1)
        if not len(flat):
            return Payload((flat.clone(),)), state
        chunk, chunks, keep = self._plan_chunks(len(flat))
        rows = F.pad(flat, (0, chunks * chunk - len(flat))).view(chunks, chunk)
        indices = _compute_magnitudes(rows).topk(keep, dim=1, sorted=False).indices.sort(dim=1).values
        values = rows.gather(1, indices).reshape(-1)
        packed = pack_indices(indices.reshape(-1), chunk)
        begins = torch.arange(0, chunks * chunk, chunk, device=flat.device)[:, None]
        is_padding = (indices + begins).reshape(-1) >= len(flat)
        parts = (
            (*packed, values) if self.bits is None else (*packed, *_quantize(values, self.bits, is_padding))
        )
        return self.densify_large(state, Payload(parts), flat), state

    @override
    def add_entries(self, state: CodecState, tensors: Sequence[Tensor], total: Tensor, alpha: float) -> None:
        chunk, chunks, keep = self._plan_chunks(total.numel())
        indices = unpack_indices(tensors[0], tensors[1], chunk, chunks * keep)
        indices += torch.arange(0, chunks * chunk, chunk, device=indices.device).repeat_interleave(keep)
        values = tensors[2]
        if self.bits is not None:
            values = tensors[3][unpack(tensors[2], self.bits, len(indices)).to(torch.int64)]
        # Indices of the padding lie behind the end.
        values = torch.where(indices < total.numel(), values, 0)
        SparseCodec.add_entries(self, state, (values, indices.clamp_max(total.numel() - 1)), total, alpha)

    def _plan_chunks(self, numel: int) -> tuple[int, int, int]:
        """Returns the entries of a chunk, the number of chunks, and the entries of each that are sent."""
        chunk = min(self.chunk, numel)
        return chunk, math.ceil(numel / chunk), count_kept(chunk, self.density)


def _compute_magnitudes(tensor: Tensor) -> Tensor:
    return tensor.abs().nan_to_num(nan=math.inf, posinf=math.inf)


def _quantize(values: Tensor, bits: int, is_padding: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the packed codes of values, and the mean of each code, to which padding does not count."""
    classes = 1 << (bits - 1)
    magnitudes = _compute_magnitudes(values)
    low, high = torch.where(is_padding, math.inf, magnitudes).amin(), magnitudes.amax()
    codes = values.signbit().to(torch.uint8) * classes
    for number in range(1, classes):
        codes += (magnitudes >= low + (high - low) * (number / classes)).to(torch.uint8)
    means = []
    for code in range(2 * classes):
        members = (codes == code) & ~is_padding
        total = torch.where(members, magnitudes, 0).sum(dtype=torch.float64)
        means.append(total / members.sum().clamp_min(1) * (-1 if code >= classes else 1))
    return pack(codes, bits), torch.stack(means).to(values.dtype)
