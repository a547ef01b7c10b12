"""Sources of data sets: places of their files, download and verification.

A data set called NAME is searched in ``$FARFLUNG_DATA/NAME``, then in ``$FARFLUNG_CACHE/NAME`` (the cache is
``~/.cache/farflung`` if the variable is not set), then among the packaged subsets. Nothing is downloaded in a search:
``farflung data fetch NAME`` downloads into the cache.
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
from farflung.files import path_exists, wrap_read_errors

__all__ = [
    "File",
    "Location",
    "Source",
    "Variant",
    "fetch",
    "find",
    "get_cache_folder",
    "get_data_folder",
    "iter_members",
    "locate",
    "read_members",
    "verify",
]

Variant: TypeAlias = Literal["auto", "packaged", "full"]
"""Variant of a data set. ``packaged``: the subset inside the package; ``full``: the official set or an error;
``auto``: the official set if available, else the subset."""

PACKAGED = Path(__file__).parent / "packaged"

_TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True)
class File:
    """File as its publishers offer it.

    Args:
      name: Path inside the data set's folder.
      nbytes: Size; ``None`` if not published.
      url: Address; empty if the file has to be requested from its publishers.
      md5: Published checksum of the file; empty without one.
      sha256: Published checksum of the file; empty without one.
      lines_sha256: Checksum of a text's lines without trailing blanks, for files without a published one whose blanks
        have changed; empty otherwise.
    """

    name: str
    nbytes: int | None = None
    url: str = ""
    md5: str = ""
    sha256: str = ""
    lines_sha256: str = ""


@dataclass(frozen=True, slots=True)
class Source:
    """Data set with its files and terms.

    Args:
      name: Name of the data set and of its folder.
      title: Description of one line for a table.
      licence: Short name of the licence.
      homepage: Page of its publishers.
      files: Official files; together they are the data set.
      layouts: Other sets of file names with equal samples, tried before ``files``.
      has_subset: A subset is inside the package.
      instructions: How to obtain the files; empty: by the command that fetches them.
      samples: Training and test samples of the official files; ``None`` if they depend on the windows.
    """

    name: str
    title: str
    licence: str
    homepage: str
    files: tuple[File, ...]
    layouts: tuple[tuple[str, ...], ...] = ()
    has_subset: bool = False
    instructions: str = ""
    samples: tuple[int, int] | None = None

    @property
    def remedy(self) -> str:
        """Advice to a user without the files."""
        return self.instructions or f"fetch it with: farflung data fetch {self.name}"


@dataclass(frozen=True, slots=True)
class Location:
    """Place of a data set's files.

    Args:
      folder: Folder of ``names``.
      names: Files of the layout that is complete in it.
      kind: Kind of place.
    """

    folder: Path
    names: tuple[str, ...]
    kind: Literal["folder", "cache", "packaged"]

    def get_path(self, name: str) -> Path:
        """Returns the path of one file."""
        return self.folder / name


# --- location of files ----------------------------------------------------------------------------------------------


def get_data_folder() -> Path | None:
    """Returns the folder that ``FARFLUNG_DATA`` names, which must exist; ``None`` if it is not set.

    Raises:
      DataError: The variable names something that is not a folder.
    """
    value = os.environ.get("FARFLUNG_DATA")
    if not value:
        return None
    folder = Path(value).expanduser()
    if not path_exists(folder, DataError, is_folder=True):
        raise DataError(f"FARFLUNG_DATA names {value}, which is not a folder")
    return folder


def get_cache_folder() -> Path:
    """Returns the folder of fetched files: ``FARFLUNG_CACHE``, or ``~/.cache/farflung``."""
    value = os.environ.get("FARFLUNG_CACHE")
    return Path(value).expanduser() if value else Path.home() / ".cache" / "farflung"


def find(source: Source, variant: Variant = "auto") -> Location | None:
    """Finds the location of ``source``; ``None`` if it is absent.

    Raises:
      DataError: A folder holds some of the files but not all: results must not depend on such an accident.
      ConfigError: ``parse_variant`` is not one of the three.
    """
    if variant not in ("auto", "packaged", "full"):
        raise ConfigError(f"data={variant!r} is not one of auto, packaged, full")
    if variant != "packaged":
        for kind, folder in _list_folders(source).items():
            layout = _find_layout(source, folder)
            if layout is not None:
                return Location(folder, layout, kind)
    if variant != "full" and source.has_subset:
        return Location(PACKAGED / source.name, tuple(file.name for file in source.files), "packaged")
    return None


def locate(source: Source, variant: Variant = "auto") -> Location:
    """Returns the location of ``source``.

    Raises:
      DataError: It is absent, with the searched folders and the command that fetches it; or incomplete.
      ConfigError: ``parse_variant`` is not one of the three.
    """
    location = find(source, variant)
    if location is not None:
        return location
    if variant == "packaged":
        raise DataError(f"{source.name} has no packaged subset; {source.remedy}")
    names = {"folder": "FARFLUNG_DATA", "cache": "cache"}
    folders = " and ".join(f"{folder} ({names[kind]})" for kind, folder in _list_folders(source).items())
    raise DataMissing(f"{source.name} was not found: looked in {folders}; {source.remedy}")


def _list_folders(source: Source) -> dict[Literal["folder", "cache"], Path]:
    """Lists the folders in which ``source`` is searched, in order."""
    cache, user_folder = get_cache_folder() / source.name, get_data_folder()
    return {"cache": cache} if user_folder is None else {"folder": user_folder / source.name, "cache": cache}


def _find_layout(source: Source, folder: Path) -> tuple[str, ...] | None:
    """Finds the first layout of which ``folder`` holds all files; ``None`` if it holds no file of any."""
    partial: list[str] = []
    for layout in (*source.layouts, tuple(file.name for file in source.files)):
        missing = [name for name in layout if not (folder / name).is_file()]
        if not missing:
            return layout
        if len(missing) < len(layout) and (not partial or len(missing) < len(partial)):
            partial = missing
    if partial:
        raise DataError(f"{source.name} in {folder} is incomplete: no {', '.join(partial)}; {source.remedy}")
    return None


# --- content of files -----------------------------------------------------------------------------------------------


def verify(path: Path, file: File, *, label: str = "") -> None:
    """Checks size and checksum of a file.

    Args:
      path: Path of the file.
      file: Published size and checksums.
      label: Name of the file in an error; empty: its path.

    Raises:
      DataError: They differ; names the file and both values in one line.
    """
    label = label or str(path)
    size = path.stat().st_size
    if file.nbytes is not None and size != file.nbytes:
        raise DataError(f"{label}: expected {file.nbytes} bytes, found {size}")
    kind, expected = ("sha256", file.sha256) if file.sha256 else ("md5", file.md5)
    if expected:
        with path.open("rb") as stream:
            digest = hashlib.file_digest(stream, kind).hexdigest()
    elif file.lines_sha256:
        kind, expected = "sha256 of lines", file.lines_sha256
        lines = b"\n".join(line.rstrip() for line in path.read_bytes().splitlines())
        digest = hashlib.sha256(lines).hexdigest()
    else:
        return
    if digest != expected:
        raise DataError(f"{label}: wrong checksum: expected {kind} {expected}, found {digest}")


def iter_members(path: Path, should_read: Callable[[str], bool]) -> Iterator[tuple[str, bytes]]:
    """Yields name and content of each regular file of a tar archive for whose name ``should_read`` is true, in order.

    Nothing is unpacked to disk. A leading ``./`` is removed from names.

    Raises:
      DataError: The file is no tar archive, or truncated.
    """
    with wrap_read_errors(path, "not a tar archive, or truncated", DataError), tarfile.open(path) as archive:
        for member in archive:
            name = member.name.removeprefix("./")
            content = archive.extractfile(member) if member.isreg() and should_read(name) else None
            if content is not None:
                yield name, content.read()


def read_members(path: Path, names: Sequence[str]) -> list[bytes]:
    """Reads the files called ``names`` from a tar archive, in that order.

    Raises:
      DataError: The archive is broken or lacks a file.
    """
    contents = dict(iter_members(path, names.__contains__))
    if missing := [name for name in names if name not in contents]:
        raise DataError(f"{path}: truncated, or another archive: no {', '.join(missing)} in it")
    return [contents[name] for name in names]


# --- fetching -------------------------------------------------------------------------------------------------------


def fetch(source: Source, *, progress: bool = False) -> Path:
    """Downloads the official files of ``source`` that are absent from the cache or damaged.

    A file gets its name once it is complete and verified.

    Args:
      source: Data set to fetch.
      progress: Shows a progress bar on stderr.

    Returns:
      The folder that now holds every official file.

    Raises:
      DataError: No address, no connection, or a wrong size or checksum.
    """
    folder = get_cache_folder() / source.name
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
            verify(part, file, label=file.url)
            part.replace(path)
    return folder


def _download(url: str, path: Path, *, progress: bool) -> None:
    from torch.hub import download_url_to_file

    earlier_timeout_s = socket.getdefaulttimeout()
    socket.setdefaulttimeout(_TIMEOUT_S)  # torch has no timeout of its own
    try:
        download_url_to_file(url, str(path), progress=progress)
    except (OSError, http.client.HTTPException) as error:
        raise DataError(f"cannot download {url}: {str(error) or type(error).__name__}") from None
    finally:
        socket.setdefaulttimeout(earlier_timeout_s)
