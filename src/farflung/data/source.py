"""Where data comes from: a folder of the user's, the cache, or the subset inside the package.

A data set called NAME is looked for in ``$FARFLUNG_DATA/NAME``, then in ``$FARFLUNG_CACHE/NAME`` (the cache is
``~/.cache/farflung`` when the variable is not set), then among the packaged subsets. Nothing is downloaded on the
way: ``farflung data fetch NAME`` does that, into the cache.
"""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeAlias

from farflung.errors import ConfigError, DataError

__all__ = [
    "File",
    "Location",
    "Source",
    "Which",
    "cache_folder",
    "data_folder",
    "find",
    "folders",
    "locate",
    "verify",
]

Which: TypeAlias = Literal["auto", "packaged", "full"]
"""``packaged``: the subset inside the package, whatever lies around; ``full``: the official set or an error;
``auto``: the official set when it is at hand, else the subset."""

PACKAGED = Path(__file__).parent / "packaged"


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
      by_hand: how to come by the files when they have no address.
      samples: training and test samples in the official files; ``None`` where that depends on how they are cut.
      reduced: names of files that hold fewer samples than the official ones.
    """

    name: str
    title: str
    licence: str
    homepage: str
    files: tuple[File, ...]
    layouts: tuple[tuple[str, ...], ...] = ()
    packaged: bool = False
    by_hand: str = ""
    samples: tuple[int, int] | None = None
    reduced: tuple[str, ...] = ()

    @property
    def remedy(self) -> str:
        """What to do when the files are not at hand."""
        if self.by_hand:
            return self.by_hand
        return f"fetch it with: farflung data fetch {self.name}"


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
    """Where downloads are kept: ``FARFLUNG_CACHE``, else ``~/.cache/farflung``; it need not exist."""
    value = os.environ.get("FARFLUNG_CACHE")
    return Path(value).expanduser() if value else Path.home() / ".cache" / "farflung"


def folders(source: Source) -> list[tuple[Path, Literal["folder", "cache"]]]:
    """The folders in which ``source`` is looked for, in order."""
    found: list[tuple[Path, Literal["folder", "cache"]]] = []
    mine = data_folder()
    if mine is not None:
        found.append((mine / source.name, "folder"))
    found.append((cache_folder() / source.name, "cache"))
    return found


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
        for folder, kind in folders(source):
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
    tried = " and ".join(
        f"{folder} ({'FARFLUNG_DATA' if kind == 'folder' else 'cache'})" for folder, kind in folders(source)
    )
    raise DataError(f"{source.name} is not at hand: looked in {tried}; {source.remedy}")


def _complete(source: Source, folder: Path) -> tuple[str, ...] | None:
    """The names of the first layout that ``folder`` holds whole; ``None`` when it holds nothing of any."""
    partial: list[str] | None = None
    for layout in (*source.layouts, tuple(file.name for file in source.files)):
        absent = [name for name in layout if not (folder / name).is_file()]
        if not absent:
            return layout
        if len(absent) < len(layout) and (partial is None or len(absent) < len(partial)):
            partial = absent
    if partial is not None:
        raise DataError(f"{source.name} in {folder} is incomplete: no {', '.join(partial)}; {source.remedy}")
    return None


def verify(path: Path, file: File) -> None:
    """Checks size and checksum of a file.

    Raises:
      DataError: they differ, in one line that names the file and both values.
    """
    size = path.stat().st_size
    if file.nbytes is not None and size != file.nbytes:
        raise DataError(f"{path}: expected {file.nbytes} bytes, found {size}")
    for kind, expected in (("sha256", file.sha256), ("md5", file.md5)):
        if not expected:
            continue
        with path.open("rb") as stream:
            found = hashlib.file_digest(stream, kind).hexdigest()
        if found != expected:
            raise DataError(f"{path}: wrong checksum: expected {kind} {expected}, found {found}")
        return
    if file.lines_sha256:
        lines = b"\n".join(line.rstrip() for line in path.read_bytes().splitlines())
        found = hashlib.sha256(lines).hexdigest()
        if found != file.lines_sha256:
            raise DataError(
                f"{path}: wrong checksum: expected sha256 {file.lines_sha256} of its lines, found {found}"
            )
