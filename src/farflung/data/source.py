"""Where data sets are found, and how their files are fetched and verified.

A data set called NAME is looked for in ``$FARFLUNG_DATA/NAME``, then in ``$FARFLUNG_CACHE/NAME`` (the cache is
``~/.cache/farflung`` when the variable is not set), then among the packaged subsets. Nothing is downloaded on the
way: ``farflung data fetch NAME`` does that, into the cache.
"""

from __future__ import annotations

import hashlib
import http.client
import os
import socket
import tarfile
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeAlias

from farflung.errors import ConfigError, DataError, DataMissing
from farflung.files import reading

__all__ = [
    "File",
    "Location",
    "Source",
    "Which",
    "cache_folder",
    "data_folder",
    "fetch",
    "find",
    "locate",
    "members",
    "read_members",
    "verify",
]

Which: TypeAlias = Literal["auto", "packaged", "full"]
"""``packaged``: the subset inside the package, whatever else is there; ``full``: the official set or an error;
``auto``: the official set when it is at hand, else the subset."""

PACKAGED = Path(__file__).parent / "packaged"

_TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True)
class File:
    """One file as its publishers offer it.

    Args:
      name: path inside the data set's folder.
      nbytes: size; ``None`` when not published.
      url: where it is offered; empty when it has to be asked for by hand.
      md5: of the file, as published; empty when not.
      sha256: of the file, as published; empty when not.
      lines_sha256: of a text's lines without the blanks at their ends, where nothing is published and these blanks have
        changed; empty otherwise.
    """

    name: str
    nbytes: int | None = None
    url: str = ""
    md5: str = ""
    sha256: str = ""
    lines_sha256: str = ""


@dataclass(frozen=True, slots=True)
class Source:
    """A data set: what it is called, which files hold it, and under what terms.

    Args:
      name: also the name of its folder.
      title: one line for a table.
      licence: short.
      homepage: where its publishers describe it.
      files: the official files; together they are the data set.
      layouts: other sets of file names that hold the same samples, tried before ``files``.
      packaged: whether a subset is inside the package.
      how_to_get: what to do when the files are not at hand; the command that fetches them when empty.
      samples: training and test samples in the official files; ``None`` where that depends on how they are cut.
    """

    name: str
    title: str
    licence: str
    homepage: str
    files: tuple[File, ...]
    layouts: tuple[tuple[str, ...], ...] = ()
    packaged: bool = False
    how_to_get: str = ""
    samples: tuple[int, int] | None = None

    @property
    def remedy(self) -> str:
        """What to do when the files are not at hand."""
        return self.how_to_get or f"fetch it with: farflung data fetch {self.name}"


@dataclass(frozen=True, slots=True)
class Location:
    """Where a data set was found.

    Args:
      folder: holds ``names``.
      names: the files of the layout that is complete there.
      kind: which of the three places this is.
    """

    folder: Path
    names: tuple[str, ...]
    kind: Literal["folder", "cache", "packaged"]

    def path(self, name: str) -> Path:
        """The path of one file."""
        return self.folder / name


# --- where files are ------------------------------------------------------------------------------------------------


def data_folder() -> Path | None:
    """The user's folder of data sets, from ``FARFLUNG_DATA``; ``None`` when not set.

    Raises:
      DataError: the variable names something that is not a folder.
    """
    value = os.environ.get("FARFLUNG_DATA")
    if not value:
        return None
    folder = Path(value).expanduser()
    if not folder.is_dir():
        raise DataError(f"FARFLUNG_DATA names {value}, which is not a folder")
    return folder


def cache_folder() -> Path:
    """Where fetched files are kept: ``FARFLUNG_CACHE``, or ``~/.cache/farflung``."""
    value = os.environ.get("FARFLUNG_CACHE")
    return Path(value).expanduser() if value else Path.home() / ".cache" / "farflung"


def find(source: Source, which: Which = "auto") -> Location | None:
    """Where ``source`` is, or ``None`` when it is nowhere.

    Raises:
      DataError: a folder holds some of the files but not all: using another place instead would make results
        depend on an accident.
      ConfigError: ``which`` is not one of the three.
    """
    if which not in ("auto", "packaged", "full"):
        raise ConfigError(f"data={which!r} is not one of auto, packaged, full")
    if which != "packaged":
        for kind, folder in _folders(source).items():
            layout = _complete(source, folder)
            if layout is not None:
                return Location(folder, layout, kind)
    if which != "full" and source.packaged:
        return Location(PACKAGED / source.name, tuple(file.name for file in source.files), "packaged")
    return None


