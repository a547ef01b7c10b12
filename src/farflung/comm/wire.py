"""Messages as frames: a small fixed header, checked before anything is used, then the tensors' own bytes.

A message is a header frame, which also carries tensors of up to :data:`INLINE` bytes as long as it fits in
:data:`PIECE` bytes, and for each other tensor one frame, or several of equal size: so every frame is bounded, whatever
the tensors. An encrypted frame is encrypted and decrypted as a whole, so in small pieces a tensor is on the wire while
the rest of it is still being encrypted. Nothing is ever unpickled; every size is bounded before memory is taken.

What crosses a connection at once is a parcel: whole messages, and parts of some that are larger than it. Each begins
with a header frame that says how many frames of it follow there; the rest of a message that is in parts comes later,
behind headers of its number, and between other parcels. See :mod:`farflung.comm.outbox` and :mod:`farflung.comm.inbox`.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import lru_cache
from itertools import islice
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from farflung.types import Payload, Tag

__all__ = [
    "DIRECT",
    "INLINE",
    "MAGIC",
    "PIECE",
    "VERSION",
    "WHOLE",
    "Buffer",
    "Frame",
    "Header",
    "Kind",
    "Message",
    "Route",
    "WireError",
    "begin",
    "decode",
    "encode",
    "frames_due",
    "header_of",
    "json_of",
    "part",
]

Buffer: TypeAlias = "bytes | bytearray | memoryview"
Frame: TypeAlias = "bytes | memoryview"

MAGIC = b"FF"
VERSION = 4
INLINE = 4096
"""Tensors up to this many bytes ride in the header frame, while it is no longer than a piece."""
PIECE = 1 << 17
"""Bytes of each frame but the last of a tensor that is encrypted, which takes less than half a millisecond."""
WHOLE = 1 << 25
"""The same where nothing is encrypted: a tensor of up to this size comes in one frame, and is not copied."""

_HEADER = struct.Struct("<2sBBIQIIIIIiII")
_PARTS = struct.Struct("<II")
"""The last two numbers of a header; see :class:`Header`."""
_ALIGNMENT = 8
"""The description and each small tensor are padded to a multiple of this many bytes."""
_PADDING = [bytes(-size % _ALIGNMENT) for size in range(_ALIGNMENT)]
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
    PART = 5
    """More frames of a message that came in part."""
    WITHDRAWN = 6
    """No more frames of it will come."""
    OPEN = 7
    """A connection is there."""
    LOST = 8
    """Somebody is gone whose messages the sender has relayed."""


_KINDS = tuple(Kind)


class Route(NamedTuple):
    """The way of a message that a third member relays.

    Args:
      source: the rank that has sent it.
      destination: whom it is for.
      priority: with which the relay passes it on.
    """

    source: int
    destination: int
    priority: int


DIRECT = Route(0, 0, 0)
"""Of a message that goes from one end of its connection to the other."""


@dataclass(frozen=True, slots=True)
class Message:
    """One decoded message; control kinds carry JSON as a uint8 tensor."""

    kind: Kind
    view: int
    tag: Tag
    payload: Payload
    route: Route = DIRECT


class Header(NamedTuple):
    """How a message lies in parcels.

    Args:
      kind: of message, or of part.
      number: of a message in parts among those of its connection, from 1 on; 0: it is whole.
      follow: how many frames behind the header belong to it.
    """

    kind: Kind
    number: int
    follow: int


def encode(
    kind: Kind, view: int, tag: Tag, payload: Payload, *, piece: int = WHOLE, route: Route = DIRECT
) -> list[Frame]:
    """The frames of a message; large tensors are not copied, and come in pieces of ``piece`` bytes."""
    tensors: list[Tensor] = []
    description = _description(_structure(payload, tensors))
    head: list[Frame] = [b"", description]
    frames: list[Frame] = []
    at = _HEADER.size + len(description)
    for tensor in tensors:
        dense = tensor.detach().contiguous()
        if not _rides(dense.nbytes, at):
            data = dense.reshape(-1).view(torch.uint8).numpy().data
            frames += [data[start : start + piece] for start in range(0, dense.nbytes, piece)]
            continue
        # NumPy knows no bfloat16.
        head.append((dense.view(torch.int16) if dense.dtype == torch.bfloat16 else dense).numpy().data)
        head.append(_PADDING[dense.nbytes % _ALIGNMENT])
        at += dense.nbytes + -dense.nbytes % _ALIGNMENT
    head[0] = _HEADER.pack(
        MAGIC, VERSION, kind, view, tag.exchange, tag.part, tag.hop, len(description), *route, 0, len(frames)
    )
    return [b"".join(head), *frames]


def begin(head: Frame, number: int, follow: int) -> bytes:
    """The header frame of a message of which only some frames follow."""
    at = _HEADER.size - _PARTS.size
    return b"".join((head[:at], _PARTS.pack(number, follow), head[_HEADER.size :]))


def part(kind: Kind, number: int, follow: int) -> bytes:
    """A header alone: for more frames of a message, or for the end of one that is not whole."""
    return _HEADER.pack(MAGIC, VERSION, kind, 0, 0, 0, 0, 0, *DIRECT, number, follow)


def header_of(head: Buffer) -> Header:
    """What a header frame says of the frames behind it.

    Raises:
      WireError: it is none.
    """
    kind, *_, number, follow = _header(memoryview(head))
    return Header(kind, number, follow)


def frames_due(head: Buffer, *, max_nbytes: int, piece: int) -> int:
    """How many frames a message has behind its header frame, by its description.

    Raises:
      WireError: the description is malformed, or of more than ``max_nbytes``.
    """
    return sum(
        -(-leaf.nbytes // piece)
        for leaf in _described(memoryview(head), max_nbytes).leaves
        if leaf.at is None
    )


def _header(head: memoryview) -> tuple[Any, ...]:
    """Its fields behind magic and version."""
    if len(head) < _HEADER.size:
        raise WireError(f"a header of {len(head)} bytes")
    magic, version, kind, *others = _HEADER.unpack_from(head)
    if magic != MAGIC or version != VERSION or kind >= len(_KINDS):
        raise WireError("not a frame of this protocol and version")
    return (_KINDS[kind], *others)


def _described(head: memoryview, max_nbytes: int) -> _Layout:
    described = _header(head)[5]
    if _HEADER.size + described > len(head):
        raise WireError("a description that ends early")
    layout = _layout(bytes(head[_HEADER.size : _HEADER.size + described]))
    if layout.nbytes > max_nbytes:
        raise WireError("larger than any message of this run")
    return layout


def decode(frames: Sequence[Buffer], *, max_nbytes: int, piece: int = WHOLE) -> Message:
    """Reads a message.

    Args:
      frames: as :func:`encode` gave them; large tensors in the result share their memory, if not in pieces.
      max_nbytes: the largest payload accepted.
      piece: bytes of each piece of a large tensor.

    Raises:
      WireError: anything that :func:`encode` would not have made.
    """
    head = memoryview(frames[0] if frames else b"")
    kind, view, exchange, part, hop, _, *route, _, _ = _header(head)
    layout = _described(head, max_nbytes)
    if len(head) != layout.head_nbytes:
        raise WireError("more or fewer bytes than described")
    small = bytearray(head) if layout.any_small else None
    large = iter(frames[1:])
    tensors = [leaf.read(small, large, piece) for leaf in layout.leaves]
    if next(large, None) is not None:
        raise WireError("more frames than described")
    payload = _payload(layout.tree, iter(tensors)) if layout.nested else Payload(tuple(tensors))
    return Message(kind, view, Tag(exchange, part, hop), payload, Route(*route))


def _rides(nbytes: int, at: int) -> bool:
    """Whether a tensor rides in the header frame, which is ``at`` bytes long without it."""
    return nbytes == 0 or (nbytes <= INLINE and at + nbytes <= PIECE)


# --- what a payload is made of --------------------------------------------------------------------------------------

_Structure: TypeAlias = "tuple[_Structure | tuple[torch.dtype, torch.Size], ...]"
"""A payload without its numbers, as a key."""
_Tree: TypeAlias = "list[_Tree | None]"
"""Where its tensors (``None``) are."""


def _structure(payload: Payload, tensors: list[Tensor]) -> _Structure:
    structure: list[Any] = []
    for part in payload.parts:
        if isinstance(part, Payload):
            structure.append(_structure(part, tensors))
        else:
            structure.append((part.dtype, part.shape))
            tensors.append(part)
    return tuple(structure)


@lru_cache(maxsize=1024)
def _description(structure: _Structure) -> bytes:
    described = [bytes((_NESTED, len(structure)))]

    def describe(nodes: _Structure) -> None:
        for node in nodes:
            if node and isinstance(node[0], torch.dtype):
                dtype, shape = node
                described.append(_SHAPES[len(shape)].pack(_CODES[dtype], len(shape), *shape))
            else:
                described.append(bytes((_NESTED, len(node))))
                describe(node)

    describe(structure)
    whole = b"".join(described)
    return whole + bytes(-(_HEADER.size + len(whole)) % _ALIGNMENT)


@dataclass(frozen=True, slots=True)
class _Leaf:
    """One tensor of a message; ``at`` is where it begins in the header frame, ``None`` if it has its own."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    numel: int
    at: int | None

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize

    def read(self, small: bytearray | None, large: Iterator[Buffer], piece: int) -> Tensor:
        if self.numel == 0:
            return torch.empty(self.shape, dtype=self.dtype)
        if self.at is not None:
            assert small is not None
            tensor = torch.frombuffer(small, dtype=self.dtype, count=self.numel, offset=self.at)
        else:
            data = _whole(large, self.nbytes, piece)
            tensor = torch.frombuffer(data, dtype=self.dtype)
            if tensor.data_ptr() % self.dtype.itemsize:
                tensor = torch.frombuffer(bytearray(data), dtype=self.dtype)
        return tensor if len(self.shape) == 1 else tensor.reshape(self.shape)


