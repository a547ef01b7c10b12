"""Files: read behind one door that names them, written whole or not at all, appended to in whole lines."""

from __future__ import annotations

import contextlib
import csv
import errno
import fcntl
import json
import os
import re
import secrets
import struct
import tarfile
import time
import tomllib
import warnings
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from farflung.errors import BadInput, CheckpointError, ConfigError, FarflungError, MissingExtra, StorageError
from farflung.types import Json

__all__ = [
    "JsonLinesFile",
    "RunFiles",
    "check_folder",
    "deciding",
    "drop_cut_line",
    "held",
    "json_lines",
    "json_of",
    "naming",
    "number_pairs",
    "read_text",
    "reading",
    "toml_of",
    "write_json",
    "write_text",
    "write_whole",
    "writing",
]

_DAMAGE = (
    ArithmeticError,
    AttributeError,
    EOFError,
    LookupError,
    MemoryError,
    OSError,
    RuntimeError,
    TypeError,
    ValueError,
    csv.Error,
    struct.error,
    tarfile.TarError,
    zipfile.BadZipFile,
    zlib.error,
)
"""What content that is not what it should be makes a reader raise; RuntimeError is recursion's, and torch's, too."""
_BLOCK = 1 << 16
_FLUSH_EVERY_S = 1.0
_TOO_LONG = re.compile(r"\d{309}")
"""No float is as large."""
_UNLOCKABLE = {errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP}


# --- reading ------------------------------------------------------------------------------------------------------


@contextmanager
def reading(path: Path | str, wrong: str, kind: type[BadInput] = ConfigError) -> Iterator[None]:
    """The door of every reader: whatever goes wrong inside, of what a file holds, is one error that names the file.

    Args:
      path: the file, or words that name it.
      wrong: what to say of it, as in ``"not a decision"``.
      kind: of the error.

    Raises:
      BadInput: of ``kind``; one that was raised inside stays what it is, and names the file.
    """
    with naming(path):
        try:
            yield
        except OSError as error:
            raise kind(f"{path}: cannot be read ({error.strerror or error})") from None
        except _DAMAGE as error:
            raise kind(f"{path}: {wrong} ({_reason(error)})") from None


@contextmanager
def naming(where: Path | str) -> Iterator[None]:
    """Puts ``where`` in front of errors from inside that do not name it, but for an extra's absence and for a file that
    cannot be written, which names itself.
    """
    try:
        yield
    except FarflungError as error:
        if str(where) not in str(error) and not isinstance(error, MissingExtra | StorageError):
            error.args = (f"{where}: {error}",)
        raise


def _reason(error: BaseException) -> str:
    """The text on one line, shortened."""
    text = " ".join(f"{type(error).__name__}: {error}".split()).rstrip(": ")
    return text if len(text) <= 200 else f"{text[:200]}…"


def deciding(name: str, step: int) -> AbstractContextManager[None]:
    """Inside, the value of a decision is looked through: one that was read from a log may be anything.

    Raises:
      ConfigError: it is not what such a run decides.
    """
    return reading(
        f"--replay: decision {name!r} at step {step}",
        "not what this run decides; give the log of one like it",
    )


def read_text(path: Path) -> str:
    """Returns the text of a file without a byte order mark, if any; to be called inside :func:`reading`."""
    return path.read_text(encoding="utf-8-sig")


def json_of(text: str) -> Json:
    """The value of a JSON text; to be called inside :func:`reading`.

    Raises:
      ValueError: it is none, or holds a number or text that nothing can be done with.
    """
    if _TOO_LONG.search(text):
        raise ValueError("a number of more than 308 digits")
    value: Json = json.loads(text)
    if "\\ud" in text.lower():
        json.dumps(value, ensure_ascii=False).encode()  # a lone surrogate can be read, but nowhere be shown
    return value


