"""``farflung data fetch``: a whole and verified data set, or one clear line."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from farflung.cli import fetch as command
from farflung.cli.main import main
from farflung.data import CATALOG
from farflung.data import fetch as plain_fetch
from farflung.data.source import File, Source
from tests.web import CONTENT, Server, serving


@pytest.fixture
def server() -> Iterator[Server]:
    with serving() as running:
        yield running


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where ``toy`` goes; one connection for each file, so that a broken one shows."""
    monkeypatch.setenv("FARFLUNG_CACHE", str(tmp_path))
    monkeypatch.setattr(command, "fetch", lambda *args, **given: plain_fetch(*args, attempts=1, **given))
    return tmp_path / "toy"


def offer(monkeypatch: pytest.MonkeyPatch, file: File) -> None:
    """Makes ``toy``, of one file, a data set that there is."""
    monkeypatch.setitem(CATALOG, "toy", Source("toy", "one file", "none", "", (file,)))


def refused(capsys: pytest.CaptureFixture[str], *args: str) -> str:
    """Runs the command, which must refuse; the one line it says."""
    assert main(["data", "fetch", *args]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    (line,) = [line for line in err.splitlines() if not line.startswith("fetching ")]
    assert line.startswith("farflung: ")
    return line


def test_a_data_set_arrives(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, server: Server, cache: Path
) -> None:
    offer(monkeypatch, server.file())
    assert main(["data", "fetch", "toy"]) == 0
    assert (cache / "set.bin").read_bytes() == CONTENT
    assert capsys.readouterr() == (f"{cache}\n", "fetching set.bin\n")
    assert main(["data", "fetch", "toy", "--quiet"]) == 0
    assert capsys.readouterr() == (f"{cache}\n", "")
    assert len(server.asked) == 1, "what is there already is verified, not fetched"


def test_a_wrong_checksum(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, server: Server, cache: Path
) -> None:
    offer(monkeypatch, server.file())
    server.content = CONTENT[::-1]
    said = refused(capsys, "toy")
    assert "wrong checksum: expected md5" in said
    assert "the download was removed" in said
    assert list(cache.iterdir()) == []


def test_an_interrupted_download_goes_on(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, server: Server, cache: Path
) -> None:
    offer(monkeypatch, server.file())
    server.break_after = [300_000]
    assert "300000 bytes are kept, run the same command to go on" in refused(capsys, "toy")
    assert [path.name for path in cache.iterdir()] == ["set.bin.part"], "nothing has the name of the file yet"
    assert main(["data", "fetch", "toy"]) == 0
    assert server.asked == [None, "bytes=300000-"]
    assert (cache / "set.bin").read_bytes() == CONTENT


def test_a_damaged_file_is_fetched_again(
    monkeypatch: pytest.MonkeyPatch, server: Server, cache: Path
) -> None:
    offer(monkeypatch, server.file())
    cache.mkdir()
    (cache / "set.bin").write_bytes(b"damaged")
    assert main(["data", "fetch", "toy"]) == 0
    assert (cache / "set.bin").read_bytes() == CONTENT


def test_nobody_answers(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, cache: Path
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    offer(monkeypatch, File("set.bin", 1, f"http://127.0.0.1:{port}/set.bin"))
    assert f"cannot download http://127.0.0.1:{port}/set.bin: " in refused(capsys, "toy")
    assert list(cache.iterdir()) == []


def test_a_name_that_there_is_not(capsys: pytest.CaptureFixture[str]) -> None:
    said = refused(capsys, "cifar10")
    assert "unknown data set 'cifar10'; known: " in said
    assert "cifar-10" in said


def test_a_data_set_without_an_address(capsys: pytest.CaptureFixture[str]) -> None:
    assert "aid-64 cannot be fetched: get AID from https://" in refused(capsys, "aid-64")


def test_a_cache_that_cannot_be_written(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, server: Server, tmp_path: Path
) -> None:
    offer(monkeypatch, server.file())
    (tmp_path / "file").touch()
    monkeypatch.setenv("FARFLUNG_CACHE", str(tmp_path / "file"))
    assert f"toy: cannot write to {tmp_path / 'file'} (Not a directory)" in refused(capsys, "toy")