def locate(source: Source, which: Which = "auto") -> Location:
    """Where ``source`` is.

    Raises:
      DataError: nowhere, with the folders tried and the command that fetches it; or incomplete.
      ConfigError: ``which`` is not one of the three.
    """
    found = find(source, which)
    if found is not None:
        return found
    if which == "packaged":
        raise DataError(f"{source.name} has no packaged subset; {source.remedy}")
    names = {"folder": "FARFLUNG_DATA", "cache": "cache"}
    tried = " and ".join(f"{folder} ({names[kind]})" for kind, folder in _folders(source).items())
    raise DataMissing(f"{source.name} was not found: looked in {tried}; {source.remedy}")


def _folders(source: Source) -> dict[Literal["folder", "cache"], Path]:
    """The folders in which ``source`` is looked for, in order."""
    cache, given = cache_folder() / source.name, data_folder()
    return {"cache": cache} if given is None else {"folder": given / source.name, "cache": cache}


def _complete(source: Source, folder: Path) -> tuple[str, ...] | None:
    """The names of the first layout of which ``folder`` holds all files; ``None`` when it holds none of any."""
    partial: list[str] = []
    for layout in (*source.layouts, tuple(file.name for file in source.files)):
        absent = [name for name in layout if not (folder / name).is_file()]
        if not absent:
            return layout
        if len(absent) < len(layout) and (not partial or len(absent) < len(partial)):
            partial = absent
    if partial:
        raise DataError(f"{source.name} in {folder} is incomplete: no {', '.join(partial)}; {source.remedy}")
    return None


# --- what files hold ------------------------------------------------------------------------------------------------


def verify(path: Path, file: File, *, called: str = "") -> None:
    """Checks size and checksum of a file.

    Args:
      path: of the file.
      file: what is known of it.
      called: its name in an error; the path when empty.

    Raises:
      DataError: they differ, in one line that names the file and both values.
    """
    called = called or str(path)
    size = path.stat().st_size
    if file.nbytes is not None and size != file.nbytes:
        raise DataError(f"{called}: expected {file.nbytes} bytes, found {size}")
    kind, expected = ("sha256", file.sha256) if file.sha256 else ("md5", file.md5)
    if expected:
        with path.open("rb") as stream:
            found = hashlib.file_digest(stream, kind).hexdigest()
    elif file.lines_sha256:
        kind, expected = "sha256 of lines", file.lines_sha256
        lines = b"\n".join(line.rstrip() for line in path.read_bytes().splitlines())
        found = hashlib.sha256(lines).hexdigest()
    else:
        return
    if found != expected:
        raise DataError(f"{called}: wrong checksum: expected {kind} {expected}, found {found}")


def members(path: Path, wanted: Callable[[str], bool]) -> Iterator[tuple[str, bytes]]:
    """Name and content of each regular file in a tar archive whose name is ``wanted``, in the archive's order.

    Nothing is unpacked to disk. A leading ``./`` is taken off the names.

    Raises:
      DataError: not a tar archive, or truncated.
    """
    with reading(path, "not a tar archive, or truncated", DataError), tarfile.open(path) as archive:
        for member in archive:
            name = member.name.removeprefix("./")
            content = archive.extractfile(member) if member.isreg() and wanted(name) else None
            if content is not None:
                yield name, content.read()


def read_members(path: Path, names: Sequence[str]) -> list[bytes]:
    """The contents of the files called ``names`` in a tar archive, in that order.

    Raises:
      DataError: a broken archive, or one without them.
    """
    found = dict(members(path, names.__contains__))
    if absent := [name for name in names if name not in found]:
        raise DataError(f"{path}: truncated, or another archive: no {', '.join(absent)} in it")
    return [found[name] for name in names]


# --- fetching -------------------------------------------------------------------------------------------------------


def fetch(source: Source, *, progress: bool = False) -> Path:
    """Downloads the official files of ``source`` that the cache does not hold, or not intact.

    A file gets its name when it is whole and verified.

    Args:
      source: what to fetch.
      progress: whether a bar on stderr shows how far a file is.

    Returns:
      The folder that now holds every official file.

    Raises:
      DataError: no address, no connection, or a wrong size or checksum.
    """
    folder = cache_folder() / source.name
    if not all(file.url for file in source.files):
        raise DataError(f"{source.name} cannot be fetched: {source.remedy}")
    for file in source.files:
        path = folder / file.name
        if path.is_file():
            with suppress(DataError):
                verify(path, file)
                continue
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder, prefix=".fetching-") as scratch:
            part = Path(scratch) / "part"
            _download(file.url, part, progress=progress)
            verify(part, file, called=file.url)
            part.replace(path)
    return folder


def _download(url: str, path: Path, *, progress: bool) -> None:
    from torch.hub import download_url_to_file

    before = socket.getdefaulttimeout()
    socket.setdefaulttimeout(_TIMEOUT_S)  # torch waits without a deadline
    try:
        download_url_to_file(url, str(path), progress=progress)
    except (OSError, http.client.HTTPException) as error:
        raise DataError(f"cannot download {url}: {str(error) or type(error).__name__}") from None
    finally:
        socket.setdefaulttimeout(before)