def toml_of(path: Path) -> dict[str, Any]:
    """The content of a TOML file.

    Raises:
      ConfigError: absent, or no TOML; names it.
    """
    with reading(path, "not TOML"):
        return tomllib.loads(read_text(path))


def number_pairs(path: Path) -> list[tuple[float, float]]:
    """The first two columns of a CSV file without a head; to be called inside :func:`reading`.

    Raises:
      ValueError: one is no number.
    """
    rows = [row for row in csv.reader(read_text(path).splitlines()) if row]
    return [(float(row[0]), float(row[1])) for row in rows]


def json_lines(
    path: Path, wrong: str, take: Callable[[Any], object], kind: type[BadInput], *, whole: bool = False
) -> None:
    """Hands each line of a file of JSON lines to ``take``; a last line that was cut short is left out.

    Args:
      path: the file.
      wrong: what to say of a line that is not what it should be.
      take: gets the value of each; it may refuse it with any error that :func:`reading` knows.
      kind: of the error.
      whole: refuses a last line that was cut short too.

    Raises:
      BadInput: of ``kind``: the file cannot be read, or a line is not what it should be; names file and line.
    """
    with reading(path, "not text", kind):
        *lines, last = read_text(path).split("\n")
    if last and (whole or not _is_cut(last)):
        lines.append(last)
    for number, line in enumerate(lines, start=1):
        if line:
            with reading(f"{path}, line {number}", wrong, kind):
                take(json_of(line))


def _is_cut(line: str) -> bool:
    """Whether a line without an end is the beginning of an object whose write was cut short."""
    try:
        json.loads(line)
    except (ValueError, RecursionError):
        return line.startswith('{"'[: len(line)])
    return False


