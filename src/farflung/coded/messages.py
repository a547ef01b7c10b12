"""Messages between coordinator and devices: a line of JSON, the tensors beside it, and the tag that each goes by.

Each message is checked against its dataclass before anything is used: kinds, names, types, ranges, and the number and
shape of tensors. What has another form raises :class:`Malformed`; its receiver counts it and goes on.
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
    "ASK",
    "COMMAND",
    "OPERAND",
    "REPORT",
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
    "Malformed",
    "Meet",
    "Message",
    "Multiply",
    "Part",
    "Probe",
    "Ready",
    "Report",
    "Rows",
    "Source",
    "Welcome",
    "answers",
    "packed",
    "reply",
    "sent",
    "unpacked",
]


class CodedPurpose(PurposeBase):
    """What the messages of coded training are for; the numbers are those that :class:`farflung.comm.Purpose` lacks."""

    MEMBERS = 13, "members", "the registry of members"
    ENCODING = 14, "encoding", "pieces of other devices' data"
    OPERANDS = 15, "operands", "what to multiply by"
    ANSWERS = 16, "answers", "products"


PURPOSES.update({int(purpose): purpose for purpose in CodedPurpose})

COMMAND = Tag(CodedPurpose.MEMBERS.at(0), 0)
"""Commands of the coordinator to a device."""
REPORT = Tag(CodedPurpose.MEMBERS.at(0), 1)
"""Reports of a device to the coordinator."""
ASK = Tag(CodedPurpose.MEMBERS.at(0), 2)
"""Requests of one device to another."""
OPERAND = Tag(CodedPurpose.OPERANDS.at(0))
"""Products to be made, and the end."""

_MAX_TEXT_NBYTES = 1 << 20
_MAX_STRING, _MAX_LIST, _MAX_FLOAT = 1 << 12, 1 << 12, sys.float_info.max
_NOTHING = torch.empty(0, dtype=torch.float64)


def reply(number: int) -> Tag:
    """Gives the tag of the answer to a numbered request between devices."""
    return Tag(CodedPurpose.ENCODING.at(number))


def answers(round: int) -> Tag:
    """Gives the tag of the products of one round."""
    return Tag(CodedPurpose.ANSWERS.at(round))


async def sent(comm: Communicator, payload: Payload, rank: int, tag: Tag) -> None:
    """Sends a message on the thread that carries it; to be launched. One to a lost rank is dropped."""
    comm.send(payload, rank, tag)


class Malformed(ValueError):
    """A message that is not of its kind's form."""


@dataclass(frozen=True, slots=True)
class Source:
    """A term of a block's sum.

    Args:
      rank: of the device that holds the block.
      block: its number.
      weight: its coefficient.
    """

    rank: int
    block: int
    weight: float


@dataclass(frozen=True, slots=True)
class Part:
    """The rows of one partition in a block of columns, and their sources.

    Args:
      partition: its number.
      rows: of it.
      raw: whether the sources hold the partition itself, or a coded block of its rows, and sum the columns they are
        asked for; otherwise they hold blocks of columns, whose part is taken as it is.
      sources: are summed.
    """

    partition: int
    rows: int
    raw: bool
    sources: tuple[Source, ...]


# --- to a device ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Welcome:
    """The device is a member.

    Args:
      run: its name.
      raw: the number of the block that the device has brought; -1: none.
    """

    run: str
    raw: int


@dataclass(frozen=True, slots=True)
class Meet:
    """Another device is a member, and may ask for blocks or be asked.

    Args:
      rank: of it.
      number: of their meeting.
      first: whether this device gets ready for it first, and reports so. The other one, of a higher rank, connects; it
        is told only then, so that it finds an open door.
      peer: how it is reached, see :meth:`farflung.comm.Peer.to_json`; ``None`` where the world knows.
    """

    rank: int
    number: int
    first: bool
    peer: str | None = None


@dataclass(frozen=True, slots=True)
class Lost:
    """Another device is gone; waits for its arrival end.

    Args:
      rank: of it.
    """

    rank: int


@dataclass(frozen=True, slots=True)
class Rows:
    """Make a block of rows.

    Args:
      block: its number.
      rows: its height.
      features: its width.
      sources: are summed.
    """

    block: int
    rows: int
    features: int
    sources: tuple[Source, ...]


@dataclass(frozen=True, slots=True)
class Columns:
    """Make a block of columns, or add parts to one.

    Args:
      block: its number.
      weights: of each column block in it.
      bounds: where each of these begins, and the last ends.
      parts: to be fetched.
    """

    block: int
    weights: tuple[float, ...]
    bounds: tuple[int, ...]
    parts: tuple[Part, ...]


@dataclass(frozen=True, slots=True)
class Multiply:
    """Multiply, piece after piece.

    Args:
      round: its number.
      since: rounds below this one are over, and need not be carried on.
      blocks: to be multiplied, all of rows or all of columns.
      partitions: whose residuals lie in the operand, one after the other, and by one partition's blocks of rows may be
        multiplied, transposed; empty where they are multiplied by weights.
      length: rows of the highest block, or columns of the widest.
      pieces: into which these are cut; each is answered by itself.
      first: the piece to begin with.
      operand: (features, outputs) weights, or (samples, outputs) residuals.
    """

    round: int
    since: int
    blocks: tuple[int, ...]
    partitions: tuple[int, ...]
    length: int
    pieces: int
    first: int
    operand: Tensor = _NOTHING


@dataclass(frozen=True, slots=True)
class Drop:
    """These blocks are not needed any more."""

    blocks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Probe:
    """Asks for a sign of life; a device answers with the same message.

    Args:
      nbytes: of a device, the bytes that it has exchanged with all others so far.
    """

    nbytes: int = 0


