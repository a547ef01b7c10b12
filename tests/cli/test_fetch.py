"""``farflung data fetch``: a whole and verified data set, or one clear line."""

from __future__ import annotations

import hashlib
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from farflung.cli.main import main
from farflung.data import CATALOG
from farflung.data.source import File, Source
from tests.refusals import refuse
from tests.web import CONTENT, Server, serving


@pytest.fixture
def server() -> Iterator[Server]:
    with serving() as running:
        yield running


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where ``toy`` goes."""
    monkeypatch.setenv("FARFLUNG_CACHE", str(tmp_path))
    return tmp_path / "toy"


def offer(monkeypatch: pytest.MonkeyPatch, file: File) -> None:
    """Makes ``toy``, of one file, a data set that there is."""
    monkeypatch.setitem(CATALOG, "toy", Source("toy", "one file", "none", "", (file,)))


def test_a_data_set_arrives(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, server: Server, cache: Path
) -> None:
    offer(monkeypatch, server.file())
    assert main(["data", "fetch", "toy"]) == 0
    assert (cache / "set.bin").read_bytes() == CONTENT
    assert capsys.readouterr() == (f"{cache}\n", "")
    assert main(["data", "fetch", "toy", "--quiet"]) == 0
    assert capsys.readouterr() == (f"{cache}\n", "")
    assert server.asked == 1, "a file that is there is verified, not fetched"
    assert [path.name for path in cache.iterdir()] == ["set.bin"]


@pytest.mark.parametrize("known", ["md5", "sha256", "lines_sha256", "nbytes"])
def test_altered_content(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    server: Server,
    cache: Path,
    known: str,
) -> None:
    values = {
        "md5": hashlib.md5(CONTENT).hexdigest(),
        "sha256": hashlib.sha256(CONTENT).hexdigest(),
        "lines_sha256": hashlib.sha256(b"-1 3:1\n+1 1:1").hexdigest(),
        "nbytes": len(CONTENT),
    }
    if known == "lines_sha256":
        server.content = b"-1 3:1 \r\n+1 1:1\n"
    offer(monkeypatch, server.file(**{"nbytes": None, "md5": "", known: values[known]}))
    right, server.content = server.content, server.content[:-3] + (b"" if known == "nbytes" else b"2:1")
    said = refuse(capsys, "data", "fetch", "toy")
    assert f"{server.file().url}: " in said
    assert (
        "expected 1048576 bytes, found 1048573" if known == "nbytes" else "wrong checksum: expected "
    ) in said
    assert list(cache.iterdir()) == []
    server.content = right
    assert main(["data", "fetch", "toy"]) == 0


def test_a_connection_that_ends_early(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, server: Server, cache: Path
) -> None:
    offer(monkeypatch, server.file())
    server.break_after = [300_000]
    assert server.file().url in refuse(capsys, "data", "fetch", "toy")
    assert list(cache.iterdir()) == []


def test_a_damaged_file_is_fetched_again(
    monkeypatch: pytest.MonkeyPatch, server: Server, cache: Path
) -> None:
    offer(monkeypatch, server.file())
    cache.mkdir()
    (cache / "set.bin").write_bytes(b"damaged")
    assert main(["data", "fetch", "toy"]) == 0
    assert (cache / "set.bin").read_bytes() == CONTENT


def test_absent_on_the_server(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, server: Server, cache: Path
) -> None:
    offer(monkeypatch, server.file())
    server.status = 404
    assert f"cannot download {server.file().url}: HTTP Error 404: Not Found" in refuse(
        capsys, "data", "fetch", "toy"
    )
    assert list(cache.iterdir()) == []


def test_no_server(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    offer(monkeypatch, File("set.bin", 1, f"http://127.0.0.1:{port}/set.bin"))
    assert f"cannot download http://127.0.0.1:{port}/set.bin: " in refuse(capsys, "data", "fetch", "toy")
    assert list(cache.iterdir()) == []


def test_a_silent_server(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, cache: Path
) -> None:
    monkeypatch.setattr("farflung.data.source._TIMEOUT_S", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        offer(monkeypatch, File("set.bin", 1, f"http://127.0.0.1:{silent.getsockname()[1]}/set.bin"))
        assert "timed out" in refuse(capsys, "data", "fetch", "toy")
    assert socket.getdefaulttimeout() is None
    assert list(cache.iterdir()) == []


def test_a_name_that_there_is_not(capsys: pytest.CaptureFixture[str]) -> None:
    said = refuse(capsys, "data", "fetch", "cifar10")
    assert "unknown data set 'cifar10'; did you mean cifar-10?" in said
    assert "cifar-10" in said


def test_a_data_set_of_a_benchmark(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, cache: Path
) -> None:
    said = refuse(capsys, "data", "fetch", "benchmarks.workloads.aid:SOURCE")
    assert "aid-64 cannot be fetched: get AID from https://" in said


def test_a_cache_that_cannot_be_written(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, server: Server, tmp_path: Path
) -> None:
    offer(monkeypatch, server.file())
    (tmp_path / "file").touch()
    monkeypatch.setenv("FARFLUNG_CACHE", str(tmp_path / "file"))
    assert f"toy: cannot write to {tmp_path / 'file'} (Not a directory)" in refuse(
        capsys, "data", "fetch", "toy"
    )
