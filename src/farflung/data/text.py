"""Text as numbers: words, a vocabulary learned from training texts, and rows of equal length."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import islice

import torch
from torch import Tensor

__all__ = ["PADDING", "UNKNOWN", "as_index", "encode", "vocabulary", "words"]

PADDING, UNKNOWN = 0, 1
"""Numbers of the two entries that are no words."""

_WORD = re.compile(r"[a-z0-9]+(?:'[a-z]+)?")


def words(text: str, limit: int) -> list[str]:
    """The first ``limit`` runs of letters and digits, in lower case.

    >>> words("It's 3 o'clock: GO!", 3)
    ["it's", '3', "o'clock"]
    """
    return [found.group() for found in islice(_WORD.finditer(text.lower()), limit)]


def vocabulary(texts: Iterable[Sequence[str]], size: int) -> dict[str, int]:
    """Numbers for the most frequent words, from 2 upwards; of equally frequent ones the alphabet's first.

    Args:
      texts: words of each training text.
      size: entries in all, padding and unknown among them.
    """
    counts = Counter(word for text in texts for word in text)
    ranked = sorted(counts, key=lambda word: (-counts[word], word))
    return {word: number for number, word in enumerate(ranked[: size - 2], start=2)}


def encode(texts: Sequence[Sequence[str]], numbers: dict[str, int], length: int) -> Tensor:
    """The first ``length`` words of each text as numbers; shape ``(len(texts), length)``, int32."""
    rows = torch.full((len(texts), length), PADDING, dtype=torch.int32)
    for row, text in zip(rows, texts, strict=True):
        found = [numbers.get(word, UNKNOWN) for word in text[:length]]
        row[: len(found)] = torch.tensor(found, dtype=torch.int32)
    return rows


def as_index(rows: Tensor) -> Tensor:
    """Numbers in the type that embeddings take."""
    return rows.to(torch.int64)