@dataclass(frozen=True, slots=True)
class End:
    """The device may go.

    Args:
      reason: why; empty: training is over.
    """

    reason: str = ""


# --- to the coordinator ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Hello:
    """A device asks to become a member.

    Args:
      partition: the name of its data; empty: none.
      rows: of its data.
      features: of a row; 0 without data.
      held: coded blocks that it has kept from an earlier connection.
      run: the run that these are of; empty: none.
      labels: (rows,) float64.
    """

    partition: str
    rows: int
    features: int
    held: tuple[int, ...] = ()
    run: str = ""
    labels: Tensor = _NOTHING


@dataclass(frozen=True, slots=True)
class Ready:
    """The device is ready for another one that it was told of.

    Args:
      number: of their meeting.
    """

    number: int


@dataclass(frozen=True, slots=True)
class Built:
    """A block is made, or has been added to.

    Args:
      block: its number.
      partitions: of a block of columns, whose parts were made.
      fetched_nbytes: that other devices gave for it.
    """

    block: int
    partitions: tuple[int, ...]
    fetched_nbytes: int


@dataclass(frozen=True, slots=True)
class Failed:
    """A block could not be made.

    Args:
      block: its number.
      rank: of the device that the failure is blamed on.
      detail: what was seen.
      fetched_nbytes: that other devices have given for it, and that are kept.
    """

    block: int
    rank: int
    detail: str
    fetched_nbytes: int = 0


@dataclass(frozen=True, slots=True)
class Leaving:
    """The device asks to leave, and stays until it is told to go."""


# --- between devices ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Cancel:
    """Takes back requests that are not waited for any more.

    Args:
      replies: the numbers of their answers.
    """

    replies: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Fetch:
    """Asks for some rows of a block.

    Args:
      reply: the number of the answer's tag.
      block: raw, of coded rows, or of columns.
      begin: the first row.
      end: behind the last.
      partition: of a block of columns, whose rows; -1: it is one of rows.
      weights: of a block of rows, by column block, where their sum is wanted; empty: whole rows.
      bounds: where each column block begins, and the last ends.
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
_FIELDS: dict[Any, dict[str, Any]] = {kind: get_type_hints(kind) for kind in (*_KINDS.values(), Source, Part)}


def packed(message: Message) -> Payload:
    """Encodes a message."""
    body: dict[str, Any] = {"": type(message).__name__.lower()}
    tensors = []
    for name, kind in _FIELDS[type(message)].items():
        value = getattr(message, name)
        if kind is Tensor:
            tensors.append(value)
        elif value is not None:
            body[name] = _plain(value)
    text = json.dumps(body, separators=(",", ":")).encode()
    return Payload((torch.frombuffer(bytearray(text), dtype=torch.uint8), *tensors))


def unpacked(payload: Payload, kinds: Iterable[type[M]]) -> M:
    """Decodes a message of one of these kinds.

    Raises:
      Malformed: it is none.
    """
    text, *tensors = list(payload.tensors()) or [_NOTHING]
    if text.dtype != torch.uint8 or text.dim() != 1 or text.numel() > _MAX_TEXT_NBYTES:
        raise Malformed("no text in front")
    try:
        body = json.loads(text.numpy().tobytes())
    except (ValueError, RecursionError):
        raise Malformed("no JSON") from None
    if not isinstance(body, dict):
        raise Malformed("no JSON object")
    kind: Any = _KINDS.get(str(body.pop("", None)))
    if kind is None or kind not in kinds:
        raise Malformed("a kind that is not due here")
    values: dict[str, Any] = {}
    for name, expected_type in _FIELDS[kind].items():
        if expected_type is Tensor:
            values[name] = _tensor(tensors)
        elif name not in body:
            if expected_type == str | None:
                continue
            raise Malformed(f"{kind.__name__} without {name}")
        else:
            values[name] = _checked(body.pop(name), expected_type)
    if body or tensors:
        raise Malformed(f"{kind.__name__} with more than it has")
    message: M = kind(**values)
    return message


def _tensor(tensors: list[Tensor]) -> Tensor:
    if not tensors:
        raise Malformed("a tensor is missing")
    tensor = tensors.pop(0)
    if tensor.dtype != torch.float64 or tensor.dim() > 2 or not bool(torch.isfinite(tensor).all()):
        raise Malformed("a tensor that is no matrix of finite float64 numbers")
    return tensor


def _plain(value: Any) -> Any:
    if isinstance(value, tuple):
        return [_plain(entry) for entry in value]
    if dataclasses.is_dataclass(value):
        return [_plain(getattr(value, field.name)) for field in dataclasses.fields(value)]
    return value


def _checked(value: Any, due: Any) -> Any:
    """Checks JSON against the type that is due, and converts it."""
    if due is float:
        if type(value) not in (int, float) or not -_MAX_FLOAT <= value <= _MAX_FLOAT:
            raise Malformed("no finite number")
        return float(value)
    due = str if due == str | None else due
    if due in (int, str, bool):
        if (
            type(value) is not due
            or (due is int and not -1 <= value < 1 << 48)
            or (due is str and (len(value) > _MAX_STRING or not value.isprintable()))
        ):
            raise Malformed(f"no {due.__name__} in its range")
        return value
    if not isinstance(value, list) or len(value) > _MAX_LIST:
        raise Malformed("no list, or too long a one")
    if typing.get_origin(due) is tuple:
        return tuple(_checked(entry, typing.get_args(due)[0]) for entry in value)
    fields = _FIELDS[due]
    if len(value) != len(fields):
        raise Malformed(f"no {due.__name__}")
    return due(*(_checked(entry, kind) for entry, kind in zip(value, fields.values(), strict=True)))
