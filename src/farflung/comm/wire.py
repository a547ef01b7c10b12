"""Wire format: messages as frames, with a small fixed header that is checked first, then the bytes of the tensors.

A message is a head, which also carries tensors of up to :data:`INLINE_NBYTES` bytes as long as it fits in
:data:`MAX_INLINE_HEAD_NBYTES`, and one frame for each other tensor. Nothing is unpickled; every size is bounded
before memory is allocated. :mod:`farflung.comm.records` describes how frames cross a connection.
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
    "DIRECT_ROUTE",
    "INLINE_NBYTES",
    "MAGIC",
    "MAX_INLINE_HEAD_NBYTES",
    "VERSION",
    "Frame",
    "Head",
    "Message",
    "MessageKind",
    "RelayRoute",
    "Unauthorized",
    "WireError",
    "encode",
    "parse_json",
    "read_head",
    "supports_dtype",
]

Frame: TypeAlias = "bytes | bytearray | memoryview"

MAGIC = b"FF"
VERSION = 5
INLINE_NBYTES = 4096
"""Largest tensor that is stored in the head, while the head has at most :data:`MAX_INLINE_HEAD_NBYTES`."""
MAX_INLINE_HEAD_NBYTES = 1 << 17
"""Largest head with tensors in it, in bytes."""
MAX_LARGE_TENSORS = 256
"""Most tensors outside of the head."""

_HEADER = struct.Struct("<2sBBIQIIIIIi")
_ALIGNMENT = 8
"""Multiple of bytes to which the description and each small tensor are padded."""
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
"""Largest product of an empty tensor's other dimensions, from which torch computes strides."""
_MAX_DEPTH = 8
_SHAPES = [struct.Struct(f"<BB{dims}Q") for dims in range(_MAX_DIMS + 1)]


class WireError(ValueError):
    """Error of a frame that violates this protocol."""

    nbytes: int | None = None
    """Bytes of the message, if known."""


class Unauthorized(WireError):
    """Error of a well-formed message that its sender may not send, or not yet."""


class MessageKind(IntEnum):
    """Kind of a message."""

    DATA = 0
    HELLO = 1
    LEAVE = 2
    ABORT = 3
    WAITING = 4
    LOST = 5
    """A rank for which the sender relays is lost."""


_KINDS = tuple(MessageKind)


class RelayRoute(NamedTuple):
    """Route of a message that a third member relays.

    Args:
      source: Rank of the sender.
      destination: Rank of the receiver.
      priority: The relay's priority for it.
    """

    source: int
    destination: int
    priority: int


DIRECT_ROUTE = RelayRoute(0, 0, 0)
"""Route of a message that is not relayed."""


class Message(NamedTuple):
    """A decoded message; control kinds carry JSON as a uint8 tensor."""

    kind: MessageKind
    view: int
    tag: Tag
    payload: Payload
    route: RelayRoute = DIRECT_ROUTE


class Head(NamedTuple):
    """Head of a message.

    Args:
      kind: Kind of the message.
      view: Number of the view.
      tag: Tag of the message.
      route: Route of the message.
      layout: Layout of its tensors.
      frame: Bytes of the head itself.
    """

    kind: MessageKind
    view: int
    tag: Tag
    route: RelayRoute
    layout: _Layout
    frame: Frame

    @property
    def has_large_first_part(self) -> bool:
        """Returns True if the payload's first part is a tensor with a frame of its own."""
        return self.layout.tree[:1] == [None] and self.layout.leaves[0].offset is None

    def build_message(self, large_tensors: Sequence[Tensor] = ()) -> Message:
        """Builds the message.

        Args:
          large_tensors: Tensors that have frames of their own, as bytes.
        """
        layout, remaining = self.layout, iter(large_tensors)
        tensors = [leaf.read(self.frame, remaining) for leaf in layout.leaves]
        payload = _build_payload(layout.tree, iter(tensors)) if layout.is_nested else Payload(tuple(tensors))
        return Message(self.kind, self.view, self.tag, payload, self.route)


