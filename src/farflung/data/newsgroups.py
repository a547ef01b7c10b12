"""20 Newsgroups, by date: 11,314 + 7,532 posts in 20 groups.

Of each post the subject and the body are kept, quotations included; every other header is dropped, since senders
and organisations give the group away. Read from the official archive, or from ``train.jsonl.gz`` and
``test.jsonl.gz`` with one ``{"group", "text"}`` per line.

Reference: Lang, "NewsWeeder: Learning to Filter Netnews", 1995; split of http://qwone.com/~jason/20Newsgroups/.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch

from farflung.data.archive import gunzip, members
from farflung.data.catalog import CATALOG
from farflung.data.datasets import TensorDataset
from farflung.data.source import Location, locate, verify
from farflung.data.text import as_index, encode, vocabulary, words
from farflung.errors import DataError

__all__ = ["SOURCE", "load", "read"]

SOURCE = CATALOG["20newsgroups"]

_COUNTS = (11_314, 7_532)


def load(*, length: int, size: int) -> tuple[TensorDataset, TensorDataset]:
    """Training and test set as numbers of words.

    Args:
      length: words kept of each post.
      size: entries of the vocabulary, learned from those words of the training posts.

    Raises:
      DataError: absent, truncated or altered files.
    """
    found = locate(SOURCE)
    if found.names == (SOURCE.files[0].name,):
        verify(found.path(found.names[0]), SOURCE.files[0])
    return read(found, counts=_COUNTS, groups=20, length=length, size=size)


def read(
    found: Location, *, counts: tuple[int, int], groups: int, length: int, size: int
) -> tuple[TensorDataset, TensorDataset]:
    """Reads what lies in ``found``; ``counts`` posts in ``groups`` groups there must be.

    Raises:
      DataError: truncated files, or another number of posts or groups.
    """
    posts = _from_archive(found) if found.names == (SOURCE.files[0].name,) else _from_lines(found)
    for kind, have, want in zip(("training", "test"), posts, counts, strict=True):
        if len(have) != want:
            raise DataError(
                f"20newsgroups in {found.folder}: expected {want} {kind} posts, found {len(have)}"
            )
    names = sorted({group for group, _ in posts[0]})
    if len(names) != groups or not {group for group, _ in posts[1]} <= set(names):
        raise DataError(f"20newsgroups in {found.folder}: expected {groups} groups, found {len(names)}")
    texts = [[words(_essence(text), length) for _, text in split] for split in posts]
    numbers = vocabulary(texts[0], size)
    sets = []
    for split, tokens in zip(posts, texts, strict=True):
        labels = torch.tensor([names.index(group) for group, _ in split])
        rows = encode(tokens, numbers, length)
        sets.append(
            TensorDataset(rows, labels, labels, transform=as_index, origin=f"20newsgroups, {found.folder}")
        )
    return sets[0], sets[1]


def _essence(post: str) -> str:
    head, _, body = post.partition("\n\n")
    subject = next((line[8:] for line in head.splitlines() if line.lower().startswith("subject:")), "")
    return f"{subject}\n{body}"


def _from_lines(found: Location) -> list[list[tuple[str, str]]]:
    return [_lines(found.path(name)) for name in found.names]


def _lines(path: Path) -> list[tuple[str, str]]:
    posts = []
    for number, line in enumerate(gunzip(path).splitlines(), start=1):
        try:
            row = json.loads(line)
            posts.append((str(row["group"]), str(row["text"])))
        except (ValueError, KeyError, TypeError):
            raise DataError(f'{path}: line {number} is not {{"group": ..., "text": ...}}') from None
    return posts


def _from_archive(found: Location) -> list[list[tuple[str, str]]]:
    path = found.path(SOURCE.files[0].name)
    posts: dict[str, list[tuple[str, str]]] = {"20news-bydate-train": [], "20news-bydate-test": []}
    for name, content in sorted(members(path, lambda name: name.split("/")[0] in posts)):
        parts = name.split("/")
        if len(parts) == 3:
            posts[parts[0]].append((parts[1], content.decode("latin-1")))
    return list(posts.values())
