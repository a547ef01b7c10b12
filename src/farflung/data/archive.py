"""Reads files out of tar archives in memory; nothing is unpacked to disk, so no name in an archive can do harm."""

from __future__ import annotations

import bz2
import gzip
import tarfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

from farflung.errors import DataError

__all__ = ["content", "gunzip", "members", "read_members"]

_BROKEN = (tarfile.TarError, EOFError, zlib.error, gzip.BadGzipFile)


def members(path: Path, wanted: Callable[[str], bool]) -> Iterator[tuple[str, bytes]]:
    """Name and content of each regular file in ``path`` whose name is ``wanted``, in the archive's order.

    A leading ``./`` is taken off the names.

    Raises:
      DataError: not a tar archive, or cut short.
    """
    try:
        with tarfile.open(path, "r|*") as archive:
            for member in archive:
                name = member.name.removeprefix("./")
                if member.isreg() and wanted(name):
                    stream = archive.extractfile(member)
                    content = b"" if stream is None else stream.read()
                    if len(content) != member.size:
                        raise DataError(
                            f"{path}: truncated: {name} has {member.size} bytes, found {len(content)}"
                        )
                    yield name, content
    except _BROKEN as error:
        raise DataError(
            f"{path}: not a tar archive, or truncated ({str(error) or type(error).__name__})"
        ) from None
    except OSError as error:
        raise DataError(f"{path}: {error.strerror or error}") from None


def read_members(path: Path, names: list[str]) -> list[bytes]:
    """The contents of the files called ``names``, in that order.

    Raises:
      DataError: a broken archive, or one without them.
    """
    found = dict(members(path, set(names).__contains__))
    absent = [name for name in names if name not in found]
    if absent:
        raise DataError(f"{path}: truncated, or another archive: no {', '.join(absent)} in it")
    return [found[name] for name in names]


def gunzip(path: Path) -> bytes:
    """The content of a gzipped file.

    Raises:
      DataError: absent, damaged or cut short.
    """
    try:
        return gzip.decompress(path.read_bytes())
    except _BROKEN as error:
        raise DataError(f"{path}: not a gzip file, damaged or truncated ({error})") from None
    except OSError as error:
        raise DataError(f"{path}: {error.strerror or error}") from None


def content(path: Path) -> bytes:
    """The content of a file, unpacked where its name ends in ``.gz`` or ``.bz2``.

    Raises:
      DataError: absent, damaged or cut short.
    """
    if path.suffix == ".gz":
        return gunzip(path)
    try:
        packed = path.read_bytes()
    except OSError as error:
        raise DataError(f"{path}: {error.strerror or error}") from None
    if path.suffix != ".bz2":
        return packed
    try:
        return bz2.decompress(packed)
    except (OSError, ValueError) as error:
        raise DataError(f"{path}: not a bzip2 file, damaged or truncated ({error})") from None
