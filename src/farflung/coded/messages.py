"""Messages between coordinator and devices: a line of JSON, tensors, and the tag of each kind.

Each message is checked against its dataclass before use: kind, names, types, ranges, and the number and shape
of tensors. Any other form raises :class:`MalformedMessage`, which the receiver counts before it continues.
"""

from __future__ import annotations

import dataclasses
import json
import sys
import typing
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar, get_type_hints

import torch
from torch import Tensor

from farflung.comm.channel import PURPOSES, PurposeBase
from farflung.types import Communicator, Payload, Tag

__all__ = [
    "COMMAND",
    "OPERAND",
    "REPORT",
    "REQUEST",
    "BlockPart",
    "BlockSource",
    "Built",
    "CodedPurpose",
    "Columns",
    "Command",
    "Drop",
    "End",
    "Failed",
    "Fetch",
    "Hello",
    "Leaving",
    "Lost",
    "MalformedMessage",
    "Meet",
    "Message",
    "Multiply",
    "Probe",
    "Ready",
    "Report",
    "Rows",
    "Welcome",
    "build_answer_tag",
    "build_reply_tag",
    "decode_message",
    "encode_message",
    "send_message",
]


class CodedPurpose(PurposeBase):
    """Purposes of the messages of coded training, numbered after those of :class:`farflung.comm.Purpose`."""

    MEMBERS = 13, "members", "the registry of members"
    ENCODING = 14, "encoding", "pieces of other devices' data"
    OPERANDS = 15, "operands", "what to multiply by"
    ANSWERS = 16, "answers", "products"


PURPOSES.update({int(purpose): purpose for purpose in CodedPurpose})

COMMAND = Tag(CodedPurpose.MEMBERS.build_exchange_id(0), 0)
"""Tag of commands from the coordinator to a device."""
REPORT = Tag(CodedPurpose.MEMBERS.build_exchange_id(0), 1)
"""Tag of reports from a device to the coordinator."""
REQUEST = Tag(CodedPurpose.MEMBERS.build_exchange_id(0), 2)
"""Tag of requests from one device to another."""
OPERAND = Tag(CodedPurpose.OPERANDS.build_exchange_id(0))
"""Tag of requested products, and of the end."""

_MAX_TEXT_NBYTES = 1 << 20
_MAX_STRING, _MAX_LIST, _MAX_FLOAT = 1 << 12, 1 << 12, sys.float_info.max
_EMPTY_TENSOR = torch.empty(0, dtype=torch.float64)


def build_reply_tag(number: int) -> Tag:
    """Returns the tag of the answer to a numbered request between devices."""
    return Tag(CodedPurpose.ENCODING.build_exchange_id(number))


def build_answer_tag(round: int) -> Tag:
    """Returns the tag of the products of one round."""
    return Tag(CodedPurpose.ANSWERS.build_exchange_id(round))


async def send_message(comm: Communicator, payload: Payload, rank: int, tag: Tag) -> None:
    """Sends a message on the communication thread, as a launched coroutine; drops it if the rank is lost."""
    comm.send(payload, rank, tag)


class MalformedMessage(ValueError):
    """Raised for a message that does not have the form of its kind."""


@dataclass(frozen=True, slots=True)
class BlockSource:
    """A term of a block's sum.

    Args:
      rank: Rank of the device that holds the source block.
      block: Number of the source block.
      weight: Coefficient of the source block.
    """

    rank: int
    block: int
    weight: float


@dataclass(frozen=True, slots=True)
class BlockPart:
    """The rows of one partition in a block of columns, and their sources.

    Args:
      partition: Number of the partition.
      rows: Number of its rows.
      is_raw: True if the sources are blocks of rows, of which they sum the requested columns; False if they are
        blocks of columns, whose part is taken unchanged.
      sources: Terms of the sum.
    """

    partition: int
    rows: int
    is_raw: bool
    sources: tuple[BlockSource, ...]


# --- to a device ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Welcome:
    """Tells a device that it is a member.

    Args:
      run: Name of the run.
      raw: Block number of the device's own data; -1 if it has none.
    """

    run: str
    raw: int


@dataclass(frozen=True, slots=True)
class Meet:
    """Announces another member, which may request blocks or be asked for them.

    Args:
      rank: Rank of the other member.
      number: Number of their meeting.
      first: True if this device prepares and then reports that it is ready. The other one, of a higher rank, is
        told to connect only then, so that it is expected.
      peer: Address of the other member, see :meth:`farflung.comm.Peer.to_json`; ``None`` if known.
    """

    rank: int
    number: int
    first: bool
    peer: str | None = None


