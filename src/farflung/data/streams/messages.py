"""Samples as messages, and messages as samples."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, Protocol, TypeAlias

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from farflung.errors import ConfigError
from farflung.spec import imported
from farflung.types import Batch, TensorSpec

__all__ = ["Cut", "Decoder", "Messages", "Taken", "as_messages", "messages_like"]

Decoder: TypeAlias = Callable[[bytes], tuple[Tensor, Tensor]]
"""Gives inputs and targets of the one sample in a message; raises where there is none."""

_KNOWN = 64
"""Headers that are remembered; messages of one writer share theirs."""


def as_messages(rows: Batch) -> list[bytes]:
    """A message for each row: a safetensors file of its tensors ``inputs`` and ``targets``, as they are stored.

    So any library of safetensors, in any language, writes what a stream reads, and nothing is unpickled.

    >>> from farflung.types import Batch
    >>> (one,) = as_messages(Batch(torch.tensor([[1, 2]]), torch.tensor([7])))
    >>> load(one)
    {'inputs': tensor([1, 2]), 'targets': tensor(7)}
    """
    if not len(rows):
        return []
    tensors = {"inputs": rows.inputs, "targets": rows.targets}
    first = save({name: rows_of[0].contiguous() for name, rows_of in tensors.items()})
    head, begins = _head(first)
    parts = [_bytes(tensors[name]) for name in sorted(tensors, key=lambda name: begins[name])]
    return [head + b"".join(columns) for columns in zip(*parts, strict=True)]


Cut: TypeAlias = Callable[[int, int], Batch]
"""Copies of those of some samples from one number up to another."""


class Taken(NamedTuple):
    """What some messages hold.

    Args:
      cut: the samples of those that hold one, in order.
      nbytes: of each of these, as stored.
      refused: the number of every other message, and why it is none.
    """

    cut: Cut
    nbytes: list[int]
    refused: dict[int, Exception]


class Messages(Protocol):
    """How messages become rows."""

    def take(self, value: bytes) -> Any:
        """What is kept of a message until it is used.

        Raises:
          Exception: it is no sample of the workload; of any kind.
        """
        ...

    def take_all(self, values: list[bytes]) -> Taken:
        """The samples of several."""
        ...

    def nbytes(self, kept: Any) -> int:
        """The bytes of what is kept."""
        ...

    def rows(self, kept: Sequence[Any]) -> Batch:
        """The samples."""
        ...


def messages_like(rows: Batch, decoder: str | Decoder | None) -> Messages:
    """How messages become rows like these.

    Args:
      rows: at least one sample of the workload, as stored.
      decoder: what reads a message that has another form: itself, or ``module:function``.

    Raises:
      ConfigError: there is no such decoder.
    """
    specs = _Specs(_spec(rows.inputs), _spec(rows.targets))
    if decoder is None:
        return _Plain(specs)
    found = imported("decoder", decoder) if isinstance(decoder, str) else decoder
    if not callable(found):
        raise ConfigError(f"decoder {decoder!r}: not a function")
    return _Decoded(found, specs)


@dataclass(frozen=True, slots=True)
class _Specs:
    """Those of one sample."""

    inputs: TensorSpec
    targets: TensorSpec

    def check(self, inputs: Tensor, targets: Tensor) -> None:
        for name, spec, tensor in (
            ("inputs", self.inputs, inputs),
            ("targets", self.targets, targets),
        ):
            found = TensorSpec.of(tensor)
            if found != spec:
                raise ValueError(
                    f"{name} of {_words(found)}, and a sample of the workload has {_words(spec)}"
                )


@dataclass(frozen=True, slots=True)
class _Layout:
    """Where the tensors of a message of so many bytes are in it."""

    nbytes: int
    inputs: int
    targets: int


class _Plain:
    """Safetensors, kept as they came; a batch of messages with one header is one copy."""

    def __init__(self, specs: _Specs) -> None:
        self._specs = specs
        self._known: dict[bytes, _Layout] = {}
        self._last: tuple[bytes, _Layout] = b"", _Layout(-1, 0, 0)

    def take(self, value: bytes) -> bytes:
        head, layout = self._last
        if len(value) != layout.nbytes or not value.startswith(head):
            self._last = self._look(value)
        return value

    def take_all(self, values: list[bytes]) -> Taken:
        head, layout = self._last
        if list(map(len, values)).count(layout.nbytes) == len(values):
            table = _table(values, layout)
            if (table[:, : len(head)] == np.frombuffer(head, np.uint8)).all():
                return Taken(partial(self._cut, table, layout), [layout.nbytes] * len(values), {})
        return _one_by_one(self, values)

    nbytes = staticmethod(len)

    def rows(self, kept: Sequence[bytes]) -> Batch:
        layouts = list(self._known.values())  # another thread may find one more meanwhile
        if len(layouts) == 1:
            (layout,) = layouts
            return self._cut(_table(kept, layout), layout, 0, len(kept))
        layouts = [self._look(value)[1] for value in kept]
        parts = [
            self._cut(_table([value], layout), layout, 0, 1)
            for value, layout in zip(kept, layouts, strict=True)
        ]
        return Batch(torch.cat([part.inputs for part in parts]), torch.cat([part.targets for part in parts]))

    def _cut(self, table: _Table, layout: _Layout, begin: int, end: int) -> Batch:
        def tensor(at: int, spec: TensorSpec) -> Tensor:
            piece = torch.from_numpy(table[begin:end, at : at + spec.nbytes].copy())
            return piece.view(spec.dtype).view(end - begin, *spec.shape)

        return Batch(tensor(layout.inputs, self._specs.inputs), tensor(layout.targets, self._specs.targets))

    def _look(self, value: bytes) -> tuple[bytes, _Layout]:
        head = value[: 8 + int.from_bytes(value[:8], "little")]
        layout = self._known.get(head)
        if layout is None or layout.nbytes != len(value):
            try:
                tensors = load(value)
                self._specs.check(tensors["inputs"], tensors["targets"])
            except SafetensorError as error:
                raise ValueError(f"no safetensors: {error}") from None
            except KeyError as error:
                raise ValueError(f"no tensor {error}") from None
            _, begins = _head(value)
            layout = _Layout(len(value), len(head) + begins["inputs"], len(head) + begins["targets"])
            if len(self._known) == _KNOWN:
                self._known.pop(next(iter(self._known)))
            self._known[head] = layout
        return head, layout


class _Decoded:
    """Whatever a function makes samples of."""

    def __init__(self, decode: Decoder, specs: _Specs) -> None:
        self._decode, self._specs = decode, specs

    def take(self, value: bytes) -> tuple[Tensor, Tensor]:
        inputs, targets = self._decode(value)
        self._specs.check(inputs, targets)
        return inputs, targets

    def take_all(self, values: list[bytes]) -> Taken:
        return _one_by_one(self, values)

    def nbytes(self, kept: tuple[Tensor, Tensor]) -> int:
        return kept[0].nbytes + kept[1].nbytes

    def rows(self, kept: Sequence[tuple[Tensor, Tensor]]) -> Batch:
        return Batch(
            torch.stack([inputs for inputs, _ in kept]), torch.stack([targets for _, targets in kept])
        )


_Table: TypeAlias = "np.ndarray[tuple[int, int], np.dtype[np.uint8]]"
"""Messages of one length, the bytes of each in a row."""


def _table(values: Sequence[bytes], layout: _Layout) -> _Table:
    return np.frombuffer(b"".join(values), np.uint8).reshape(len(values), layout.nbytes)


def _one_by_one(messages: Messages, values: list[bytes]) -> Taken:
    kept: list[Any] = []
    refused: dict[int, Exception] = {}
    for number, value in enumerate(values):
        try:
            kept.append(messages.take(value))
        except Exception as error:
            refused[number] = error

    def cut(begin: int, end: int) -> Batch:
        return messages.rows(kept[begin:end])

    return Taken(cut, list(map(messages.nbytes, kept)), refused)


def _head(value: bytes) -> tuple[bytes, dict[str, int]]:
    """The header of safetensors, and where each tensor begins behind it."""
    end = 8 + int.from_bytes(value[:8], "little")
    described = json.loads(value[8:end])
    begins = {name: one["data_offsets"][0] for name, one in described.items() if name != "__metadata__"}
    return value[:end], begins


def _bytes(rows: Tensor) -> list[bytes]:
    """Those of each row."""
    flat = rows.contiguous().reshape(len(rows), -1).view(torch.uint8).numpy()
    return [row.tobytes() for row in flat]


def _spec(rows: Tensor) -> TensorSpec:
    return TensorSpec(tuple(rows.shape[1:]), rows.dtype)


def _words(spec: TensorSpec) -> str:
    return f"{str(spec.dtype).removeprefix('torch.')}{list(spec.shape)}"