# --- writing ------------------------------------------------------------------------------------------------------


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Whatever goes wrong inside, of writing a file or making a folder, is one error that names it.

    Raises:
      StorageError: no room, no permission, or something else is in its place.
    """
    try:
        yield
    except OSError as error:
        raise StorageError(path, error.strerror or str(error)) from None


def write_whole(path: Path, write: Callable[[Path], object]) -> None:
    """A file that appears whole or not at all: ``write`` gets another name, which then becomes that of the file.

    Raises:
      StorageError: it cannot be written.
    """
    with writing(path):
        # By no number of a process: those of containers, which may share the folder, are numbered alike.
        partial = path.with_name(f".{path.name}.{secrets.token_hex(4)}.partial")
        try:
            write(partial)
            partial.replace(path)
        except BaseException:
            with contextlib.suppress(OSError):
                partial.unlink(missing_ok=True)
            raise


def write_text(path: Path, text: str) -> None:
    """Writes a text that appears whole or not at all; see :func:`write_whole`."""
    write_whole(path, lambda partial: partial.write_text(text, encoding="utf-8"))


def write_json(path: Path, value: Json) -> None:
    """Writes a value that appears whole or not at all; see :func:`write_whole`."""
    write_text(path, json.dumps(value, indent=2) + "\n")


def drop_cut_line(path: Path) -> None:
    """Makes a file of JSON lines end with a whole line before more are added; warns where one was cut short.

    Raises:
      StorageError: it cannot be written.
    """
    if not path.exists():
        return
    with writing(path), path.open("r+b") as file:
        end = file.seek(0, os.SEEK_END)
        tail = b""
        while end > 0 and b"\n" not in tail:
            begin = max(0, end - _BLOCK)
            file.seek(begin)
            tail = file.read(end - begin) + tail
            end = begin
        cut = tail.rpartition(b"\n")[2]
        if not cut:
            return
        try:
            json.loads(cut)
        except (ValueError, RecursionError):
            file.truncate(file.seek(-len(cut), os.SEEK_END))
            warnings.warn(
                f"{path}: its last line was cut short, by a full disk or a loss of power, and is left out",
                stacklevel=2,
            )
        else:
            file.seek(0, os.SEEK_END)
            file.write(b"\n")


class JsonLinesFile:
    """A file that is added to by JSON lines; a context manager that closes it.

    Args:
      path: the file; its folder is made, and a last line in it that was cut short is left out.
      fresh: whether to replace what it holds.

    Raises:
      StorageError: when it is made or at any call: the file cannot be written.
    """

    def __init__(self, path: Path, *, fresh: bool = False) -> None:
        self._path = path
        with writing(path):
            path.parent.mkdir(parents=True, exist_ok=True)
        if not fresh:
            drop_cut_line(path)
        with writing(path):
            self._file = path.open("w" if fresh else "a", encoding="utf-8")
        self._flushed = time.monotonic()

    def add(self, row: Mapping[str, Json], *, flush: bool = False) -> None:
        """Appends one line; it may stay in memory for a second unless ``flush`` hands it to the system at once."""
        now = time.monotonic()
        with writing(self._path):
            self._file.write(json.dumps(row, separators=(",", ":")) + "\n")
            if flush or now - self._flushed > _FLUSH_EVERY_S:
                self._file.flush()
                self._flushed = now

    def close(self) -> None:
        """Writes the rest and closes the file."""
        with writing(self._path):
            self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.close()
        except StorageError:
            if error is None:  # otherwise what went wrong before is what counts
                raise


# --- folders ------------------------------------------------------------------------------------------------------


class RunFiles:
    """The files of a run of any kind: settings, trained model and summary.

    Args:
      path: the folder.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config = path / "config.json"
        self.model = path / "model.safetensors"
        self.summary = path / "summary.json"

    def stored_config(self) -> dict[str, Json]:
        """Reads the settings of the run.

        Raises:
          CheckpointError: there is no run, or the file is damaged.
        """
        if not self.config.exists():
            raise CheckpointError(f"{self.path}: no run there ({self.config.name} is missing)")
        return self.stored(self.config)

    def stored_summary(self) -> dict[str, Json]:
        """Reads how the run ended.

        Raises:
          CheckpointError: it has not ended, or the file is damaged.
        """
        return self.stored(self.summary)

    def stored(self, path: Path) -> dict[str, Json]:
        """Reads one of the run's files, which holds an object.

        Raises:
          CheckpointError: it is damaged.
        """
        with reading(path, "damaged; start the run afresh", CheckpointError):
            found = json_of(read_text(path))
            if not isinstance(found, dict):
                raise TypeError(f"keys and values were due, not {type(found).__name__}")
            return found


def check_folder(path: Path) -> None:
    """Refuses a path at which no folder can be made.

    Raises:
      ConfigError: a file is there.
      StorageError: it cannot be looked at.
    """
    with writing(path):
        if path.exists() and not path.is_dir():
            raise ConfigError(f"{path}: a file: a run is kept in a folder")


@contextmanager
def held(folder: Path, what: str) -> Iterator[None]:
    """Makes a folder where there is none; inside, no other process holds it.

    The kernel releases the folder when this process ends, however that is.

    Args:
      folder: the file that is locked stays in it as ``.lock``.
      what: others would do there, for the message.

    Raises:
      ConfigError: another process holds it, which is named; or there is a file in its place.
      StorageError: the folder cannot be written.
    """
    check_folder(folder)
    path = folder / ".lock"
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
    with writing(path):
        lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(lock, 20, 0).decode(errors="replace").strip()
            process = f" (process {holder})" if holder else ""
            raise ConfigError(
                f"{folder}: another command{process} {what} there: wait until it has ended"
            ) from None
        except OSError as error:
            if error.errno not in _UNLOCKABLE:  # a file system that has no locks
                raise StorageError(path, error.strerror or str(error)) from None
        with writing(path):
            os.ftruncate(lock, 0)
            os.pwrite(lock, f"{os.getpid()}\n".encode(), 0)
        yield
        with contextlib.suppress(OSError):
            os.ftruncate(lock, 0)
    finally:
        os.close(lock)