@dataclass(frozen=True, slots=True)
class Lost:
    """Announces the loss of another device, which ends all waits for it.

    Args:
      rank: Rank of the lost device.
    """

    rank: int


@dataclass(frozen=True, slots=True)
class Rows:
    """Orders a block of rows.

    Args:
      block: Number of the block.
      rows: Height of the block.
      features: Width of the block.
      sources: Terms of the sum.
    """

    block: int
    rows: int
    features: int
    sources: tuple[BlockSource, ...]


@dataclass(frozen=True, slots=True)
class Columns:
    """Orders a block of columns, or further parts of one.

    Args:
      block: Number of the block.
      weights: Weight of each column block.
      bounds: First column of each column block, and the end of the last one.
      parts: Parts to fetch.
    """

    block: int
    weights: tuple[float, ...]
    bounds: tuple[int, ...]
    parts: tuple[BlockPart, ...]


@dataclass(frozen=True, slots=True)
class Multiply:
    """Orders products, piece by piece.

    Args:
      round: Number of the round.
      since: Number of the first round that is not over.
      blocks: Blocks to multiply, all of rows or all of columns.
      partitions: Partitions of the residuals in the operand, in order. The residuals of a single partition may
        multiply transposed blocks of rows. Empty if the operand has weights.
      length: Number of rows of the highest block, or columns of the widest.
      pieces: Number of pieces into which the length is cut; each is answered separately.
      first: Piece to begin with.
      operand: (features, outputs) weights, or (samples, outputs) residuals.
    """

    round: int
    since: int
    blocks: tuple[int, ...]
    partitions: tuple[int, ...]
    length: int
    pieces: int
    first: int
    operand: Tensor = _EMPTY_TENSOR


@dataclass(frozen=True, slots=True)
class Drop:
    """Releases blocks that are no longer needed."""

    blocks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Probe:
    """Asks for a sign of life, which a device answers with a message of the same kind.

    Args:
      nbytes: Number of bytes that a device has exchanged with all others so far.
    """

    nbytes: int = 0


@dataclass(frozen=True, slots=True)
class End:
    """Releases a device.

    Args:
      reason: Reason for the end; empty if training is over.
    """

    reason: str = ""


# --- to the coordinator ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Hello:
    """Asks for membership of a device.

    Args:
      partition: Name of its data; empty if it has none.
      rows: Number of rows of its data.
      features: Number of features of its data; 0 without data.
      held: Numbers of coded blocks from an earlier connection.
      run: Run of these blocks; empty without blocks.
      labels: Labels of its data, (rows,) float64.
    """

    partition: str
    rows: int
    features: int
    held: tuple[int, ...] = ()
    run: str = ""
    labels: Tensor = _EMPTY_TENSOR


@dataclass(frozen=True, slots=True)
class Ready:
    """Reports that the device is ready for an announced one.

    Args:
      number: Number of their meeting.
    """

    number: int


@dataclass(frozen=True, slots=True)
class Built:
    """Reports that a block, or parts of it, are built.

    Args:
      block: Number of the block.
      partitions: Partitions whose parts were built, in a block of columns.
      fetched_nbytes: Number of bytes that other devices have sent for it.
    """

    block: int
    partitions: tuple[int, ...]
    fetched_nbytes: int


@dataclass(frozen=True, slots=True)
class Failed:
    """Reports that a block could not be built.

    Args:
      block: Number of the block.
      rank: Rank of the device that is blamed for the failure.
      detail: Description of the failure.
      fetched_nbytes: Number of bytes that other devices have sent for it, and that are kept.
    """

    block: int
    rank: int
    detail: str
    fetched_nbytes: int = 0


@dataclass(frozen=True, slots=True)
class Leaving:
    """Reports that the device wants to leave; it stays until it is released."""


# --- between devices ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Cancel:
    """Cancels pending requests.

    Args:
      replies: Numbers of their answers.
    """

    replies: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Fetch:
    """Requests some rows of a block.

    Args:
      reply: Number of the answer's tag.
      block: Block that is raw, of coded rows, or of columns.
      begin: First row.
      end: End of the rows, exclusive.
      partition: Partition of a block of columns; -1 for a block of rows.
      weights: Weights of column blocks to sum, for a block of rows; empty for whole rows.
      bounds: First column of each column block, and the end of the last one.
    """

    reply: int
    block: int
    begin: int
    end: int
    partition: int = -1
    weights: tuple[float, ...] = ()
    bounds: tuple[int, ...] = ()


