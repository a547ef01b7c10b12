"""Which group or section a text belongs to, AG News and 20 Newsgroups as rows of words; the next byte of a post.

AG News: 120,000 + 7,600 titles and descriptions of news in 4 classes, from the official CSV files. Instead of the
120,000 training rows, a folder may hold ``train-5000.csv`` with 5,000 of them (text, class 0 to 3).

20 Newsgroups, by date: 11,314 + 7,532 posts in 20 groups. Of each post the subject and the body are kept, quotations
included; every other header is dropped, since senders and organisations give the group away. Read from the official
archive, or from ``train.jsonl.gz`` and ``test.jsonl.gz`` with one ``{"group", "text"}`` per line.

References: Zhang, Zhao, LeCun, "Character-level Convolutional Networks for Text Classification", 2015; Lang,
"NewsWeeder: Learning to Filter Netnews", 1995, split of http://qwone.com/~jason/20Newsgroups/.
"""

from __future__ import annotations

import csv
import gzip
import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import islice
from pathlib import Path
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor, nn
from typing_extensions import override

from farflung.data.datasets import TensorDataset
from farflung.data.shakespeare import build_windows
from farflung.data.source import File, Location, Source, iter_members, locate, verify
from farflung.errors import DataError
from farflung.files import wrap_read_errors
from farflung.types import Dataset, Json, Workload
from farflung.workloads import Classification
from farflung.workloads.classification import build_mercury_settings, build_settings
from farflung.workloads.shakespeare import GPT

__all__ = [
    "AG_NEWS",
    "NEWSGROUPS",
    "PADDING",
    "UNKNOWN",
    "AttentiveClassifier",
    "NewsgroupsGPT",
    "TextClassifier",
    "ag_news_attentive_lstm",
    "ag_news_lstm",
    "encode",
    "newsgroups_lstm",
    "read_ag_news",
    "read_bodies",
    "read_newsgroups",
    "vocabulary",
]

PADDING, UNKNOWN = 0, 1
"""Numbers of the two entries that are no words."""
_WORD = re.compile(r"[a-z0-9]+(?:'[a-z]+)?")
_AG_NEWS_URL = "https://raw.githubusercontent.com/mhjabreel/CharCnn_Keras/master/data/ag_news_csv/"
_SMALL = "train-5000.csv"
_CLASSES = 4
_SIZE = 10_000
_POSTS = (11_314, 7_532)

AG_NEWS = Source(
    name="ag-news",
    title="120,000 + 7,600 news in 4 classes",
    licence="non-commercial research",
    homepage="http://groups.di.unipi.it/~gulli/AG_corpus_of_news_articles.html",
    files=(
        File("train.csv", 29470338, _AG_NEWS_URL + "train.csv", md5="b1a00f826fdfbd249f79597b59e1dc12"),
        File("test.csv", 1857427, _AG_NEWS_URL + "test.csv", md5="d52ea96a97a2d943681189a97654912d"),
    ),
    layouts=(("train.csv", "test.csv"), (_SMALL, "test.csv")),
    instructions="fetch it with: farflung data fetch benchmarks.workloads.news:AG_NEWS",
    samples=(120_000, 7_600),
)

NEWSGROUPS = Source(
    name="20newsgroups",
    title="11,314 + 7,532 Usenet posts in 20 groups",
    licence="public Usenet posts",
    homepage="http://qwone.com/~jason/20Newsgroups/",
    files=(
        File(
            "20news-bydate.tar.gz",
            14464277,
            "https://ndownloader.figshare.com/files/5975967",
            sha256="8f1b2514ca22a5ade8fbb9cfa5727df95fa587f4c87b786e15c759fa66d95610",
        ),
    ),
    layouts=(("train.jsonl.gz", "test.jsonl.gz"),),
    instructions="fetch it with: farflung data fetch benchmarks.workloads.news:NEWSGROUPS",
    samples=_POSTS,
)


def newsgroups_lstm() -> Workload:
    """20 Newsgroups with an LSTM over the first 96 words.

    Test accuracy with the defaults (1,200 steps of 32, seeds 0 and 1): 62.4 and 64.5 %. This is a workload for a
    network with large embeddings, not for its accuracy: a linear model of the same words in any order reaches 73.4 %
    in 4,000 steps.
    """
    return Classification(
        name="newsgroups/lstm",
        build_network=partial(TextClassifier, _SIZE, 64, 64, 20),
        load_data=partial(load_newsgroups, length=96, size=_SIZE),
        defaults=build_settings(batch_size=32, learning_rate=0.3, momentum=0.9, steps=1200),
    )


def ag_news_lstm() -> Workload:
    """AG News with an LSTM over the first 48 words.

    Test accuracy with the defaults (1,000 steps of 32, seeds 0 and 1) and 5,000 training rows: 79.3 and 79.3 %. A
    linear model of the same words in any order: 83.5 % in 2,000 steps. The full 120,000 rows have not been measured.
    """
    return Classification(
        name="ag-news/lstm",
        build_network=partial(TextClassifier, _SIZE, 64, 64, 4),
        load_data=partial(load_ag_news, length=48, size=_SIZE),
        defaults=build_settings(batch_size=32, learning_rate=0.3, momentum=0.9, steps=1000),
    )