def encode(
    kind: MessageKind, view: int, tag: Tag, payload: Payload, *, route: RelayRoute = DIRECT_ROUTE
) -> list[Frame]:
    """Encodes a message as frames: its head, and one for each large tensor, which is not copied.

    Raises:
      ValueError: the payload has more tensors than fit in a message.
    """
    tensors: list[Tensor] = []
    description = _encode_description(_collect_structure(payload, tensors))
    head: list[Frame] = [b"", description]
    frames: list[Frame] = []
    offset = _HEADER.size + len(description)
    for tensor in tensors:
        dense = tensor.detach().contiguous()
        if not _is_inline(dense.nbytes, offset):
            frames.append(dense.reshape(-1).view(torch.uint8).numpy().data)
            continue
        # NumPy knows no bfloat16.
        head.append((dense.view(torch.int16) if dense.dtype == torch.bfloat16 else dense).numpy().data)
        head.append(_PADDING[dense.nbytes % _ALIGNMENT])
        offset += dense.nbytes + -dense.nbytes % _ALIGNMENT
    if len(frames) > MAX_LARGE_TENSORS or len(description) > MAX_INLINE_HEAD_NBYTES:
        raise ValueError(f"a payload of {len(tensors)} tensors is more than fits in a message")
    head[0] = _HEADER.pack(
        MAGIC, VERSION, kind, view, tag.exchange, tag.part, tag.hop, len(description), *route
    )
    return [b"".join(head), *frames]


def supports_dtype(dtype: torch.dtype) -> bool:
    """Returns True if tensors of this type are sent as they are; others are sent as bytes."""
    return dtype in _CODES


def read_head(frame: Frame, max_nbytes: float = math.inf) -> Head:
    """Reads the head of a message.

    Args:
      frame: Bytes of the head.
      max_nbytes: Most bytes of a payload.

    Raises:
      WireError: the frame is malformed, or the payload is larger.
    """
    if len(frame) < _HEADER.size:
        raise WireError(f"a header of {len(frame)} bytes")
    magic, version, kind, view, exchange, part, hop, description_nbytes, *route = _HEADER.unpack_from(frame)
    if magic != MAGIC or version != VERSION or kind >= len(_KINDS):
        raise WireError("not a frame of this protocol and version")
    end = _HEADER.size + description_nbytes
    if end > len(frame):
        raise WireError("a description that ends early")
    layout = _parse_layout(bytes(frame[_HEADER.size : end]))
    if layout.head_nbytes != len(frame):
        raise WireError(f"{len(frame)} bytes where {layout.head_nbytes} were described")
    if layout.nbytes > max_nbytes:
        error = WireError(
            f"a payload of {layout.nbytes:,} bytes, where messages of this run have at most {max_nbytes:,}"
        )
        error.nbytes = len(frame) + sum(layout.large_nbytes)
        raise error
    return Head(_KINDS[kind], view, Tag(exchange, part, hop), RelayRoute(*route), layout, frame)


def _is_inline(nbytes: int, offset: int) -> bool:
    """Returns True if a tensor is stored in the head, which is ``offset`` bytes long without it."""
    return nbytes == 0 or (nbytes <= INLINE_NBYTES and offset + nbytes <= MAX_INLINE_HEAD_NBYTES)


# --- payload structure ----------------------------------------------------------------------------------------------

_Structure: TypeAlias = "tuple[_Structure | tuple[torch.dtype, torch.Size], ...]"
"""Types and shapes of a payload's tensors, as a key."""
_Tree: TypeAlias = "list[_Tree | None]"
"""Nested lists of a payload, with None for each tensor."""


def _collect_structure(payload: Payload, tensors: list[Tensor]) -> _Structure:
    structure: list[Any] = []
    for part in payload.parts:
        if isinstance(part, Payload):
            structure.append(_collect_structure(part, tensors))
        else:
            structure.append((part.dtype, part.shape))
            tensors.append(part)
    return tuple(structure)


@lru_cache(maxsize=1024)
def _encode_description(structure: _Structure) -> bytes:
    chunks = [bytes((_NESTED, len(structure)))]

    def describe(nodes: _Structure) -> None:
        for node in nodes:
            if node and isinstance(node[0], torch.dtype):
                dtype, shape = node
                chunks.append(_SHAPES[len(shape)].pack(_CODES[dtype], len(shape), *shape))
            else:
                chunks.append(bytes((_NESTED, len(node))))
                describe(node)

    describe(structure)
    encoded = b"".join(chunks)
    return encoded + bytes(-(_HEADER.size + len(encoded)) % _ALIGNMENT)


