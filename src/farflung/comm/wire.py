"""Messages as frames: a small fixed header, checked before anything is used, then the tensors' own bytes.

A message is a header frame, which also carries tensors of up to :data:`INLINE` bytes as long as it fits in
:data:`PIECE` bytes, and for each other tensor one frame, or several of equal size: so every frame is bounded, whatever
the tensors. An encrypted frame is encrypted and decrypted as a whole, so in small pieces a tensor is on the wire while
the rest of it is still being encrypted. Nothing is ever unpickled; every size is bounded before memory is taken.

What crosses a connection at once is a parcel: whole messages, and parts of some that are larger than it. Heads say how
many frames of their message follow; those behind which none does lie in one frame, one after the other. The rest of a
message that is in parts comes later, behind heads of its number, and between other parcels. See
:mod:`farflung.comm.outbox` and :mod:`farflung.comm.inbox`.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import IntEnum
from functools import lru_cache
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
    "Head",
    "Kind",
    "Landing",
    "Message",
    "Route",
    "Unauthorized",
    "WireError",
    "begin",
    "encode",
    "head_in",
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
"""The same where nothing is encrypted: a tensor of up to this size comes in one frame."""

_HEADER = struct.Struct("<2sBBIQIIIIIiII")
_PARTS = struct.Struct("<II")
"""The last two numbers of a header; see :class:`Head`."""
_PARTS_AT = _HEADER.size - _PARTS.size
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


class Unauthorized(WireError):
    """A message in due form that its sender may not send, or not yet."""


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
_WITHOUT_TENSORS = (Kind.PART, Kind.WITHDRAWN)


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


class Message(NamedTuple):
    """One decoded message; control kinds carry JSON as a uint8 tensor."""

    kind: Kind
    view: int
    tag: Tag
    payload: Payload
    route: Route = DIRECT


class Head(NamedTuple):
    """The beginning of a message, or of more of it.

    Args:
      kind: of message, or of part.
      view: whose.
      tag: of the message.
      route: the way that it takes.
      number: of a message in parts among those of its connection, from 1 on; 0: it is whole.
      follow: how many frames behind it belong to it.
      layout: of its tensors; ``None``: it has none.
      nbytes: of itself.
    """

    kind: Kind
    view: int
    tag: Tag
    route: Route
    number: int
    follow: int
    layout: _Layout | None
    nbytes: int

    def check(self, max_nbytes: int) -> None:
        """Raises :class:`WireError` where the payload is larger than so many bytes."""
        if self.layout is not None and self.layout.nbytes > max_nbytes:
            raise WireError(
                f"a payload of {self.layout.nbytes:,} bytes, where messages of this run have at most {max_nbytes:,}"
            )


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
    """The head of a message of which only some frames follow."""
    return b"".join((head[:_PARTS_AT], _PARTS.pack(number, follow), head[_HEADER.size :]))


def part(kind: Kind, number: int, follow: int) -> bytes:
    """A head without tensors: of more frames of a message, or of the end of one that is not whole."""
    return _HEADER.pack(MAGIC, VERSION, kind, 0, 0, 0, 0, 0, *DIRECT, number, follow)


def head_in(frame: memoryview, begin: int = 0) -> Head:
    """The head at a place of a frame; more may follow in it.

    Raises:
      WireError: there is none.
    """
    room = len(frame) - begin
    if room < _HEADER.size:
        raise WireError(f"a header of {room} bytes")
    magic, version, kind, view, exchange, part, hop, described, *route, number, follow = _HEADER.unpack_from(
        frame, begin
    )
    if magic != MAGIC or version != VERSION or kind >= len(_KINDS):
        raise WireError("not a frame of this protocol and version")
    tag = Tag(exchange, part, hop)
    if kind in _WITHOUT_TENSORS:
        return Head(_KINDS[kind], view, tag, DIRECT, number, follow, None, _HEADER.size)
    end = _HEADER.size + described
    if end > room:
        raise WireError("a description that ends early")
    layout = _layout(bytes(frame[begin + _HEADER.size : begin + end]))
    if layout.head_nbytes > room:
        raise WireError("fewer bytes than described")
    return Head(_KINDS[kind], view, tag, Route(*route), number, follow, layout, layout.head_nbytes)


class Landing:
    """A message whose frames arrive: large tensors are copied to their place as they come.

    Args:
      head: of it.
      described: the bytes of its head.
      piece: bytes of each piece of a large tensor but the last.
      memory: gives an aligned tensor of so many bytes.
    """

    def __init__(
        self, head: Head, described: memoryview, piece: int, memory: Callable[[int], Tensor]
    ) -> None:
        self._head, self._described = head, described
        self._piece, self._memory = piece, memory
        self._large = head.layout.large if head.layout else []
        self._come: list[Tensor] = []
        """The bytes of large tensors that are whole."""
        self._begun: Tensor | None = None
        self._at = 0

    @property
    def whole(self) -> bool:
        return len(self._come) == len(self._large)

    def take(self, frame: Buffer) -> None:
        """The next frame.

        Raises:
          WireError: it is none of this message.
        """
        if self.whole:
            raise WireError("more frames than described")
        nbytes = self._large[len(self._come)]
        due = min(self._piece, nbytes - self._at)
        if len(frame) != due:
            raise WireError(f"{len(frame)} bytes where {due} were described")
        if self._begun is None:
            self._begun = self._memory(nbytes)
        self._begun[self._at : self._at + due].copy_(torch.frombuffer(frame, dtype=torch.uint8))
        self._at += due
        if self._at == nbytes:
            self._come.append(self._begun)
            self._begun, self._at = None, 0

    def message(self) -> Message:
        """Makes the message, once it is whole.

        Raises:
          WireError: it is a head without a message.
        """
        head, layout, large = self._head, self._head.layout, iter(self._come)
        if layout is None:
            raise WireError("no message")
        tensors = [leaf.read(self._described, large) for leaf in layout.leaves]
        payload = _payload(layout.tree, iter(tensors)) if layout.nested else Payload(tuple(tensors))
        return Message(head.kind, head.view, head.tag, payload, head.route)


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

    def read(self, described: memoryview, large: Iterator[Tensor]) -> Tensor:
        if self.numel == 0:
            return torch.empty(self.shape, dtype=self.dtype)
        if self.at is None:
            flat = next(large)
        else:
            # Copied as bytes, since they may lie at any address; torch aligns the copy.
            flat = torch.frombuffer(described, dtype=torch.uint8, count=self.nbytes, offset=self.at).clone()
        tensor = flat.view(self.dtype)
        return tensor if len(self.shape) == 1 else tensor.view(self.shape)


@dataclass(frozen=True, slots=True)
class _Layout:
    """What a description says."""

    leaves: tuple[_Leaf, ...]
    tree: _Tree
    nested: bool
    nbytes: int
    head_nbytes: int
    large: list[int]
    """Bytes of those that are not in the head."""


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
    leaves, nbytes = [], 0
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
    nested = any(node is not None for node in tree)
    large = [leaf.nbytes for leaf in leaves if leaf.at is None]
    return _Layout(tuple(leaves), tree, nested, nbytes, at, large)


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
