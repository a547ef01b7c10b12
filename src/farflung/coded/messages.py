"""What coordinator and devices say to each other: a line of JSON, and the tensors that go with it.

Every message is checked against its dataclass before anything is used: kinds, names, types, how many tensors and of
what shape. What is not of that form raises :class:`Malformed`, and whoever reads counts it and goes on.
"""

from __future__ import annotations

import dataclasses
import json
import sys
import typing
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, TypeAlias, get_type_hints

import torch
from torch import Tensor

from farflung.types import Payload

__all__ = [
    "Built",
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
    "packed",
    "unpacked",
]

_MAX_TEXT_NBYTES = 1 << 20
_MAX_STRING, _MAX_LIST, _MAX_FLOAT = 1 << 12, 1 << 12, sys.float_info.max
_NOTHING = torch.empty(0, dtype=torch.float64)


class Malformed(ValueError):
    """A message that is not of its kind's form."""


@dataclass(frozen=True, slots=True)
class Source:
    """Where a share of a block comes from.

    Args:
      rank: the device.
      block: that it holds.
      weight: what its rows are multiplied by.
    """

    rank: int
    block: int
    weight: float


@dataclass(frozen=True, slots=True)
class Part:
    """One partition's rows of a block of columns, and where they come from.

    Args:
      partition: whose rows.
      rows: how many.
      raw: whether the sources hold the partition itself, or a coded block of its rows, and sum the columns they are
        asked for; otherwise they hold blocks of columns, whose part is taken as it is.
      sources: of it; what they give is added.
    """

    partition: int
    rows: int
    raw: bool
    sources: tuple[Source, ...]


# --- to a device ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Welcome:
    """The device is in.

    Args:
      run: whose.
      raw: the number of the block that it has brought; -1: none.
      code: of the run, as text.
      seed: by which rows are drawn.
    """

    run: str
    raw: int
    code: str
    seed: int


@dataclass(frozen=True, slots=True)
class Meet:
    """Another device is there, and may ask for blocks or be asked.

    Args:
      rank: of it.
      first: whether this end is to be ready for it first, and to say so; the other, of a higher rank and so the one
        that connects, is told then, and does not knock at a door that is not open yet.
    """

    rank: int
    first: bool


@dataclass(frozen=True, slots=True)
class Lost:
    """Another device is gone; who has not met it need not wait.

    Args:
      rank: of it.
    """

    rank: int


@dataclass(frozen=True, slots=True)
class Rows:
    """Make a coded block of rows.

    Args:
      block: its number.
      rows: its height.
      features: its width.
      index: of the code's row that the device draws; -1: ``sources`` say all.
      raw: the raw blocks, in the order of the code's columns, with weights to be drawn.
      sources: of a block whose coefficients are given.
    """

    block: int
    rows: int
    features: int
    index: int
    raw: tuple[Source, ...] = ()
    sources: tuple[Source, ...] = ()


@dataclass(frozen=True, slots=True)
class Columns:
    """Make a coded block of columns, or add parts to one.

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
      since: rounds below this one are over; what is left of them need not be done.
      blocks: to be multiplied, all of rows or all of columns.
      partitions: whose residuals lie in the operand, one after the other, and by one partition's blocks of rows may be
        multiplied, transposed; empty where they are multiplied by weights.
      length: rows of the highest block, or columns of the widest.
      pieces: how many these are cut into; each is answered by itself.
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
    """Are you there? A device answers with the same."""

    round: int


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
    """A device comes in.

    Args:
      partition: the name of what it brings; empty: nothing.
      raw: the number of the block that this is already, or -1.
      rows: of it.
      features: of a row; 0 where it brings nothing.
      held: coded blocks that it holds from an earlier meeting.
      run: the run that these are of; empty: none.
      labels: (rows,) float64.
    """

    partition: str
    raw: int
    rows: int
    features: int
    held: tuple[int, ...] = ()
    run: str = ""
    labels: Tensor = _NOTHING


@dataclass(frozen=True, slots=True)
class Ready:
    """The device is ready for another that was told of.

    Args:
      rank: of that.
    """

    rank: int


@dataclass(frozen=True, slots=True)
class Built:
    """A block is made, or has been added to.

    Args:
      block: which.
      partitions: of a block of columns, whose parts were made.
      fetched_nbytes: what other devices gave for it.
    """

    block: int
    partitions: tuple[int, ...]
    fetched_nbytes: int


@dataclass(frozen=True, slots=True)
class Failed:
    """A block could not be made.

    Args:
      block: which.
      rank: of the device that did not give what it was asked for.
      detail: what was seen.
    """

    block: int
    rank: int
    detail: str


@dataclass(frozen=True, slots=True)
class Leaving:
    """The device would like to leave, and stays until it is told to go."""


# --- between devices ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Fetch:
    """Give me some rows of a block.

    Args:
      reply: the number under which to send them.
      block: which; raw, of coded rows, or of columns.
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
Message: TypeAlias = Command | Report | Fetch

_KINDS: dict[str, type[Message]] = {kind.__name__.lower(): kind for kind in typing.get_args(Message)}
_FIELDS: dict[Any, dict[str, Any]] = {kind: get_type_hints(kind) for kind in (*_KINDS.values(), Source, Part)}


def packed(message: Message) -> Payload:
    """The message as it travels."""
    body: dict[str, Any] = {"": type(message).__name__.lower()}
    tensors = []
    for name, kind in _FIELDS[type(message)].items():
        value = getattr(message, name)
        if kind is Tensor:
            tensors.append(value)
        else:
            body[name] = _plain(value)
    text = json.dumps(body, separators=(",", ":")).encode()
    return Payload((torch.frombuffer(bytearray(text), dtype=torch.uint8), *tensors))


def unpacked(payload: Payload, kinds: Iterable[type[Message]]) -> Message:
    """A message of one of these kinds.

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
    kind = _KINDS.get(str(body.pop("", None)))
    if kind is None or kind not in kinds:
        raise Malformed("a kind that is not due here")
    values: dict[str, Any] = {}
    for name, due in _FIELDS[kind].items():
        if due is Tensor:
            values[name] = _tensor(tensors)
        elif name not in body:
            raise Malformed(f"{kind.__name__} without {name}")
        else:
            values[name] = _checked(body.pop(name), due)
    if body or tensors:
        raise Malformed(f"{kind.__name__} with more than it has")
    return kind(**values)


def _tensor(tensors: list[Tensor]) -> Tensor:
    if not tensors:
        raise Malformed("a tensor is missing")
    tensor = tensors.pop(0)
    if tensor.dtype != torch.float64 or tensor.dim() > 2 or not bool(torch.isfinite(tensor).all()):
        raise Malformed("a tensor that is no matrix of finite float64 numbers")
    return tensor


def _plain(value: Any) -> Any:
    if isinstance(value, tuple):
        return [_plain(one) for one in value]
    if dataclasses.is_dataclass(value):
        return [_plain(getattr(value, field.name)) for field in dataclasses.fields(value)]
    return value


def _checked(value: Any, due: Any) -> Any:
    """JSON as the type that is due."""
    if due is float:
        if type(value) not in (int, float) or not -_MAX_FLOAT <= value <= _MAX_FLOAT:
            raise Malformed("no finite number")
        return float(value)
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
        return tuple(_checked(one, typing.get_args(due)[0]) for one in value)
    fields = _FIELDS[due]
    if len(value) != len(fields):
        raise Malformed(f"no {due.__name__}")
    return due(*(_checked(one, kind) for one, kind in zip(value, fields.values(), strict=True)))
