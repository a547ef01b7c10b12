"""Tiny Shakespeare: 1,115,394 characters of plays, 65 symbols; a sample is a window and the characters after it.

The first nine tenths are for training. A split by order gives each replica its own plays.

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

__all__ = ["SOURCE", "SYMBOLS", "load", "read", "windows"]

SOURCE = CATALOG["tinyshakespeare"]

SYMBOLS = "\n !$&',-.3:;?ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"


def load(*, length: int, every: int | None = None) -> tuple[TensorDataset, TensorDataset]:
    """Training and test windows of ``length`` characters.

    Args:
      length: characters in a window.
      every: characters between the starts of two training windows; ``None``: as many as in one, so that they do not
        overlap. Test windows never do.

    Raises:
      DataError: absent, truncated or altered file.
    """
    found = locate(SOURCE)
    verify(found.path("input.txt"), SOURCE.files[0])
    return read(found, length=length, every=every)


def read(found: Location, *, length: int, every: int | None = None) -> tuple[TensorDataset, TensorDataset]:
    """Reads ``input.txt`` in ``found``; see :func:`load`.

    Raises:
      DataError: a symbol that is not among :data:`SYMBOLS`, or less text than two windows.
    """
    path = found.path("input.txt")
    content = np.frombuffer(path.read_bytes(), dtype=np.uint8)
    numbers = np.full(256, 255, dtype=np.uint8)
    numbers[np.frombuffer(SYMBOLS.encode(), dtype=np.uint8)] = np.arange(len(SYMBOLS), dtype=np.uint8)
    text = numbers[content]
    if bool((text == 255).any()):
        where = int((text == 255).argmax())
        raise DataError(f"{path}: unexpected byte {content[where]} at {where}")
    border = len(text) * 9 // 10
    if min(border, len(text) - border) <= length:
        raise DataError(f"{path}: {len(text)} characters are too few for windows of {length}")
    origin = f"tinyshakespeare, {found.folder}"
    return windows(text[:border], length, every or length, origin), windows(
        text[border:], length, length, origin
    )


def windows(text: npt.NDArray[np.uint8], length: int, every: int, origin: str) -> TensorDataset:
    """Return windows of ``length`` symbols, and the symbols after each; views, however much they overlap.

    Args:
      text: numbers of symbols.
      length: symbols in a window.
      every: symbols between the starts of two windows.
      origin: see :class:`TensorDataset`.
    """
    inputs, targets = (torch.from_numpy(text.astype(kind)) for kind in (np.uint8, np.int64))
    return TensorDataset(
        inputs[:-1].unfold(0, length, every),
        targets[1:].unfold(0, length, every),
        transform=Tensor.long,
        origin=origin,
    )
