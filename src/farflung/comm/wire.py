"""Messages as frames: a small fixed header, checked before anything is used, then the tensors' own bytes.

A message is a header frame, which also carries tensors of up to :data:`INLINE` bytes, and one frame for each larger
tensor. Nothing is ever unpickled; every size is bounded before memory is taken.
"""

from __future__ import annotations

import ctypes
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
_SHAPES = [struct.Struct(f"<BB{dims}Q") for dims in range(_MAX_DIMS + 1)]


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


def _bytes_of(tensor: Tensor) -> Frame:
    """A tensor's own bytes: copied where they are few, shared where they are many."""
    tensor = tensor.detach().contiguous()
    if tensor.nbytes <= INLINE:
        return ctypes.string_at(tensor.data_ptr(), tensor.nbytes) if tensor.nbytes else b""
    return memoryview(tensor.reshape(-1).view(torch.uint8).numpy().data)


def encode(kind: Kind, view: int, tag: Tag, payload: Payload) -> list[Frame]:
    """The frames of a message; large tensors are not copied."""
    head: list[Frame] = [_HEADER.pack(MAGIC, VERSION, kind, view, tag.exchange, tag.part, tag.hop)]
    inline: list[Frame] = []
    frames: list[Frame] = []

    def describe(node: Payload) -> None:
        head.append(bytes((_NESTED, len(node.parts))))
        for part in node.parts:
            if isinstance(part, Payload):
                describe(part)
                continue
            shape = part.shape
            head.append(_SHAPES[len(shape)].pack(_CODES[part.dtype], len(shape), *shape))
            (inline if part.nbytes <= INLINE else frames).append(_bytes_of(part))

    describe(payload)
    return [b"".join((*head, *inline)), *frames]


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
        shapes, at = _describe(head, _HEADER.size + 2, head[_HEADER.size + 1], 0)
        if head[_HEADER.size] != _NESTED:
            raise WireError("no payload")
        contents = _Contents(head, at, frames, max_nbytes)
        payload = contents.payload(shapes)
        contents.check_end()
        return Message(Kind(kind), view, Tag(exchange, part, hop), payload)
    except (IndexError, ValueError, struct.error) as error:
        raise WireError(f"a malformed frame: {error}") from None


_Shapes: TypeAlias = "list[_Shapes | tuple[torch.dtype, tuple[int, ...]]]"


def _describe(head: memoryview, at: int, count: int, depth: int) -> tuple[_Shapes, int]:
    """Reads what ``count`` parts look like, and where the description ends."""
    if depth > _MAX_DEPTH:
        raise WireError("nested too deep")
    shapes: _Shapes = []
    for _ in range(count):
        code, dims = head[at], head[at + 1]
        if code == _NESTED:
            nested, at = _describe(head, at + 2, dims, depth + 1)
            shapes.append(nested)
            continue
        if dims > _MAX_DIMS:
            raise WireError(f"{dims} dimensions")
        described = _SHAPES[dims]
        shapes.append((_DTYPES[code], described.unpack_from(head, at)[2:]))
        at += described.size
    return shapes, at


class _Contents:
    """Hands out the bytes of a message to the tensors described, in order."""

    def __init__(self, head: memoryview, at: int, frames: Sequence[Buffer], max_nbytes: int) -> None:
        self._head, self._at = head, at
        self._frames, self._next_frame = frames, 1
        self._room = max_nbytes

    def payload(self, shapes: _Shapes) -> Payload:
        return Payload(
            tuple(self.payload(node) if isinstance(node, list) else self._tensor(*node) for node in shapes)
        )

    def check_end(self) -> None:
        if self._at != len(self._head) or self._next_frame != len(self._frames):
            raise WireError("more bytes than described")

    def _tensor(self, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
        nbytes = dtype.itemsize * math.prod(shape)
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
            data = self._frames[self._next_frame]
            self._next_frame += 1
        if len(data) != nbytes:
            raise WireError(f"{len(data)} bytes where {nbytes} were described")
        tensor = torch.frombuffer(data, dtype=dtype)
        if tensor.data_ptr() % dtype.itemsize:
            tensor = torch.frombuffer(bytearray(data), dtype=dtype)
        return tensor if len(shape) == 1 else tensor.reshape(shape)
