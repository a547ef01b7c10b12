"""Fetches official files into the cache: resumed when interrupted, verified before they get their name."""

from __future__ import annotations

import http.client
import os
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import TypeAlias

from farflung.data.source import File, Source, cache_folder, verify
from farflung.errors import DataError

__all__ = ["Progress", "download", "fetch"]

Progress: TypeAlias = Callable[[str, int, "int | None"], None]
"""Called with a file's name, the bytes there so far and the bytes expected (``None``: unknown)."""

_CHUNK = 1 << 18
_TIMEOUT_S = 60.0


def fetch(
    source: Source, *, folder: Path | None = None, attempts: int = 3, progress: Progress | None = None
) -> Path:
    """Downloads the official files of ``source`` that are not there yet or not intact.

    Args:
      source: what to fetch.
      folder: where to; by default the data set's folder in the cache.
      attempts: connections per file before giving up; each resumes where the last one ended.
      progress: told how far each file is.

    Returns:
      The folder that now holds every official file.

    Raises:
      DataError: no address, no connection, or a wrong checksum.
    """
    target = folder if folder is not None else cache_folder() / source.name
    for file in source.files:
        if not file.url:
            raise DataError(f"{source.name} cannot be fetched: {source.remedy}")
    for file in source.files:
        path = target / file.name
        if path.is_file():
            try:
                verify(path, file)
                continue
            except DataError:
                path.unlink()
        download(file, path, attempts=attempts, progress=progress)
    return target


def download(file: File, path: Path, *, attempts: int = 3, progress: Progress | None = None) -> None:
    """Downloads one file to ``path``, which appears only whole and verified.

    The bytes grow in ``path`` with ``.part`` added. An interruption leaves that file, and the next call asks for
    the rest of it; a file whose checksum is wrong is removed. Two processes must not fetch the same file at once:
    the second finds the lock of the first and says so.

    Raises:
      DataError: no connection or too few bytes (what came is kept), or a wrong checksum (nothing is kept).
    """
    if not file.url.startswith(("http://", "https://")):
        raise DataError(f"{file.name}: {file.url!r} is not an http or https address")
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(path.name + ".part")
    with part.open("ab") as out:
        _lock(out.fileno(), path)
        trouble = _attempts(file, out.fileno(), attempts, progress)
        if trouble:
            kept = os.fstat(out.fileno()).st_size
            if not kept:
                part.unlink()
            rest = f"; {kept} bytes are kept, run the same command to go on" if kept else ""
            raise DataError(f"cannot download {file.url}: {trouble}{rest}")
        try:
            verify(part, file)
        except DataError as error:
            part.unlink()
            raise DataError(
                f"{file.url}: {str(error).removeprefix(f'{part}: ')}; the download was removed"
            ) from None
        part.replace(path)


def _attempts(file: File, out: int, attempts: int, progress: Progress | None) -> str:
    """Connects up to ``attempts`` times; what went wrong last, or nothing when the file is whole."""
    trouble = "no attempt was made"
    for _ in range(attempts):
        try:
            if _receive(file, out, progress):
                return ""
            trouble = "the connection ended early"
        except urllib.error.HTTPError as error:
            trouble = f"the server answered {error.code} {error.reason}"
            error.close()
            if error.code < 500:
                break
        except (OSError, http.client.HTTPException) as error:
            trouble = str(getattr(error, "reason", "") or error) or type(error).__name__
    return trouble


def _receive(file: File, out: int, progress: Progress | None) -> bool:
    """Appends what one connection gives; whether the file is whole as far as sizes tell."""
    have = os.fstat(out).st_size
    if file.nbytes is not None and have >= file.nbytes:
        if have == file.nbytes:
            return True
        os.ftruncate(out, 0)
        have = 0
    request = urllib.request.Request(file.url, headers={"Range": f"bytes={have}-"} if have else {})  # noqa: S310
    try:
        response = urllib.request.urlopen(request, timeout=_TIMEOUT_S)  # noqa: S310
    except urllib.error.HTTPError as error:
        if error.code == 416 and have:  # nothing left, or the file is another one now: the checksum decides
            error.close()
            if file.nbytes is None:
                return True
            os.ftruncate(out, 0)
            return False
        raise
    with response:
        if have and not _continues(response, have):
            os.ftruncate(out, 0)
            have = 0
        length = response.headers.get("Content-Length")
        total = have + int(length) if length and length.isdigit() else file.nbytes
        while chunk := response.read(_CHUNK):
            os.write(out, chunk)
            have += len(chunk)
            if progress is not None:
                progress(file.name, have, total)
            if file.nbytes is not None and have > file.nbytes:
                raise OSError(f"more than the expected {file.nbytes} bytes came")
    return total is None or have >= total


def _continues(response: http.client.HTTPResponse, have: int) -> bool:
    """Whether the server sends the rest from byte ``have`` (else it sends everything again)."""
    return response.status == 206 and response.headers.get("Content-Range", "").startswith(f"bytes {have}-")


def _lock(descriptor: int, path: Path) -> None:
    try:
        import fcntl  # not on Windows, where two fetches of one file are not noticed
    except ImportError:
        return
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise DataError(f"{path} is being downloaded by another process") from None