@dataclass(frozen=True, slots=True)
class _Leaf:
    """A tensor of a message; ``offset`` is its place in the head, or None if it has a frame of its own."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    numel: int
    offset: int | None

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize

    def read(self, frame: Frame, large: Iterator[Tensor]) -> Tensor:
        if self.numel == 0:
            return torch.empty(self.shape, dtype=self.dtype)
        if self.offset is None:
            flat = next(large)
        else:
            # Copied as bytes, since they may lie at any address; torch aligns the copy.
            flat = torch.frombuffer(frame, dtype=torch.uint8, count=self.nbytes, offset=self.offset).clone()
        tensor = flat.view(self.dtype)
        return tensor if len(self.shape) == 1 else tensor.view(self.shape)


@dataclass(frozen=True, slots=True)
class _Layout:
    """Parsed description of a message's tensors."""

    leaves: tuple[_Leaf, ...]
    tree: _Tree
    is_nested: bool
    nbytes: int
    head_nbytes: int
    large_nbytes: list[int]
    """Bytes of each tensor outside of the head."""


@lru_cache(maxsize=1024)
def _parse_layout(description: bytes) -> _Layout:
    """Parses a description; raises :class:`WireError` if it is malformed, which is not cached."""
    specs: list[tuple[torch.dtype, tuple[int, ...]]] = []
    try:
        if description[0] != _NESTED:
            raise WireError("no payload")
        tree, end = _read_tree(description, 2, description[1], 0, specs)
    except (IndexError, struct.error) as error:
        raise WireError(f"a malformed description: {error}") from None
    if not 0 <= len(description) - end < _ALIGNMENT or any(description[end:]):
        raise WireError("a description longer than its contents")
    offset = _HEADER.size + len(description)
    leaves, nbytes = [], 0
    for dtype, shape in specs:
        numel = math.prod(shape)
        size = numel * dtype.itemsize
        nbytes += size
        if not _is_inline(size, offset):
            leaves.append(_Leaf(dtype, shape, numel, None))
            continue
        if size == 0 and math.prod(max(dim, 1) for dim in shape) > _MAX_EXTENT:
            raise WireError("an empty tensor of absurd dimensions")
        leaves.append(_Leaf(dtype, shape, numel, offset))
        offset += size + -size % _ALIGNMENT
    nested = any(node is not None for node in tree)
    large = [leaf.nbytes for leaf in leaves if leaf.offset is None]
    if len(large) > MAX_LARGE_TENSORS:
        raise WireError(f"{len(large)} large tensors")
    return _Layout(tuple(leaves), tree, nested, nbytes, offset, large)


def _read_tree(
    description: bytes, offset: int, count: int, depth: int, specs: list[tuple[torch.dtype, tuple[int, ...]]]
) -> tuple[_Tree, int]:
    """Reads the descriptions of ``count`` parts; returns their tree and the end of the description."""
    if depth > _MAX_DEPTH:
        raise WireError("nested too deep")
    tree: _Tree = []
    for _ in range(count):
        code, dims = description[offset], description[offset + 1]
        if code == _NESTED:
            inner, offset = _read_tree(description, offset + 2, dims, depth + 1, specs)
            tree.append(inner)
            continue
        if dims > _MAX_DIMS:
            raise WireError(f"{dims} dimensions")
        shape_struct = _SHAPES[dims]
        specs.append((_DTYPES[code], shape_struct.unpack_from(description, offset)[2:]))
        tree.append(None)
        offset += shape_struct.size
    return tree, offset


def _build_payload(tree: _Tree, tensors: Iterator[Tensor]) -> Payload:
    return Payload(tuple(next(tensors) if node is None else _build_payload(node, tensors) for node in tree))


def parse_json(payload: Payload) -> dict[str, Any]:
    """Returns the JSON object in a control message.

    Raises:
      WireError: the payload is not a JSON object.
    """
    try:
        (text,) = payload.iter_tensors()
        if text.dtype != torch.uint8 or text.dim() != 1:
            raise ValueError("no text")
        body = json.loads(text.numpy().tobytes())
    except (ValueError, RecursionError) as error:
        raise WireError(f"a control message that is no JSON: {error}") from None
    if not isinstance(body, dict):
        raise WireError("a control message that is no JSON object")
    return body