def _whole(frames: Iterator[Buffer], nbytes: int, piece: int) -> Buffer:
    """The bytes of one tensor, from the frame or the pieces that it came in."""
    data = next(frames, b"")
    if len(data) == piece < nbytes:
        others = (nbytes - 1) // piece
        pieces = [data, *islice(frames, others)]
        if len(pieces) == 1 + others and all(len(one) == piece for one in pieces[:-1]):
            data = bytearray().join(pieces)
    if len(data) != nbytes:
        raise WireError(f"{len(data)} bytes where {nbytes} were described")
    return data


@dataclass(frozen=True, slots=True)
class _Layout:
    """What a description says."""

    leaves: tuple[_Leaf, ...]
    tree: _Tree
    nested: bool
    nbytes: int
    head_nbytes: int
    any_small: bool


@lru_cache(maxsize=1024)
def _layout(description: bytes) -> _Layout:
    """Raises :class:`WireError` where :func:`_description` would not have made it; that is not kept."""
    found: list[tuple[torch.dtype, tuple[int, ...]]] = []
    try:
        if description[0] != _NESTED:
            raise WireError("no payload")
        tree, end = _read_tree(description, 2, description[1], 0, found)
    except (IndexError, struct.error) as error:
        raise WireError(f"a malformed description: {error}") from None
    if not 0 <= len(description) - end < _ALIGNMENT or any(description[end:]):
        raise WireError("a description of more than it says")
    at = _HEADER.size + len(description)
    leaves, nbytes, any_small = [], 0, False
    for dtype, shape in found:
        numel = math.prod(shape)
        size = numel * dtype.itemsize
        nbytes += size
        if not _rides(size, at):
            leaves.append(_Leaf(dtype, shape, numel, None))
            continue
        if size == 0 and math.prod(max(dim, 1) for dim in shape) > _MAX_EXTENT:
            raise WireError("an empty tensor of absurd dimensions")
        leaves.append(_Leaf(dtype, shape, numel, at))
        at += size + -size % _ALIGNMENT
        any_small |= size > 0
    nested = any(node is not None for node in tree)
    return _Layout(tuple(leaves), tree, nested, nbytes, at, any_small)


