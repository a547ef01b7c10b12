"""Numeric arrays out of MATLAB files of version 5, as far as the official data sets need them.

A file is a header of 128 bytes, then elements: a type, a size, and content padded to 8 bytes (or, when the upper
half of the type word holds the size, up to 4 bytes of content in the same word). A compressed element holds another
element; a matrix holds flags, dimensions, name and numbers, in column-major order.

Reference: MathWorks, "MAT-File Format", chapter "Level 5 MAT-Files".
"""

from __future__ import annotations

import math
import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from farflung.errors import DataError

__all__ = ["read_mat5"]

_MATRIX, _COMPRESSED = 14, 15
_TYPES = {1: "i1", 2: "u1", 3: "i2", 4: "u2", 5: "i4", 6: "u4", 7: "f4", 9: "f8", 12: "i8", 13: "u8"}
_CLASSES = {6: "f8", 7: "f4", 8: "i1", 9: "u1", 10: "i2", 11: "u2", 12: "i4", 13: "u4", 14: "i8", 15: "u8"}


def read_mat5(path: Path) -> dict[str, npt.NDArray[Any]]:
    """The numeric arrays of a file by name.

    Raises:
      DataError: not such a file, truncated, or with something in it that is not a real numeric array.
    """
    content = path.read_bytes()
    if len(content) < 128 or content[124:128] not in (b"\x00\x01IM", b"\x01\x00MI"):
        raise DataError(f"{path}: not a MATLAB 5 file")
    order = "<" if content[126:128] == b"IM" else ">"
    arrays = {}
    position = 128
    while position < len(content):
        kind, body, position = _element(path, content, position, order)
        if kind == _COMPRESSED:
            inflate = zlib.decompressobj()
            try:
                unpacked = inflate.decompress(body)
            except zlib.error as error:
                raise DataError(f"{path}: damaged ({error})") from None
            if not inflate.eof:
                raise DataError(f"{path}: truncated inside a compressed array")
            kind, body, _ = _element(path, unpacked, 0, order)
        if kind != _MATRIX:
            raise DataError(f"{path}: expected an array, found an element of type {kind}")
        name, values = _matrix(path, body, order)
        arrays[name] = values
    return arrays


def _element(path: Path, content: bytes, start: int, order: str) -> tuple[int, bytes, int]:
    """Type and content of the element at ``start``, and where the next one begins."""
    if start + 8 > len(content):
        raise DataError(f"{path}: truncated: expected an element at byte {start}, found {len(content)} bytes")
    (word,) = struct.unpack_from(f"{order}I", content, start)
    if word >> 16:
        kind, size, begin, end = word & 0xFFFF, word >> 16, start + 4, start + 8
    else:
        kind = word
        (size,) = struct.unpack_from(f"{order}I", content, start + 4)
        begin = start + 8
        end = begin + size + (0 if kind == _COMPRESSED else -size % 8)
    if begin + size > len(content):
        raise DataError(
            f"{path}: truncated: expected {size} bytes at byte {begin}, found {len(content) - begin}"
        )
    return kind, content[begin : begin + size], end


def _matrix(path: Path, body: bytes, order: str) -> tuple[str, npt.NDArray[Any]]:
    _, flags, position = _element(path, body, 0, order)
    _, dims, position = _element(path, body, position, order)
    _, name, position = _element(path, body, position, order)
    (flag,) = struct.unpack_from(f"{order}I", flags)
    if flag & 0xFF not in _CLASSES or flag & 0x800:
        raise DataError(f"{path}: array {name.decode('latin-1')} is not real and numeric")
    kind, numbers, _ = _element(path, body, position, order)
    if kind not in _TYPES:
        raise DataError(f"{path}: array {name.decode('latin-1')} has elements of unknown type {kind}")
    shape = struct.unpack(f"{order}{len(dims) // 4}i", dims)
    stored = np.dtype(order + _TYPES[kind])  # may be smaller than the class says, to save space
    if len(numbers) != math.prod(shape) * stored.itemsize:
        raise DataError(
            f"{path}: array {name.decode('latin-1')}: expected {math.prod(shape) * stored.itemsize} bytes, "
            f"found {len(numbers)}"
        )
    values = np.frombuffer(numbers, dtype=stored).astype(_CLASSES[flag & 0xFF])
    return name.decode("latin-1"), values.reshape(shape, order="F")
