"""Conversion between samples and messages."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias, TypeVar

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from farflung.errors import ConfigError
from farflung.spec import import_object
from farflung.types import Batch, TensorSpec

__all__ = ["Decoder", "MessageDecoder", "as_messages", "import_function"]

F = TypeVar("F", bound=Callable[..., object])

Decoder: TypeAlias = Callable[[Any], tuple[Tensor, Tensor]]
"""Function that returns inputs and targets of the sample in a message, and raises if there is none."""


def as_messages(rows: Batch) -> list[bytes]:
    """Encodes each row as a message: a safetensors file of its tensors ``inputs`` and ``targets``, as they are stored.

    Any safetensors library, in any language, can write such messages, and nothing is unpickled.

    >>> from farflung.types import Batch
    >>> (one,) = as_messages(Batch(torch.tensor([[1, 2]]), torch.tensor([7])))
    >>> sorted(load(one).items())
    [('inputs', tensor([1, 2])), ('targets', tensor(7))]
    """
    samples = zip(rows.inputs.contiguous(), rows.targets.contiguous(), strict=True)
    return [save({"inputs": inputs, "targets": targets}) for inputs, targets in samples]


class MessageDecoder:
    """Decoder of messages into batches.

    The header of the first safetensors message is remembered. Messages with the same header and length are kept as
    bytes, and a batch of them is sliced out of one array; all others are decoded one by one.

    Args:
      example: At least one sample of the workload, as stored.
      decoder: Decoder of messages in another format; ``None``: messages are safetensors.
    """

    def __init__(self, example: Batch, decoder: Decoder | None) -> None:
        self._specs = {
            name: _build_spec(rows)
            for name, rows in (("inputs", example.inputs), ("targets", example.targets))
        }
        self._decode, self._has_default_decoder = decoder or _load_sample, decoder is None
        self._header, self._nbytes = b"", -1
        self._offsets: dict[str, int] = {}
        """Offset of each tensor in a message with the remembered header."""

    def check_message(self, value: Any) -> Any:
        """Checks a message and returns its form for :meth:`build_rows`.

        Raises:
          Exception: The message holds no sample of the workload; of any kind.
        """
        if self._header and len(value) == self._nbytes and value.startswith(self._header):
            return value
        inputs, targets = self._decode(value)
        for name, tensor in (("inputs", inputs), ("targets", targets)):
            spec, expected = TensorSpec.from_tensor(tensor), self._specs[name]
            if spec != expected:
                raise ValueError(
                    f"{name} of {_format_spec(spec)}, and a sample of the workload has {_format_spec(expected)}"
                )
        if self._has_default_decoder and not self._header:
            end = 8 + int.from_bytes(value[:8], "little")
            described = json.loads(value[8:end])
            self._offsets = {name: end + described[name]["data_offsets"][0] for name in self._specs}
            self._header, self._nbytes = value[:end], len(value)
        return inputs, targets

    def build_rows(self, messages: Sequence[Any]) -> Batch:
        """Builds a batch of messages that :meth:`check_message` has returned."""
        if set(map(type, messages)) == {bytes}:
            table = np.frombuffer(b"".join(messages), np.uint8).reshape(len(messages), self._nbytes)
            return Batch(self._slice_tensor(table, "inputs"), self._slice_tensor(table, "targets"))
        samples = [self._decode(x) if isinstance(x, bytes) else x for x in messages]
        return Batch(torch.stack([x for x, _ in samples]), torch.stack([y for _, y in samples]))

    def _slice_tensor(self, table: np.ndarray[tuple[int, int], np.dtype[np.uint8]], name: str) -> Tensor:
        begin, spec = self._offsets[name], self._specs[name]
        columns = torch.from_numpy(table[:, begin : begin + spec.nbytes].copy())
        return columns.view(spec.dtype).view(len(table), *spec.shape)


def import_function(kind: str, function: str | F) -> F:
    """Imports a function given as ``module:function``.

    Raises:
      ConfigError: The function does not exist.
    """
    imported_function = import_object(kind, function) if isinstance(function, str) else function
    if not callable(imported_function):
        raise ConfigError(f"{kind} {function!r}: not a function")
    return imported_function  # type: ignore[return-value]


def _load_sample(value: bytes) -> tuple[Tensor, Tensor]:
    try:
        tensors = load(value)
        return tensors["inputs"], tensors["targets"]
    except SafetensorError as error:
        raise ValueError(f"no safetensors: {error}") from None
    except KeyError as error:
        raise ValueError(f"no tensor {error}") from None


def _build_spec(rows: Tensor) -> TensorSpec:
    return TensorSpec(tuple(rows.shape[1:]), rows.dtype)


def _format_spec(spec: TensorSpec) -> str:
    return f"{str(spec.dtype).removeprefix('torch.')}{list(spec.shape)}"