Command: TypeAlias = Welcome | Meet | Lost | Rows | Columns | Multiply | Drop | Probe | End
Report: TypeAlias = Hello | Ready | Built | Failed | Leaving | Probe
Message: TypeAlias = Command | Report | Fetch | Cancel
M = TypeVar("M", bound=Message)

_KINDS: dict[str, type[Message]] = {kind.__name__.lower(): kind for kind in typing.get_args(Message)}
_FIELDS: dict[Any, dict[str, Any]] = {
    kind: get_type_hints(kind) for kind in (*_KINDS.values(), BlockSource, BlockPart)
}


def encode_message(message: Message) -> Payload:
    """Encodes a message."""
    body: dict[str, Any] = {"": type(message).__name__.lower()}
    tensors = []
    for name, kind in _FIELDS[type(message)].items():
        value = getattr(message, name)
        if kind is Tensor:
            tensors.append(value)
        elif value is not None:
            body[name] = _to_json(value)
    text = json.dumps(body, separators=(",", ":")).encode()
    return Payload((torch.frombuffer(bytearray(text), dtype=torch.uint8), *tensors))


def decode_message(payload: Payload, kinds: Iterable[type[M]]) -> M:
    """Decodes a message of one of the given kinds.

    Raises:
      MalformedMessage: it has another kind or form.
    """
    text, *tensors = list(payload.iter_tensors()) or [_EMPTY_TENSOR]
    if text.dtype != torch.uint8 or text.dim() != 1 or text.numel() > _MAX_TEXT_NBYTES:
        raise MalformedMessage("no text in front")
    try:
        body = json.loads(text.numpy().tobytes())
    except (ValueError, RecursionError):
        raise MalformedMessage("no JSON") from None
    if not isinstance(body, dict):
        raise MalformedMessage("no JSON object")
    kind: Any = _KINDS.get(str(body.pop("", None)))
    if kind is None or kind not in kinds:
        raise MalformedMessage("a kind that is not due here")
    values: dict[str, Any] = {}
    for name, expected_type in _FIELDS[kind].items():
        if expected_type is Tensor:
            values[name] = _pop_tensor(tensors)
        elif name not in body:
            if expected_type == str | None:
                continue
            raise MalformedMessage(f"{kind.__name__} without {name}")
        else:
            values[name] = _parse_value(body.pop(name), expected_type)
    if body or tensors:
        raise MalformedMessage(f"{kind.__name__} with more than it has")
    message: M = kind(**values)
    return message


def _pop_tensor(tensors: list[Tensor]) -> Tensor:
    if not tensors:
        raise MalformedMessage("a tensor is missing")
    tensor = tensors.pop(0)
    if tensor.dtype != torch.float64 or tensor.dim() > 2 or not bool(torch.isfinite(tensor).all()):
        raise MalformedMessage("a tensor that is no matrix of finite float64 numbers")
    return tensor


def _to_json(value: Any) -> Any:
    if isinstance(value, tuple):
        return [_to_json(entry) for entry in value]
    if dataclasses.is_dataclass(value):
        return [_to_json(getattr(value, field.name)) for field in dataclasses.fields(value)]
    return value


def _parse_value(value: Any, expected_type: Any) -> Any:
    """Checks a JSON value against the expected type, and converts it."""
    if expected_type is float:
        if type(value) not in (int, float) or not -_MAX_FLOAT <= value <= _MAX_FLOAT:
            raise MalformedMessage("no finite number")
        return float(value)
    expected_type = str if expected_type == str | None else expected_type
    if expected_type in (int, str, bool):
        if (
            type(value) is not expected_type
            or (expected_type is int and not -1 <= value < 1 << 48)
            or (expected_type is str and (len(value) > _MAX_STRING or not value.isprintable()))
        ):
            raise MalformedMessage(f"no {expected_type.__name__} in its range")
        return value
    if not isinstance(value, list) or len(value) > _MAX_LIST:
        raise MalformedMessage("no list, or too long a one")
    if typing.get_origin(expected_type) is tuple:
        return tuple(_parse_value(entry, typing.get_args(expected_type)[0]) for entry in value)
    fields = _FIELDS[expected_type]
    if len(value) != len(fields):
        raise MalformedMessage(f"no {expected_type.__name__}")
    return expected_type(
        *(_parse_value(entry, kind) for entry, kind in zip(value, fields.values(), strict=True))
    )
