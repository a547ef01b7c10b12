"""Texts as numbers: AG News, 20 Newsgroups and Tiny Shakespeare in their official formats."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
import torch

from farflung.data import ag_news, newsgroups, shakespeare
from farflung.data.source import Location
from farflung.data.text import PADDING, UNKNOWN, encode, vocabulary
from farflung.errors import DataError
from tests.data.test_archive import pack


def test_vocabulary_and_encoding() -> None:
    texts = [["b", "a", "b"], ["c", "a", "d"]]
    numbers = vocabulary(texts, 5)
    assert numbers == {"a": 2, "b": 3, "c": 4}
    rows = encode([["a", "x", "b", "c"], ["d"], []], numbers, 3)
    assert rows.tolist() == [[2, UNKNOWN, 3], [UNKNOWN, PADDING, PADDING], [PADDING] * 3]


OFFICIAL = '"3","Fears for T N","Unions say\\they are ""sad"""\n"1","War","and peace"\n'


def news(folder: Path, train: str, test: str, name: str = "train.csv") -> Location:
    (folder / name).write_text(train)
    (folder / "test.csv").write_text(test)
    return Location(folder, (name, "test.csv"), "folder")


def test_ag_news(tmp_path: Path) -> None:
    train, test = ag_news.read(news(tmp_path, OFFICIAL, OFFICIAL), counts=(2, 2), length=8, size=50)
    assert train.targets.tolist() == test.targets.tolist() == [2, 0]
    assert train.inputs.dtype == torch.int32
    taken = train.take(torch.tensor([1]), train=True).inputs
    assert taken.dtype == torch.int64
    assert (taken[0] != PADDING).tolist() == [True] * 3 + [False] * 5


def test_ag_news_small_training_file(tmp_path: Path) -> None:
    found = news(tmp_path, '"some text",3\nmore,0\n', OFFICIAL, "train-5000.csv")
    train, test = ag_news.read(found, counts=(2, 2), length=4, size=50)
    assert (train.targets.tolist(), test.targets.tolist()) == ([3, 0], [2, 0])


@pytest.mark.parametrize(
    ("train", "message"),
    [
        (OFFICIAL[:-5], "row 2 is not as expected"),
        (OFFICIAL.splitlines()[0], "expected 2 rows, found 1"),
        ('"5","a","b"\n', r"row 2 is not as expected \(there are four classes\)"),
        ('"1","a"\n', "row 1 is not as expected"),
    ],
)
def test_ag_news_damaged(tmp_path: Path, train: str, message: str) -> None:
    with pytest.raises(DataError, match=rf"train\.csv: {message}"):
        ag_news.read(news(tmp_path, train, OFFICIAL), counts=(2, 2), length=4, size=50)


def post(subject: str, body: str) -> str:
    return f"From: someone@somewhere\nSubject: {subject}\nOrganization: Giveaway\n\n{body}"


TRAIN = [("sci.space", post("Moon", "rockets rockets")), ("rec.autos", post("Re: car", "wheels"))]
TEST = [("rec.autos", post("car", "a moon"))]


def groups_as_lines(folder: Path) -> Location:
    for name, posts in (("train", TRAIN), ("test", TEST)):
        lines = "".join(json.dumps({"group": group, "text": text}) + "\n" for group, text in posts)
        (folder / f"{name}.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
    return Location(folder, ("train.jsonl.gz", "test.jsonl.gz"), "folder")


def groups_as_archive(folder: Path) -> Location:
    files = {
        f"20news-bydate-{kind}/{group}/{number}": text.encode()
        for kind, posts in (("train", TRAIN), ("test", TEST))
        for number, (group, text) in enumerate(posts)
    }
    pack(folder / "20news-bydate.tar.gz", files)
    return Location(folder, ("20news-bydate.tar.gz",), "folder")


@pytest.mark.parametrize("form", [groups_as_lines, groups_as_archive])
def test_newsgroups(tmp_path: Path, form) -> None:
    train, test = newsgroups.read(form(tmp_path), counts=(2, 1), groups=2, length=4, size=20)
    assert sorted(train.targets.tolist()) == [0, 1]
    assert test.targets.tolist() == [0]
    space = train.inputs[int(train.targets.argmax())].tolist()
    assert space[1] == space[2] == 2, "the most frequent word"
    assert space[3] == PADDING, "neither sender nor organisation"
    assert test.inputs[0].tolist()[1:] == [UNKNOWN, space[0], PADDING]


@pytest.mark.parametrize("form", [groups_as_lines, groups_as_archive])
def test_newsgroups_incomplete(tmp_path: Path, form) -> None:
    with pytest.raises(DataError, match="expected 3 training posts, found 2"):
        newsgroups.read(form(tmp_path), counts=(3, 1), groups=2, length=4, size=20)
    with pytest.raises(DataError, match="expected 3 groups, found 2"):
        newsgroups.read(form(tmp_path), counts=(2, 1), groups=3, length=4, size=20)


def test_newsgroups_bad_line(tmp_path: Path) -> None:
    found = groups_as_lines(tmp_path)
    (tmp_path / "test.jsonl.gz").write_bytes(gzip.compress(b'{"group": "a", "text": "b"}\n{"group": "a"}\n'))
    with pytest.raises(DataError, match=r"test\.jsonl\.gz: line 2 is not"):
        newsgroups.read(found, counts=(2, 1), groups=2, length=4, size=20)


def test_shakespeare(tmp_path: Path) -> None:
    text = "First Citizen:\nBefore we proceed any further, hear me speak.\n" * 20
    (tmp_path / "input.txt").write_text(text)
    train, test = shakespeare.read(Location(tmp_path, ("input.txt",), "folder"), length=8)
    border = len(text) * 9 // 10
    assert len(train) == (border - 1) // 8
    batch = train.take(torch.tensor([0, 1]), train=True)

    def spell(row: torch.Tensor) -> str:
        return "".join(shakespeare.SYMBOLS[i] for i in row.tolist())

    assert [spell(row) for row in batch.inputs] == [text[:8], text[8:16]]
    assert [spell(row) for row in batch.targets] == [text[1:9], text[9:17]]
    assert spell(test.take(torch.tensor([0]), train=False).inputs[0]) == text[border : border + 8]
    assert train.labels is None


def test_windows_may_begin_at_any_character(tmp_path: Path) -> None:
    text = "".join(shakespeare.SYMBOLS[place % 65] for place in range(200))
    (tmp_path / "input.txt").write_text(text)
    train, test = shakespeare.read(Location(tmp_path, ("input.txt",), "folder"), length=8, every=1)
    assert len(train) == 180 - 8
    assert len(test) == (20 - 1) // 8
    assert train.inputs.untyped_storage().nbytes() == 180
    for number in (0, 1, len(train) - 1):
        window = train.take(torch.tensor([number]), train=True)
        assert window.inputs[0].tolist() == [place % 65 for place in range(number, number + 8)]
        assert window.targets[0].tolist() == [place % 65 for place in range(number + 1, number + 9)]


def test_shakespeare_damaged(tmp_path: Path) -> None:
    found = Location(tmp_path, ("input.txt",), "folder")
    (tmp_path / "input.txt").write_text("abc#def" * 100)
    with pytest.raises(DataError, match="unexpected byte 35 at 3"):
        shakespeare.read(found, length=8)
    (tmp_path / "input.txt").write_text("abc")
    with pytest.raises(DataError, match="3 characters are too few for windows of 8"):
        shakespeare.read(found, length=8)
