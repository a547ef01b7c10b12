"""Tiny Shakespeare: 1,115,394 characters of plays, 65 symbols; a sample is a window and the characters after it.

The first nine tenths are for training. A split by order gives each replica plays of its own.

Reference: Karpathy, "The Unreasonable Effectiveness of Recurrent Neural Networks", 2015.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from farflung.data.catalog import CATALOG
from farflung.data.datasets import TensorDataset
from farflung.data.source import Location, locate, verify
from farflung.errors import DataError

__all__ = ["SOURCE", "SYMBOLS", "build_windows", "load", "read"]

SOURCE = CATALOG["tinyshakespeare"]

SYMBOLS = "\n !$&',-.3:;?ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"


def load(*, length: int, stride: int | None = None) -> tuple[TensorDataset, TensorDataset]:
    """Loads training and test windows of ``length`` characters from the fetched text.

    Args:
      length: Characters of a window.
      stride: Characters between the starts of two training windows; ``None``: ``length``, so that they do not
        overlap. Test windows never overlap.

    Raises:
      DataError: The file is absent, truncated or altered.
    """
    location = locate(SOURCE)
    verify(location.get_path("input.txt"), SOURCE.files[0])
    return read(location, length=length, stride=stride)


def read(
    location: Location, *, length: int, stride: int | None = None
) -> tuple[TensorDataset, TensorDataset]:
    """Reads ``input.txt`` at ``location``; see :func:`load`.

    Raises:
      DataError: A symbol is not among :data:`SYMBOLS`, or the text is shorter than two windows.
    """
    path = location.get_path("input.txt")
    content = np.frombuffer(path.read_bytes(), dtype=np.uint8)
    numbers = np.full(256, 255, dtype=np.uint8)
    numbers[np.frombuffer(SYMBOLS.encode(), dtype=np.uint8)] = np.arange(len(SYMBOLS), dtype=np.uint8)
    text = numbers[content]
    if bool((text == 255).any()):
        position = int((text == 255).argmax())
        raise DataError(f"{path}: unexpected byte {content[position]} at {position}")
    border = len(text) * 9 // 10
    if min(border, len(text) - border) <= length:
        raise DataError(f"{path}: {len(text)} characters are too few for windows of {length}")
    origin = f"tinyshakespeare, {location.folder}"
    return build_windows(text[:border], length, stride or length, origin), build_windows(
        text[border:], length, length, origin
    )


def build_windows(text: npt.NDArray[np.uint8], length: int, stride: int, origin: str) -> TensorDataset:
    """Returns windows of ``length`` symbols as views of one tensor; targets are the windows one symbol on.

    Args:
      text: Numbers of symbols.
      length: Symbols of a window.
      stride: Symbols between the starts of two windows.
      origin: Source of the text; see :class:`TensorDataset`.
    """
    inputs, targets = (torch.from_numpy(text.astype(kind)) for kind in (np.uint8, np.int64))
    return TensorDataset(
        inputs[:-1].unfold(0, length, stride),
        targets[1:].unfold(0, length, stride),
        transform=Tensor.long,
        origin=origin,
    )
