"""Tar archives are read in memory; broken ones are named."""

from __future__ import annotations

import gzip
import io
import tarfile
from pathlib import Path

import pytest

from farflung.data.archive import gunzip, members, read_members
from farflung.errors import DataError


def pack(path: Path, files: dict[str, bytes], mode: str = "w:gz") -> Path:
    with tarfile.open(path, mode) as archive:  # type: ignore[call-overload]
        for name, content in files.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            archive.addfile(entry, io.BytesIO(content))
        link = tarfile.TarInfo("link")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/hostname"
        archive.addfile(link)
    return path


@pytest.mark.parametrize("mode", ["w", "w:gz"])
def test_members(tmp_path: Path, mode: str) -> None:
    path = pack(tmp_path / "a.tar", {"./x/1": b"one", "x/2": b"", "y/3": b"three"}, mode)
    assert list(members(path, lambda name: name != "y/3")) == [("x/1", b"one"), ("x/2", b"")]
    assert read_members(path, ["y/3", "x/1"]) == [b"three", b"one"]
    with pytest.raises(DataError, match="no x/4 in it"):
        read_members(path, ["x/1", "x/4"])


@pytest.mark.parametrize("mode", ["w", "w:gz"])
@pytest.mark.parametrize("keep", [0.0, 0.2, 0.5, 0.9])
def test_truncated(tmp_path: Path, mode: str, keep: float) -> None:
    content = bytes(i * i % 251 for i in range(100_000))
    path = pack(tmp_path / "a.tar", {"x": content}, mode)
    whole = path.read_bytes()
    path.write_bytes(whole[: int(keep * (len(whole) - 4096 if mode == "w" else len(whole)))])
    with pytest.raises(DataError, match=r"a\.tar: .*truncated"):
        read_members(path, ["x"])


def test_not_an_archive_and_absent(tmp_path: Path) -> None:
    path = tmp_path / "a.tar.gz"
    path.write_bytes(b"hello" * 1000)
    with pytest.raises(DataError, match="not a tar archive"):
        list(members(path, bool))
    with pytest.raises(DataError, match="No such file"):
        list(members(tmp_path / "b", bool))


def test_gunzip(tmp_path: Path) -> None:
    path = tmp_path / "a.gz"
    path.write_bytes(gzip.compress(b"content" * 100))
    assert gunzip(path) == b"content" * 100
    path.write_bytes(path.read_bytes()[:-5])
    with pytest.raises(DataError, match="truncated"):
        gunzip(path)
    path.write_bytes(b"content")
    with pytest.raises(DataError, match="not a gzip file"):
        gunzip(path)
    with pytest.raises(DataError, match="No such file"):
        gunzip(tmp_path / "b")
