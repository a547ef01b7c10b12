"""AG News: 120,000 + 7,600 titles and descriptions of news in 4 classes, from the official CSV files.

Instead of the 120,000 training rows, a folder may hold ``train-5000.csv`` with 5,000 of them (text, class 0 to 3).

Reference: Zhang, Zhao, LeCun, "Character-level Convolutional Networks for Text Classification", 2015.
"""

from __future__ import annotations

import csv
from pathlib import Path

import torch

from farflung.data.catalog import CATALOG
from farflung.data.datasets import TensorDataset
from farflung.data.source import Location, locate, verify
from farflung.data.text import as_index, encode, vocabulary, words
from farflung.errors import DataError

__all__ = ["CLASSES", "SOURCE", "load", "read"]

SOURCE = CATALOG["ag-news"]

(_SMALL,) = SOURCE.reduced


CLASSES = ("World", "Sports", "Business", "Sci/Tech")


def load(*, length: int, size: int) -> tuple[TensorDataset, TensorDataset]:
    """Training and test set as numbers of words.

    Args:
      length: words kept of each text.
      size: entries of the vocabulary, learned from those words of the training texts.

    Raises:
      DataError: absent, truncated or altered files.
    """
    found = locate(SOURCE)
    for file in SOURCE.files:
        if file.name in found.names:
            verify(found.path(file.name), file)
    counts = (5_000 if _SMALL in found.names else 120_000, 7_600)
    return read(found, counts=counts, length=length, size=size)


def read(
    found: Location, *, counts: tuple[int, int], length: int, size: int
) -> tuple[TensorDataset, TensorDataset]:
    """Reads the two files in ``found``; ``counts`` rows there must be.

    Raises:
      DataError: truncated files, or rows that are not what they should be.
    """
    rows = [_rows(found.path(name), count) for name, count in zip(found.names, counts, strict=True)]
    texts = [[words(text, length) for text, _ in split] for split in rows]
    numbers = vocabulary(texts[0], size)
    sets = []
    for split, tokens in zip(rows, texts, strict=True):
        labels = torch.tensor([label for _, label in split])
        sets.append(
            TensorDataset(
                encode(tokens, numbers, length),
                labels,
                labels,
                transform=as_index,
                origin=f"ag-news, {found.folder}",
            )
        )
    return sets[0], sets[1]


def _rows(path: Path, count: int) -> list[tuple[str, int]]:
    """Text and class of each row: official ones are class 1 to 4, title, description; others text, class 0 to 3."""
    official = path.name != _SMALL
    rows = []
    try:
        with path.open(encoding="utf-8", newline="") as stream:
            for row in csv.reader(stream, strict=True):
                if official:
                    label, title, description = row
                    rows.append((f"{title} {description}".replace("\\", " "), int(label) - 1))
                else:
                    text, label = row
                    rows.append((text, int(label)))
                if not 0 <= rows[-1][1] < len(CLASSES):
                    raise ValueError("there are four classes")
    except (ValueError, csv.Error) as error:
        raise DataError(f"{path}: row {len(rows) + 1} is not as expected ({error})") from None
    if len(rows) != count:
        raise DataError(f"{path}: expected {count} rows, found {len(rows)}")
    return rows
