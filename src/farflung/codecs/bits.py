"""Packing of small unsigned numbers into bytes."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["pack", "pack_fields", "pack_indices", "unpack", "unpack_fields", "unpack_indices"]

BYTE = 8


def pack(values: Tensor, bits: int) -> Tensor:
    """Packs numbers of ``bits`` bits, eight of them into ``bits`` bytes.

    Neighbors are joined in rounds. With 1, 2 or 4 bits, a round joins the two bytes of a 16-bit word to one byte,
    until bytes are full. Otherwise the eight bytes of eight numbers are one 64-bit word, in which bytes are joined
    to pairs, pairs to fours, fours to eights. The last group is padded with zeros.

    Args:
      values: uint8 tensor of shape ``(n,)``, each number below ``2**bits``.
      bits: Bits of a number, 1 to 8.

    Returns:
      uint8 tensor with ``bits`` bytes for every eight numbers; ``values`` for 8 bits.
    """
    if bits == 8:
        return values
    values = _pad(values, 8)
    if BYTE % bits == 0:
        while bits < BYTE:
            pairs = values.view(torch.int16)
            values = (pairs >> (BYTE - bits)).bitwise_or_(pairs).to(torch.uint8)
            bits *= 2
        return values
    words = values.view(torch.int64)
    for unit in (16, 32, 64):
        field = unit // 16 * bits
        low = _repeat_pattern(unit, (1 << field) - 1)
        upper = (words >> (unit // 2 - field)).bitwise_and_(low << field)
        words = (words & low).bitwise_or_(upper)
    return words.view(torch.uint8).view(-1, 8)[:, :bits].reshape(-1)


def unpack(packed: Tensor, bits: int, numel: int) -> Tensor:
    """Unpacks ``numel`` numbers as uint8."""
    if bits == 8:
        return packed
    if BYTE % bits == 0:
        field = BYTE
        while field > bits:
            field //= 2
            pairs = packed.to(torch.int16)
            pairs = (pairs << (BYTE - field)).bitwise_or_(pairs).bitwise_and_(((1 << field) - 1) * 0x101)
            packed = pairs.view(torch.uint8)
        return packed[:numel]
    groups = packed.numel() // bits
    spread = packed.new_zeros(groups, 8)
    spread[:, :bits] = packed.view(groups, bits)
    words = spread.view(-1).view(torch.int64)
    for unit in (64, 32, 16):
        field = unit // 16 * bits
        low = _repeat_pattern(unit, (1 << field) - 1)
        upper = (words << (unit // 2 - field)).bitwise_and_(low << unit // 2)
        words = (words & low).bitwise_or_(upper)
    return words.view(torch.uint8)[:numel]


def pack_indices(indices: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Packs indices below ``size``: the low byte of each, and the higher bits if ``size`` is above 256.

    Args:
      indices: int64 tensor of shape ``(n,)``, each index below ``size``.
      size: Number of entries, 1 to 65536.

    Returns:
      Two uint8 tensors; the second is empty if a byte is enough.
    """
    bits = _count_index_bits(size)
    low = pack((indices & 0xFF).to(torch.uint8), min(bits, BYTE))
    if bits <= BYTE:
        return low, low.new_empty(0)
    return low, pack((indices >> BYTE).to(torch.uint8), bits - BYTE)


def unpack_indices(low: Tensor, high: Tensor, size: int, numel: int) -> Tensor:
    """Unpacks ``numel`` indices as int64."""
    bits = _count_index_bits(size)
    indices = unpack(low, min(bits, BYTE), numel)[:numel].to(torch.int64)
    if bits > BYTE:
        indices |= unpack(high, bits - BYTE, numel)[:numel].to(torch.int64) << BYTE
    return indices


def _count_index_bits(size: int) -> int:
    return max(1, (size - 1).bit_length())


def pack_fields(values: Tensor, width: int) -> Tensor:
    """Packs numbers into bit fields of 32-bit words, so that sums of words are words of sums.

    Args:
      values: uint8 tensor of shape ``(n,)``.
      width: Bits of a field, enough for the largest sum.

    Returns:
      int32 tensor of ``ceil(n / (32 // width))`` words; the top field may reach the sign bit.
    """
    num_fields = 32 // width
    rows = _pad(values, num_fields).view(num_fields, (values.numel() + num_fields - 1) // num_fields)
    words = rows[0].to(torch.int32)
    for place, row in enumerate(rows[1:], start=1):
        words.bitwise_or_(row.to(torch.int32).bitwise_left_shift_(width * place))
    return words


def unpack_fields(words: Tensor, width: int, numel: int) -> Tensor:
    """Unpacks ``numel`` numbers, or sums of them, that :func:`pack_fields` packed, as int32."""
    rows = words.new_empty(32 // width, words.numel())
    for place, row in enumerate(rows):
        torch.bitwise_right_shift(words, width * place, out=row)
    return rows.bitwise_and_((1 << width) - 1).view(-1)[:numel]


def _repeat_pattern(period: int, pattern: int) -> int:
    """Repeats ``pattern`` at the low end of every ``period`` bits of a 64-bit word."""
    return sum(pattern << start for start in range(0, 64, period))


def _pad(values: Tensor, multiple: int) -> Tensor:
    padding = -values.numel() % multiple
    if not padding:
        return values.contiguous()
    return torch.cat((values, values.new_zeros(padding)))
