"""Messages of coded training that are damaged on purpose."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from farflung.coded import messages
from farflung.coded.messages import (
    BlockPart,
    BlockSource,
    Built,
    Cancel,
    Columns,
    Command,
    Drop,
    End,
    Failed,
    Fetch,
    Hello,
    Leaving,
    Lost,
    Meet,
    Message,
    Multiply,
    Probe,
    Ready,
    Report,
    Rows,
    Welcome,
    encode_message,
)
from farflung.types import Payload, Tag

__all__ = ["COMMANDS", "FETCHES", "REPORTS", "WORK", "answer", "damaged", "odd_tensor", "tensors_of"]

FEATURES = 10
_SOURCES = (BlockSource(2, 1, 1.0), BlockSource(3, 0, -0.5))
COMMANDS: Sequence[Command] = (
    Welcome("run", 0),
    Meet(3, 1, first=True),
    Lost(3),
    Rows(20, 30, FEATURES, _SOURCES),
    Rows(21, 30, FEATURES, ()),
    Rows(22, 1 << 20, 1 << 14, _SOURCES),  # 128 GB
    Rows(23, 1 << 40, 1 << 40, _SOURCES),
    Columns(24, (1.0, 0.5), (0, 5, FEATURES), (BlockPart(0, 20, is_raw=True, sources=_SOURCES),)),
    Columns(25, (1.0,), (0, 1 << 20), (BlockPart(0, 1 << 14, is_raw=True, sources=_SOURCES),)),
    Columns(26, (0.0, 1.0), (5, 0, FEATURES), (BlockPart(0, 20, is_raw=False, sources=_SOURCES),)),
    Drop((1, 2, 1 << 40)),
    Probe(),
)
WORK: Sequence[Command] = (
    Multiply(1, 1, (0, 1), (), 20, 4, 0, torch.ones(FEATURES, 2, dtype=torch.float64)),
    Multiply(1, 1, (0, 1), (0,), 20, 4, 3, torch.ones(20, 2, dtype=torch.float64)),
    Multiply(1, 1, (0,), (), 20, 10**9, 0, torch.ones(FEATURES, 2, dtype=torch.float64)),
    Multiply(1, 1, (0,), (), 1 << 40, 1, 0, torch.ones(FEATURES, 2, dtype=torch.float64)),
    Multiply(1, 1, (0,), (), 20, 4, 0, torch.tensor(1.0, dtype=torch.float64)),
)
REPORTS: Sequence[Report] = (
    Hello("part 9", 3, FEATURES, (4, 5), "run", torch.ones(3, dtype=torch.float64)),
    Hello("part 9", 3, 1 << 40, (), "", torch.ones(3, dtype=torch.float64)),
    Hello("part 9", 1 << 40, FEATURES, (), "", torch.ones(3, dtype=torch.float64)),
    Hello("", 0, 0),
    Ready(0),
    Ready(2),
    Ready(1 << 40),
    Built(1, (), 8),
    Built(1 << 40, (0, 1 << 40), 1 << 40),
    Failed(1, 2, "nothing came"),
    Failed(1 << 40, 1 << 40, "nothing came"),
)
FETCHES: Sequence[Fetch | Cancel] = (
    Fetch(1, 0, 0, 10),
    Fetch(2, 1, 0, 10, -1, (1.0, 0.5), (0, 5, FEATURES)),
    Fetch(3, 8, 0, 10, 1),
    Fetch(4, 0, 0, 1 << 40),
    Fetch(5, 0, 1 << 40, 1 << 41),
    Fetch(6, 1, 10, 0),
    Fetch(7, 1, 0, 10, -1, (1.0,) * 4000, (0,) * 4000 + (FEATURES,)),
    Cancel((1, 2, 1 << 40)),
)
OTHERS: Sequence[Message] = (End("enough"), Leaving())

_ODD: Sequence[Any] = (
    -1, -2, 0, 1, 1 << 20, 1 << 40, 1 << 47, 1 << 48, 1 << 63, -(1 << 63), 10**400, 1e308, -1e308, 1.5,
    float("nan"), float("inf"), "", "x", "\ud800", "\x1b[2J", "x" * 5000, "os:system('true')", "rlnc(law='none')",
    None, True, False, [], [[]], [1], [1, 2], [[1, 2, 3.0]], [0] * 5000, {}, {"": "rows"}, [{}],
)  # fmt: skip


def tensors_of(payload: Payload) -> tuple[dict[str, Any], list[Tensor]]:
    """The text of a message, read, and its tensors."""
    text, *tensors = payload.iter_tensors()
    return json.loads(text.numpy().tobytes()), tensors


def damaged(draw: random.Random, intact: Sequence[Message]) -> Payload:
    """One of these messages, with one to three things wrong with it; at times with none."""
    body, tensors = tensors_of(encode_message(draw.choice([*intact, *intact, *OTHERS])))
    for _ in range(draw.choice((0, 1, 1, 1, 2, 3))):
        draw.choice((_change, _change, _change, _lack, _add, _tensor))(draw, body, tensors)
    text = json.dumps(body).encode()
    if draw.random() < 0.15:
        text = _scratched(draw, text)
    elif draw.random() < 0.03:
        text = draw.randbytes(draw.randrange(200))
    front = [torch.frombuffer(bytearray(text), dtype=torch.uint8)] if text else []
    if draw.random() < 0.03:
        front = [odd_tensor(draw)]
    return Payload((*front, *tensors))


def answer(draw: random.Random) -> Payload:
    """What might be a piece of a product, and is none that a device of no blocks was asked for."""
    header = torch.tensor([draw.choice((0, 1, 5, 1 << 40, -1)), draw.choice((0, 1, 7, 1 << 40, -1))])
    parts: list[Tensor | Payload] = [header, torch.ones(draw.randrange(9), 2, dtype=torch.float64)]
    for _ in range(draw.randrange(3)):
        place = draw.randrange(len(parts) + 1)
        parts[place : place + draw.randrange(2)] = [odd_tensor(draw)]
    return Payload(tuple(parts))


def odd_tensor(draw: random.Random) -> Tensor:
    """One that is not due anywhere, or of any size."""
    makes: Sequence[Callable[[], Tensor]] = (
        lambda: torch.full((draw.randrange(30), 2), float("nan"), dtype=torch.float64),
        lambda: torch.full((3,), float("inf"), dtype=torch.float64),
        lambda: torch.ones(draw.randrange(30), draw.randrange(12), dtype=torch.float64),
        lambda: torch.ones(2, 3, 4, dtype=torch.float64),
        lambda: torch.tensor(1.0, dtype=torch.float64),
        lambda: torch.ones(draw.randrange(5), dtype=torch.float32),
        lambda: torch.zeros(draw.randrange(5), dtype=torch.int64),
        lambda: torch.empty(0, dtype=torch.float64),
        lambda: torch.empty(0, 1 << 40, dtype=torch.float64),
    )
    return draw.choice(makes)()


def kept_for_later(draw: random.Random, rounds: int) -> tuple[Tag, Payload]:
    """An answer to one of so many rounds, or to one that there will never be."""
    return messages.build_answer_tag(draw.choice((draw.randrange(rounds), 1 << 30))), answer(draw)


def _odd(draw: random.Random) -> Any:
    return copy.deepcopy(draw.choice(_ODD))


def _change(draw: random.Random, body: dict[str, Any], tensors: list[Tensor]) -> None:
    del tensors
    name = draw.choice(list(body))
    value = body[name]
    if isinstance(value, list) and value and draw.random() < 0.7:
        place = draw.randrange(len(value))
        inner = value[place]
        if isinstance(inner, list) and inner and draw.random() < 0.8:
            inner[draw.randrange(len(inner))] = _odd(draw)
        else:
            value[place] = _odd(draw)
    else:
        body[name] = _odd(draw)


def _lack(draw: random.Random, body: dict[str, Any], tensors: list[Tensor]) -> None:
    if tensors and draw.random() < 0.5:
        tensors.pop()
    elif len(body) > 1:
        del body[draw.choice(list(body))]


def _add(draw: random.Random, body: dict[str, Any], tensors: list[Tensor]) -> None:
    if draw.random() < 0.5:
        tensors.append(odd_tensor(draw))
    else:
        body[draw.choice(("x", "operand", "labels", "block"))] = _odd(draw)


def _tensor(draw: random.Random, body: dict[str, Any], tensors: list[Tensor]) -> None:
    del body
    tensors[:1] = [odd_tensor(draw)]


def _scratched(draw: random.Random, text: bytes) -> bytes:
    found = bytearray(text)
    for _ in range(draw.randint(1, 4)):
        found[draw.randrange(len(found))] = draw.randrange(256)
    return bytes(found[: draw.randrange(len(found))] if draw.random() < 0.3 else found)
