"""Messages as frames: a small fixed header, checked before anything is used, then the tensors' own bytes.

A message is a head, which also carries tensors of up to :data:`INLINE` bytes as long as it fits in :data:`MOST_HEAD`,
and one frame for each other tensor. Nothing is ever unpickled; every size is bounded before memory is taken. How frames
cross a connection is described in :mod:`farflung.comm.records`.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterator, Sequence
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
    "MOST_HEAD",
    "VERSION",
    "Frame",
    "Head",
    "Kind",
    "Message",
    "Route",
    "Unauthorized",
    "WireError",
    "encode",
    "json_of",
    "read_head",
    "supports_dtype",
]

Frame: TypeAlias = "bytes | bytearray | memoryview"

MAGIC = b"FF"
VERSION = 5
INLINE = 4096
"""Tensors up to this many bytes ride in the head, while it has at most :data:`MOST_HEAD`."""
MOST_HEAD = 1 << 17
"""The most that a head with tensors in it has, in bytes."""
MOST_LARGE = 256
"""Tensors outside of the head, at most."""

_HEADER = struct.Struct("<2sBBIQIIIIIi")
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

    nbytes: int | None = None
    """Bytes of the message, where they are known."""


class Unauthorized(WireError):
    """A message in due form that its sender may not send, or not yet."""


class Kind(IntEnum):
    """What a message is for."""

    DATA = 0
    HELLO = 1
    LEAVE = 2
    ABORT = 3
    WAITING = 4
    LOST = 5
    """A rank that the sender relays for is lost."""


_KINDS = tuple(Kind)


class Route(NamedTuple):
    """The way of a message that a third member relays.

    Args:
      source: the sender.
      destination: the receiver.
      priority: the relay's priority for it.
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
    """The beginning of a message.

    Args:
      kind: of the message.
      view: its number.
      tag: of the message.
      route: the way that it takes.
      layout: of its tensors.
      frame: itself.
    """

    kind: Kind
    view: int
    tag: Tag
    route: Route
    layout: _Layout
    frame: Frame

    @property
    def large(self) -> list[int]:
        """Bytes of each tensor that has a frame of its own."""
        return self.layout.large

    @property
    def begins_large(self) -> bool:
        """Whether the payload's first part is a tensor that has a frame of its own."""
        return self.layout.tree[:1] == [None] and self.layout.leaves[0].at is None

    @property
    def nbytes(self) -> int:
        """Bytes of the whole message."""
        return len(self.frame) + sum(self.layout.large)

    def check(self, max_nbytes: int) -> None:
        """Raises :class:`WireError` where the payload is larger than so many bytes."""
        if self.layout.nbytes > max_nbytes:
            error = WireError(
                f"a payload of {self.layout.nbytes:,} bytes, where messages of this run have at most {max_nbytes:,}"
            )
            error.nbytes = self.nbytes
            raise error

    def message(self, large: Sequence[Tensor] = ()) -> Message:
        """Makes the message.

        Args:
          large: the tensors that have frames of their own, as bytes.
        """
        layout, rest = self.layout, iter(large)
        tensors = [leaf.read(self.frame, rest) for leaf in layout.leaves]
        payload = _payload(layout.tree, iter(tensors)) if layout.nested else Payload(tuple(tensors))
        return Message(self.kind, self.view, self.tag, payload, self.route)


def encode(kind: Kind, view: int, tag: Tag, payload: Payload, *, route: Route = DIRECT) -> list[Frame]:
    """The frames of a message: its head, and one for each large tensor, which is not copied.

    Raises:
      ValueError: the payload has more tensors than fit in a message.
    """
    tensors: list[Tensor] = []
    description = _description(_structure(payload, tensors))
    head: list[Frame] = [b"", description]
    frames: list[Frame] = []
    at = _HEADER.size + len(description)
    for tensor in tensors:
        dense = tensor.detach().contiguous()
        if not _rides(dense.nbytes, at):
            frames.append(dense.reshape(-1).view(torch.uint8).numpy().data)
            continue
        # NumPy knows no bfloat16.
        head.append((dense.view(torch.int16) if dense.dtype == torch.bfloat16 else dense).numpy().data)
        head.append(_PADDING[dense.nbytes % _ALIGNMENT])
        at += dense.nbytes + -dense.nbytes % _ALIGNMENT
    if len(frames) > MOST_LARGE or len(description) > MOST_HEAD:
        raise ValueError(f"a payload of {len(tensors)} tensors is more than fits in a message")
    head[0] = _HEADER.pack(
        MAGIC, VERSION, kind, view, tag.exchange, tag.part, tag.hop, len(description), *route
    )
    return [b"".join(head), *frames]


def supports_dtype(dtype: torch.dtype) -> bool:
    """Returns True if tensors of this type travel as they are; others travel as bytes."""
    return dtype in _CODES


def read_head(frame: Frame) -> Head:
    """Reads the head of a message.

    Raises:
      WireError: the frame is something else.
    """
    if len(frame) < _HEADER.size:
        raise WireError(f"a header of {len(frame)} bytes")
    magic, version, kind, view, exchange, part, hop, described, *route = _HEADER.unpack_from(frame)
    if magic != MAGIC or version != VERSION or kind >= len(_KINDS):
        raise WireError("not a frame of this protocol and version")
    end = _HEADER.size + described
    if end > len(frame):
        raise WireError("a description that ends early")
    layout = _layout(bytes(frame[_HEADER.size : end]))
    if layout.head_nbytes != len(frame):
        raise WireError(f"{len(frame)} bytes where {layout.head_nbytes} were described")
    return Head(_KINDS[kind], view, Tag(exchange, part, hop), Route(*route), layout, frame)


def _rides(nbytes: int, at: int) -> bool:
    """Whether a tensor rides in the head, which is ``at`` bytes long without it."""
    return nbytes == 0 or (nbytes <= INLINE and at + nbytes <= MOST_HEAD)


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
    """One tensor of a message; ``at`` is where it begins in the head, ``None`` if it has a frame of its own."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    numel: int
    at: int | None

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize

    def read(self, frame: Frame, large: Iterator[Tensor]) -> Tensor:
        if self.numel == 0:
            return torch.empty(self.shape, dtype=self.dtype)
        if self.at is None:
            flat = next(large)
        else:
            # Copied as bytes, since they may lie at any address; torch aligns the copy.
            flat = torch.frombuffer(frame, dtype=torch.uint8, count=self.nbytes, offset=self.at).clone()
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
        raise WireError("a description longer than its contents")
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
    if len(large) > MOST_LARGE:
        raise WireError(f"{len(large)} large tensors")
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
