"""Where data is looked for, in which order, and what is said when it is not there."""

from __future__ import annotations

import hashlib
import io
import tarfile
from pathlib import Path

import pytest

from farflung.data import catalog, locate
from farflung.data.source import File, Source, find, iter_members, read_members, verify
from farflung.errors import ConfigError, DataError, UnknownName

TOY = Source(
    "toy", "two files", "none", "", (File("a", 1, "http://x/a"), File("b", 1, "http://x/b")), (("ab",),)
)


@pytest.fixture
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    mine, cache = tmp_path / "mine", tmp_path / "cache"
    mine.mkdir()
    monkeypatch.setenv("FARFLUNG_DATA", str(mine))
    monkeypatch.setenv("FARFLUNG_CACHE", str(cache))
    return mine, cache


def put(folder: Path, *names: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name in names:
        (folder / name).write_text("x")


def test_order_of_places(places: tuple[Path, Path]) -> None:
    mine, cache = places
    assert find(TOY) is None
    put(cache / "toy", "a", "b")
    found = locate(TOY)
    assert (found.folder, found.kind, found.names) == (cache / "toy", "cache", ("a", "b"))
    put(mine / "toy", "ab")
    found = locate(TOY)
    assert (found.folder, found.kind, found.names) == (mine / "toy", "folder", ("ab",))


def test_absent_names_folders_and_command(places: tuple[Path, Path]) -> None:
    mine, cache = places
    with pytest.raises(DataError) as caught:
        locate(TOY)
    message = str(caught.value)
    for part in ("toy", str(mine / "toy"), str(cache / "toy"), "farflung data fetch toy"):
        assert part in message
    assert "\n" not in message
    assert caught.value.exit_code == 2


def test_incomplete_is_an_error_and_not_another_place(places: tuple[Path, Path]) -> None:
    mine, cache = places
    put(mine / "toy", "a")
    put(cache / "toy", "a", "b")
    with pytest.raises(DataError, match="incomplete: no b"):
        locate(TOY)


def test_an_unfinished_download_counts_as_nothing(places: tuple[Path, Path]) -> None:
    put(places[1] / "toy", "a.part", "b.part")
    assert find(TOY) is None


def test_packaged_only_when_asked_or_alone(places: tuple[Path, Path]) -> None:
    fashion = catalog.lookup_source("fashion-mnist")
    assert locate(fashion).kind == "packaged"
    with pytest.raises(DataError, match="farflung data fetch fashion-mnist"):
        locate(fashion, "full")
    put(places[0] / "fashion-mnist", *(file.name for file in fashion.files))
    assert locate(fashion).kind == "folder"
    assert locate(fashion, "packaged").kind == "packaged"
    with pytest.raises(DataError, match="toy has no packaged subset"):
        locate(TOY, "packaged")
    with pytest.raises(ConfigError, match="auto, packaged, full"):
        locate(TOY, "some")  # type: ignore[arg-type]


def test_folder_variable_must_name_a_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("FARFLUNG_DATA", str(tmp_path / "nowhere"))
    with pytest.raises(DataError, match=r"FARFLUNG_DATA names .*nowhere, which is not a folder"):
        locate(TOY)


def test_verify(tmp_path: Path) -> None:
    path = tmp_path / "f"
    path.write_bytes(b"content")
    md5, sha256 = (hashlib.new(kind, b"content").hexdigest() for kind in ("md5", "sha256"))
    verify(path, File("f"))
    verify(path, File("f", 7, md5=md5))
    verify(path, File("f", 7, sha256=sha256))
    with pytest.raises(DataError, match="expected 8 bytes, found 7"):
        verify(path, File("f", 8))
    with pytest.raises(DataError, match=f"expected md5 0, found {md5}"):
        verify(path, File("f", 7, md5="0"))
    with pytest.raises(DataError, match=f"expected sha256 0, found {sha256}"):
        verify(path, File("f", 7, md5=md5, sha256="0"))


def test_catalog(places: tuple[Path, Path]) -> None:
    rows = {row.source.name: row for row in catalog.list_entries()}
    assert list(rows) == sorted(catalog.CATALOG)
    fashion = rows["fashion-mnist"]
    assert fashion.location is not None
    assert fashion.location.kind == "packaged"
    assert fashion.nbytes == 30878645
    for row in rows.values():
        assert row.source.licence
        assert row.source.homepage
        assert row.source.title
        assert row.source.files
        for file in row.source.files:
            assert file.url
    put(places[0] / "fashion-mnist", fashion.source.files[0].name)
    (broken,) = (row for row in catalog.list_entries() if row.source.name == "fashion-mnist")
    assert broken.location is None
    assert "incomplete" in broken.problem
    with pytest.raises(UnknownName, match="unknown data set 'x'"):
        catalog.lookup_source("x")


def test_a_data_set_that_a_module_declares() -> None:
    assert catalog.lookup_source("tests.data.test_source:TOY").title == "two files"
    with pytest.raises(
        ConfigError, match=r"data set 'tests\.data\.test_source:put' is function, not a farflung"
    ):
        catalog.lookup_source("tests.data.test_source:put")


# --- archives -------------------------------------------------------------------------------------------------------


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
    assert list(iter_members(path, lambda name: name != "y/3")) == [("x/1", b"one"), ("x/2", b"")]
    assert read_members(path, ["y/3", "x/1"]) == [b"three", b"one"]
    with pytest.raises(DataError, match="no x/4 in it"):
        read_members(path, ["x/1", "x/4"])


@pytest.mark.parametrize("mode", ["w", "w:gz"])
def test_a_truncated_archive(tmp_path: Path, mode: str) -> None:
    content = bytes(i * i % 251 for i in range(100_000))
    path = pack(tmp_path / "a.tar", {"x": content}, mode)
    whole = path.read_bytes()
    for keep in (0.0, 0.2, 0.5, 0.9):
        path.write_bytes(whole[: int(keep * (len(whole) - 4096 if mode == "w" else len(whole)))])
        with pytest.raises(DataError, match=r"a\.tar: .*truncated"):
            read_members(path, ["x"])


def test_not_an_archive_and_absent(tmp_path: Path) -> None:
    path = tmp_path / "a.tar.gz"
    path.write_bytes(b"hello" * 1000)
    with pytest.raises(DataError, match="not a tar archive"):
        list(iter_members(path, bool))
    with pytest.raises(DataError, match="No such file"):
        list(iter_members(tmp_path / "b", bool))
