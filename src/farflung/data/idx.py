"""The gzipped IDX format of the MNIST family: a header of big-endian sizes, then bytes.

Header: two zero bytes, the element type (8: unsigned byte, the only one here), the number of dimensions, then each
dimension as a 32-bit big-endian number.
"""

from __future__ import annotations

import gzip
import hashlib
import math
import struct
import zlib
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from farflung.errors import DataError

__all__ = ["encode_idx", "read_idx", "write_idx"]

_UNSIGNED_BYTE = 8


def read_idx(path: Path, *, shape: tuple[int | None, ...], sha256: str = "") -> Tensor:
    """Reads a gzipped IDX file of bytes and checks everything that can be checked.

    Args:
      path: the file.
      shape: the shape it must have; ``None`` for a dimension of any size.
      sha256: of the content after decompression; empty to leave it unchecked. Content, because one content may
        have been compressed by unlike programs.

    Returns:
      A uint8 tensor.

    Raises:
      DataError: not gzip, damaged, another type or shape, too few or too many bytes, or altered content; the
        message names the file, what was expected and what was found.
    """
    try:
        packed = path.read_bytes()
    except OSError as error:
        raise DataError(f"{path}: {error.strerror}") from None
    header_size = 4 + 4 * len(shape)
    inflate = zlib.decompressobj(wbits=31)
    try:
        header = inflate.decompress(packed, header_size)
        if len(header) < header_size:
            raise DataError(
                f"{path}: truncated: expected a header of {header_size} bytes, found {len(header)}"
            )
        found = _shape(path, header, shape)
        nbytes = math.prod(found)
        body = inflate.decompress(inflate.unconsumed_tail, nbytes + 1)  # one more would be one too many
        if not inflate.eof and len(body) == nbytes:
            body += inflate.decompress(inflate.unconsumed_tail, 1)  # reaches the trailer and its checksum
    except zlib.error as error:
        raise DataError(f"{path}: not a gzip file, or damaged ({error})") from None
    if len(body) < nbytes:
        raise DataError(
            f"{path}: truncated: expected {header_size + nbytes} bytes after decompression, "
            f"found {header_size + len(body)}"
        )
    if len(body) > nbytes or inflate.unused_data:
        raise DataError(f"{path}: expected {header_size + nbytes} bytes after decompression, found more")
    if not inflate.eof:
        raise DataError(f"{path}: truncated: {len(packed)} compressed bytes end before the gzip trailer")
    if sha256:
        digest = hashlib.sha256(header)
        digest.update(body)
        if digest.hexdigest() != sha256:
            raise DataError(
                f"{path}: wrong checksum: expected sha256 {sha256} of its content, found {digest.hexdigest()}"
            )
    return torch.from_numpy(np.frombuffer(bytearray(body), dtype=np.uint8).reshape(found))


def _shape(path: Path, header: bytes, wanted: tuple[int | None, ...]) -> tuple[int, ...]:
    magic = header[:4]
    expected = bytes((0, 0, _UNSIGNED_BYTE, len(wanted)))
    if magic != expected:
        raise DataError(
            f"{path}: not an IDX file of bytes in {len(wanted)} dimensions: "
            f"expected magic {expected.hex()}, found {magic.hex()}"
        )
    found = struct.unpack(f">{len(wanted)}I", header[4:])
    if any(want is not None and want != have for want, have in zip(wanted, found, strict=True)):
        text = " x ".join("any" if want is None else str(want) for want in wanted)
        raise DataError(f"{path}: expected {text} bytes, found {' x '.join(map(str, found))}")
    return found


def encode_idx(values: Tensor) -> bytes:
    """``values`` (uint8) as a gzipped IDX file; the same bytes each time with the same zlib."""
    array = values.to(torch.uint8).contiguous().numpy()
    header = bytes((0, 0, _UNSIGNED_BYTE, array.ndim)) + struct.pack(f">{array.ndim}I", *array.shape)
    return gzip.compress(header + array.tobytes(), compresslevel=9, mtime=0)


def write_idx(path: Path, values: Tensor) -> None:
    """Writes ``values`` (uint8) to ``path`` as a gzipped IDX file."""
    path.write_bytes(encode_idx(values))