def _read_tree(
    description: bytes, at: int, count: int, depth: int, found: list[tuple[torch.dtype, tuple[int, ...]]]
) -> tuple[_Tree, int]:
    """Reads what ``count`` parts look like, and where the description of them ends."""
    if depth > _MAX_DEPTH:
        raise WireError("nested too deep")
    tree: _Tree = []
    for _ in range(count):
        code, dims = description[at], description[at + 1]
        if code == _NESTED:
            inner, at = _read_tree(description, at + 2, dims, depth + 1, found)
            tree.append(inner)
            continue
        if dims > _MAX_DIMS:
            raise WireError(f"{dims} dimensions")
        described = _SHAPES[dims]
        found.append((_DTYPES[code], described.unpack_from(description, at)[2:]))
        tree.append(None)
        at += described.size
    return tree, at


def _payload(tree: _Tree, tensors: Iterator[Tensor]) -> Payload:
    return Payload(tuple(next(tensors) if node is None else _payload(node, tensors) for node in tree))


def json_of(payload: Payload) -> dict[str, Any]:
    """The JSON object in a control message.

    Raises:
      WireError: there is none.
    """
    try:
        (text,) = payload.tensors()
        if text.dtype != torch.uint8 or text.dim() != 1:
            raise ValueError("no text")
        body = json.loads(text.numpy().tobytes())
    except (ValueError, RecursionError) as error:
        raise WireError(f"a control message that is no JSON: {error}") from None
    if not isinstance(body, dict):
        raise WireError("a control message that is no JSON object")
    return body
