"""Downloads are resumed or removed, never half-used."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from http.server import ThreadingHTTPServer
from pathlib import Path

import pytest

from farflung.data import CATALOG, fetch
from farflung.data.download import download
from farflung.data.source import File, Source
from farflung.errors import DataError
from tests.web import CONTENT, Handler, Server, serving


@pytest.fixture
def server() -> Iterator[Server]:
    with serving() as running:
        yield running


def left(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_whole(server: Server, tmp_path: Path) -> None:
    seen: list[tuple[str, int, int | None]] = []
    download(server.file(), tmp_path / "set.bin", progress=lambda *report: seen.append(report))
    assert (tmp_path / "set.bin").read_bytes() == CONTENT
    assert left(tmp_path) == ["set.bin"]
    assert seen[-1] == ("set.bin", len(CONTENT), len(CONTENT))


def test_interrupted_then_resumed(server: Server, tmp_path: Path) -> None:
    server.break_after = [300_000]
    with pytest.raises(DataError, match="300000 bytes are kept, run the same command"):
        download(server.file(), tmp_path / "set.bin", attempts=1)
    assert left(tmp_path) == ["set.bin.part"]
    download(server.file(), tmp_path / "set.bin", attempts=1)
    assert (tmp_path / "set.bin").read_bytes() == CONTENT
    assert server.asked == [None, "bytes=300000-"]
    assert left(tmp_path) == ["set.bin"]


def test_attempts_resume_by_themselves(server: Server, tmp_path: Path) -> None:
    server.break_after = [100_000, 200_000]
    download(server.file(), tmp_path / "set.bin", attempts=3)
    assert (tmp_path / "set.bin").read_bytes() == CONTENT
    assert server.asked == [None, "bytes=100000-", "bytes=300000-"]


def test_a_server_without_ranges_starts_again(server: Server, tmp_path: Path) -> None:
    server.ranges = False
    server.break_after = [300_000]
    download(server.file(), tmp_path / "set.bin", attempts=2)
    assert (tmp_path / "set.bin").read_bytes() == CONTENT


def test_wrong_checksum_keeps_nothing(server: Server, tmp_path: Path) -> None:
    server.content = CONTENT[::-1]
    with pytest.raises(DataError) as caught:
        download(server.file(), tmp_path / "set.bin")
    assert "wrong checksum" in str(caught.value)
    assert "\n" not in str(caught.value)
    assert left(tmp_path) == []


def test_whatever_can_be_fetched_is_verified() -> None:
    files = [(name, file) for name, source in CATALOG.items() for file in source.files if file.url]
    assert files
    assert [name for name, file in files if not (file.md5 or file.sha256 or file.lines_sha256)] == []


def test_a_text_is_verified_by_its_lines_whatever_blanks_end_them(server: Server, tmp_path: Path) -> None:
    server.content = b"-1 3:1 \r\n+1 1:1\n"
    known = hashlib.sha256(b"-1 3:1\n+1 1:1").hexdigest()
    file = server.file(nbytes=None, md5="", lines_sha256=known)
    download(file, tmp_path / "set.bin")
    server.content = b"-1 3:1 \r\n+1 2:1\n"
    with pytest.raises(DataError, match=f"wrong checksum: expected sha256 {known} of its lines"):
        download(file, tmp_path / "other.bin")
    assert left(tmp_path) == ["set.bin"]


def test_resuming_another_content_keeps_nothing(server: Server, tmp_path: Path) -> None:
    (tmp_path / "set.bin.part").write_bytes(b"something else")
    with pytest.raises(DataError, match="wrong checksum"):
        download(server.file(), tmp_path / "set.bin")
    assert left(tmp_path) == []
    download(server.file(), tmp_path / "set.bin")
    assert left(tmp_path) == ["set.bin"]


def test_too_much_already_there(server: Server, tmp_path: Path) -> None:
    (tmp_path / "set.bin.part").write_bytes(CONTENT + b"more")
    download(server.file(), tmp_path / "set.bin")
    assert (tmp_path / "set.bin").read_bytes() == CONTENT


def test_all_there_of_a_file_of_unknown_size(server: Server, tmp_path: Path) -> None:
    (tmp_path / "set.bin.part").write_bytes(CONTENT)
    download(server.file(nbytes=None), tmp_path / "set.bin")
    assert server.asked == [f"bytes={len(CONTENT)}-"]
    assert left(tmp_path) == ["set.bin"]


def test_absent_on_the_server(server: Server, tmp_path: Path) -> None:
    server.status = 404
    with pytest.raises(DataError, match="the server answered 404"):
        download(server.file(), tmp_path / "set.bin")
    assert left(tmp_path) == []
    assert len(server.asked) == 1, "a missing file is not asked for again"


def test_nobody_there(tmp_path: Path) -> None:
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as closed:
        port = closed.server_port
    with pytest.raises(DataError, match=r"cannot download http://127\.0\.0\.1"):
        download(File("set.bin", 1, f"http://127.0.0.1:{port}/"), tmp_path / "set.bin")
    assert left(tmp_path) == []


def test_other_addresses_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="not an http or https address"):
        download(File("set.bin", 1, "file:///etc/hostname"), tmp_path / "set.bin")


def test_two_processes_at_once(server: Server, tmp_path: Path) -> None:
    fcntl = pytest.importorskip("fcntl")
    with (tmp_path / "set.bin.part").open("ab") as other:
        fcntl.flock(other.fileno(), fcntl.LOCK_EX)
        with pytest.raises(DataError, match="being downloaded by another process"):
            download(server.file(), tmp_path / "set.bin")
    assert server.asked == []


def test_fetch_into_the_cache(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FARFLUNG_CACHE", str(tmp_path))
    toy = Source("toy", "one file", "none", "", (server.file(),))
    assert fetch(toy) == tmp_path / "toy"
    assert left(tmp_path / "toy") == ["set.bin"]
    fetch(toy)
    assert len(server.asked) == 1, "what is there and intact is not fetched again"
    (tmp_path / "toy" / "set.bin").write_bytes(b"damaged")
    fetch(toy)
    assert (tmp_path / "toy" / "set.bin").read_bytes() == CONTENT


def test_fetch_without_an_address(tmp_path: Path) -> None:
    toy = Source("toy", "one file", "none", "", (File("a"),), by_hand="ask the authors")
    with pytest.raises(DataError, match="toy cannot be fetched: ask the authors"):
        fetch(toy, folder=tmp_path)
