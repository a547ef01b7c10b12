"""Messages as frames: a small fixed header, checked before anything is used, then the tensors' own bytes.

A message is a header frame, which also carries tensors of up to :data:`INLINE` bytes, and one frame for each larger
tensor. Nothing is ever unpickled; every size is bounded before memory is taken.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import TypeAlias

import torch
from torch import Tensor

from farflung.types import Payload, Tag

__all__ = [
    "INLINE",
    "MAGIC",
    "VERSION",
    "Buffer",
    "Frame",
    "Kind",
    "Message",
    "WireError",
    "decode",
    "encode",
]

Buffer: TypeAlias = "bytes | bytearray | memoryview"
Frame: TypeAlias = "bytes | memoryview"

MAGIC = b"FF"
VERSION = 1
INLINE = 4096
"""Tensors up to this many bytes ride in the header frame."""

_HEADER = struct.Struct("<2sBBIQII")
_DTYPES = (
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.bool,
)
_CODES = {dtype: code for code, dtype in enumerate(_DTYPES)}
_NESTED = 0xFF
_MAX_DIMS = 8
_MAX_EXTENT = 1 << 48
"""Bounds what the other dimensions of an empty tensor multiply to; torch computes strides from them."""
_MAX_DEPTH = 8


class WireError(ValueError):
    """A frame that is not what this protocol sends."""


class Kind(IntEnum):
    """What a message is for."""

    DATA = 0
    HELLO = 1
    FAREWELL = 2
    ABORT = 3
    WAITING = 4


@dataclass(frozen=True, slots=True)
class Message:
    """One decoded message; control kinds carry JSON as a uint8 tensor."""

    kind: Kind
    view: int
    tag: Tag
    payload: Payload


def _bytes_of(tensor: Tensor) -> memoryview:
    flat = tensor.detach().contiguous().reshape(-1)
    return memoryview(flat.view(torch.uint8).numpy().data)


def encode(kind: Kind, view: int, tag: Tag, payload: Payload) -> list[Frame]:
    """The frames of a message; large tensors are not copied."""
    head = bytearray(_HEADER.pack(MAGIC, VERSION, kind, view, tag.exchange, tag.part, tag.hop))
    inline: list[memoryview] = []
    frames: list[Frame] = []

    def describe(node: Payload) -> None:
        head.extend((_NESTED, len(node.parts)))
        for part in node.parts:
            if isinstance(part, Payload):
                describe(part)
                continue
            head.extend((_CODES[part.dtype], part.dim()))
            head.extend(struct.pack(f"<{part.dim()}Q", *part.shape))
            (inline if part.nbytes <= INLINE else frames).append(_bytes_of(part))

    describe(payload)
    for data in inline:
        head.extend(data)
    return [bytes(head), *frames]


def decode(frames: Sequence[Buffer], *, max_nbytes: int) -> Message:
    """Reads a message.

    Args:
      frames: as :func:`encode` gave them; large tensors in the result share their memory.
      max_nbytes: the largest payload accepted.

    Raises:
      WireError: anything that :func:`encode` would not have made.
    """
    head = memoryview(frames[0] if frames else b"")
    if len(head) < _HEADER.size:
        raise WireError(f"a header of {len(head)} bytes")
    magic, version, kind, view, exchange, part, hop = _HEADER.unpack_from(head)
    if magic != MAGIC or version != VERSION:
        raise WireError("not a frame of this protocol and version")
    try:
        reader = _Reader(head, frames[1:], max_nbytes)
        payload = reader.payload()
        return Message(Kind(kind), view, Tag(exchange, part, hop), payload)
    except (IndexError, ValueError, struct.error) as error:
        raise WireError(f"a malformed frame: {error}") from None


class _Reader:
    """Walks the description of a payload twice: for its shapes, then for its bytes."""

    def __init__(self, head: memoryview, frames: Sequence[Buffer], max_nbytes: int) -> None:
        self._head = head
        self._at = _HEADER.size
        self._frames = iter(frames)
        self._room = max_nbytes
        self._frames_left = len(frames)

    def payload(self) -> Payload:
        if self._head[self._at] != _NESTED:
            raise WireError("no payload")
        self._at += 1
        shape_tree = self._describe(0)
        payload = self._fill(shape_tree)
        if self._at != len(self._head) or self._frames_left:
            raise WireError("more bytes than described")
        return payload

    def _describe(self, depth: int) -> list[object]:
        if depth > _MAX_DEPTH:
            raise WireError("nested too deep")
        count = self._head[self._at]
        self._at += 1
        nodes: list[object] = []
        for _ in range(count):
            code = self._head[self._at]
            self._at += 1
            if code == _NESTED:
                nodes.append(self._describe(depth + 1))
                continue
            dims = self._head[self._at]
            self._at += 1
            if dims > _MAX_DIMS:
                raise WireError(f"{dims} dimensions")
            shape = struct.unpack_from(f"<{dims}Q", self._head, self._at)
            self._at += 8 * dims
            nodes.append((_DTYPES[code], shape))
        return nodes

    def _fill(self, nodes: list[object]) -> Payload:
        parts: list[Tensor | Payload] = []
        for node in nodes:
            if isinstance(node, list):
                parts.append(self._fill(node))
            else:
                parts.append(self._tensor(*node))  # type: ignore[misc]
        return Payload(tuple(parts))

    def _tensor(self, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
        nbytes = dtype.itemsize
        for dim in shape:
            nbytes *= dim
        self._room -= nbytes
        if self._room < 0:
            raise WireError("larger than any message of this run")
        if nbytes == 0:
            if math.prod(max(dim, 1) for dim in shape) > _MAX_EXTENT:
                raise WireError("an empty tensor of absurd dimensions")
            return torch.empty(shape, dtype=dtype)
        if nbytes <= INLINE:
            data: Buffer = bytearray(self._head[self._at : self._at + nbytes])
            self._at += nbytes
        else:
            data = next(self._frames, b"")
            self._frames_left -= 1
        if len(data) != nbytes:
            raise WireError(f"{len(data)} bytes where {nbytes} were described")
        tensor = torch.frombuffer(data, dtype=dtype)
        if tensor.data_ptr() % dtype.itemsize:
            tensor = torch.frombuffer(bytearray(data), dtype=dtype)
        return tensor.reshape(shape)