def ag_news_attentive_lstm() -> Workload:
    """AG News with a two-layer LSTM and attention, 16.8 million parameters, as Mercury's paper has it.

    Of the first 48 words, as numbers among 10,000 that the model learns vectors of 300 for: what the paper feeds to its
    LSTM it does not say. For two cores there is :func:`ag_news_lstm`.
    """
    return Classification(
        name="ag-news/attentive-lstm",
        build_network=partial(AttentiveClassifier, _SIZE, 300, 512, 4),
        load_data=partial(load_ag_news, length=48, size=_SIZE),
        defaults=build_mercury_settings(batch_size=64),
    )


@dataclass
class NewsgroupsGPT(GPT):
    """Predicts each byte of a window of 20 Newsgroups from those before it, by nanoGPT's transformer for a CPU.

    The bodies of the 11,314 posts before a date are for training, 19.9 MB in windows that do not overlap; some 2,000
    windows at even distances of the 7,532 posts after it are the test set. Everything else is as with
    ``tinyshakespeare/gpt``.

    Args:
      length: bytes in a window.
      layers: blocks of attention and dense layers.
      heads: of attention in each block; a divisor of ``width``.
      width: numbers for each position.

    Raises:
      ConfigError: an option out of its range.
    """

    symbols: ClassVar[int] = 256

    name: str = field(default="20newsgroups/gpt", init=False)
    defaults: Mapping[str, Json] = field(
        default_factory=lambda: {**GPT().defaults, "steps": 10_000}, init=False
    )

    @cached_property
    @override
    def _windows(self) -> tuple[Dataset, Dataset]:
        return read_bodies(_newsgroups(), counts=_POSTS, length=self.length)


# --- samples ----------------------------------------------------------------------------------------------------------


def load_ag_news(*, length: int, size: int) -> tuple[TensorDataset, TensorDataset]:
    """Training and test set as numbers of words.

    Args:
      length: words kept of each text.
      size: entries of the vocabulary, learned from those words of the training texts.

    Raises:
      DataError: absent, truncated or altered files.
    """
    found = locate(AG_NEWS)
    for file in AG_NEWS.files:
        if file.name in found.names:
            verify(found.get_path(file.name), file)
    counts = (5_000 if _SMALL in found.names else 120_000, 7_600)
    return read_ag_news(found, counts=counts, length=length, size=size)


def read_ag_news(
    found: Location, *, counts: tuple[int, int], length: int, size: int
) -> tuple[TensorDataset, TensorDataset]:
    """Reads the two files in ``found``; ``counts`` rows there must be.

    Raises:
      DataError: truncated files, or rows that are not what they should be.
    """
    rows = [_rows(found.get_path(name), count) for name, count in zip(found.names, counts, strict=True)]
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
                transform=Tensor.long,
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
                if not 0 <= rows[-1][1] < _CLASSES:
                    raise ValueError("there are four classes")
    except (ValueError, csv.Error) as error:
        raise DataError(f"{path}: row {len(rows) + 1} is not as expected ({error})") from None
    if len(rows) != count:
        raise DataError(f"{path}: expected {count} rows, found {len(rows)}")
    return rows


def load_newsgroups(*, length: int, size: int) -> tuple[TensorDataset, TensorDataset]:
    """Training and test set as numbers of words.

    Args:
      length: words kept of each post.
      size: entries of the vocabulary, learned from those words of the training posts.

    Raises:
      DataError: absent, truncated or altered files.
    """
    return read_newsgroups(_newsgroups(), counts=_POSTS, groups=20, length=length, size=size)


def _newsgroups() -> Location:
    found = locate(NEWSGROUPS)
    if found.names == (NEWSGROUPS.files[0].name,):
        verify(found.get_path(found.names[0]), NEWSGROUPS.files[0])
    return found


def _posts(found: Location, counts: tuple[int, int]) -> list[list[tuple[str, str]]]:
    """Group and text of each post for training, and of each test post."""
    posts = _from_archive(found) if found.names == (NEWSGROUPS.files[0].name,) else _from_lines(found)
    for kind, have, want in zip(("training", "test"), posts, counts, strict=True):
        if len(have) != want:
            raise DataError(
                f"20newsgroups in {found.folder}: expected {want} {kind} posts, found {len(have)}"
            )
    return posts


def read_newsgroups(
    found: Location, *, counts: tuple[int, int], groups: int, length: int, size: int
) -> tuple[TensorDataset, TensorDataset]:
    """Reads what lies in ``found``; ``counts`` posts in ``groups`` groups there must be.

    Raises:
      DataError: truncated files, or another number of posts or groups.
    """
    posts = _posts(found, counts)
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
            TensorDataset(rows, labels, labels, transform=Tensor.long, origin=f"20newsgroups, {found.folder}")
        )
    return sets[0], sets[1]


def read_bodies(
    found: Location, *, counts: tuple[int, int], length: int, tests: int = 2_000
) -> tuple[TensorDataset, TensorDataset]:
    """Reads the bodies of the posts in ``found`` as bytes, with a byte 0 between two.

    Args:
      found: where.
      counts: of training and test posts.
      length: bytes in a window.
      tests: windows of the test posts, at even distances.

    Raises:
      DataError: truncated files, or another number of posts.
    """
    train, test = (
        np.frombuffer(
            b"\0".join(text.partition("\n\n")[2].encode() for _, text in sorted(posts)), dtype=np.uint8
        )
        for posts in _posts(found, counts)
    )
    origin = f"20newsgroups, {found.folder}"
    return build_windows(train, length, length, origin), build_windows(
        test, length, (len(test) - length) // tests, origin
    )


def _essence(post: str) -> str:
    head, _, body = post.partition("\n\n")
    subject = next((line[8:] for line in head.splitlines() if line.lower().startswith("subject:")), "")
    return f"{subject}\n{body}"


def _from_lines(found: Location) -> list[list[tuple[str, str]]]:
    return [_lines(found.get_path(name)) for name in found.names]


def _lines(path: Path) -> list[tuple[str, str]]:
    with wrap_read_errors(path, "not a gzip file, or truncated", DataError), gzip.open(path) as stream:
        lines = stream.read().splitlines()
    posts = []
    for number, line in enumerate(lines, start=1):
        try:
            row = json.loads(line)
            posts.append((str(row["group"]), str(row["text"])))
        except (ValueError, KeyError, TypeError):
            raise DataError(f'{path}: line {number} is not {{"group": ..., "text": ...}}') from None
    return posts


def _from_archive(found: Location) -> list[list[tuple[str, str]]]:
    path = found.get_path(NEWSGROUPS.files[0].name)
    posts: dict[str, list[tuple[str, str]]] = {"20news-bydate-train": [], "20news-bydate-test": []}
    for name, content in sorted(iter_members(path, lambda name: name.split("/")[0] in posts)):
        parts = name.split("/")
        if len(parts) == 3:
            posts[parts[0]].append((parts[1], content.decode("latin-1")))
    return list(posts.values())


# --- words ------------------------------------------------------------------------------------------------------------


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


# --- models -----------------------------------------------------------------------------------------------------------


class TextClassifier(nn.Module):
    """Embedding, LSTM in both directions, the largest of each feature over the words, one dense layer.

    Args:
      size: entries of the vocabulary.
      width: of the embedding.
      hidden: of the LSTM, in each direction.
      classes: outputs.
    """

    def __init__(self, size: int, width: int, hidden: int, classes: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(size, width, padding_idx=PADDING)
        self.lstm = nn.LSTM(width, hidden, batch_first=True, bidirectional=True)
        self.dropout = nn.Dropout(0.2)
        self.head = nn.Linear(2 * hidden, classes)

    @override
    def forward(self, words: Tensor) -> Tensor:
        """Logits, shape ``(n, classes)``, of ``words``, shape ``(n, length)``."""
        states, _ = self.lstm(self.embedding(words))
        states = states.masked_fill((words == PADDING).unsqueeze(-1), -1.0)  # no state of an LSTM is below -1
        logits: Tensor = self.head(self.dropout(states.amax(dim=1)))
        return logits


class AttentiveClassifier(nn.Module):
    r"""Embedding, two LSTMs in both directions one on the other, attention over the words in each, two dense layers.

    .. math:: y_l = \sum_t \alpha_{lt} h_{lt}, \qquad \alpha_l = \mathrm{softmax}_t\, \mathrm{ReLU}(a_l^\top h_{lt})

    Padding gets no attention. The dense layers see both layers' :math:`y_l`.

    Args:
      size: entries of the vocabulary.
      width: of the embedding.
      hidden: of each LSTM, in each direction.
      classes: outputs.

    References: the released code of Zeng et al. 2021 (Mercury), whose batch norm between the dense layers is left out,
      since a step may be made of one sample.
    """

    def __init__(self, size: int, width: int, hidden: int, classes: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(size, width, padding_idx=PADDING)
        self.lstms = nn.ModuleList(
            nn.LSTM(inputs, hidden, batch_first=True, bidirectional=True) for inputs in (width, 2 * hidden)
        )
        self.attention = nn.ModuleList(nn.Linear(2 * hidden, 1, bias=False) for _ in self.lstms)
        both = 4 * hidden
        self.head = nn.Sequential(
            nn.Dropout(0.2), nn.Linear(both, both), nn.ReLU(), nn.Dropout(0.2), nn.Linear(both, classes)
        )

    @override
    def forward(self, words: Tensor) -> Tensor:
        """Logits, shape ``(n, classes)``, of ``words``, shape ``(n, length)``."""
        states, seen = self.embedding(words), []
        padding = (words == PADDING).unsqueeze(-1)
        for lstm, attention in zip(self.lstms, self.attention, strict=True):
            states, _ = lstm(states)
            scores = torch.relu(attention(states)).masked_fill(padding, torch.finfo(states.dtype).min)
            seen.append((scores.softmax(dim=1) * states).sum(dim=1))
        logits: Tensor = self.head(torch.cat(seen, dim=1))
        return logits
