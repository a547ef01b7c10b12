"""File access: reads with errors that name the file, atomic writes, and JSON lines files."""

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
    "drop_partial_line",
    "format_toml_comment",
    "format_toml_text",
    "load_toml",
    "lock_folder",
    "parse_json",
    "path_exists",
    "prefix_errors",
    "read_json_lines",
    "read_number_pairs",
    "read_text",
    "replace_nonfinite",
    "wrap_decision_errors",
    "wrap_read_errors",
    "wrap_write_errors",
    "write_atomically",
    "write_json",
    "write_text",
]

_READ_ERRORS = (
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
"""Errors that readers raise on malformed content; RuntimeError covers recursion and torch."""
_BLOCK = 1 << 16
_FLUSH_EVERY_S = 1.0
_LONG_NUMBER = re.compile(r"\d{309}")
"""Pattern of a number with more digits than any float has."""
_NO_LOCKS_ERRNOS = {errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP}


# --- reading ------------------------------------------------------------------------------------------------------


@contextmanager
def wrap_read_errors(
    path: Path | str, problem: str, error_type: type[BadInput] = ConfigError
) -> Iterator[None]:
    """Converts errors from reading a file or its content, within the context, to one that names the file.

    Args:
      path: File, or words that name it.
      problem: Description of malformed content for the message, such as ``"not a decision"``.
      error_type: Class of the error.

    Raises:
      BadInput: Reading failed. The class is ``error_type``; farflung's own errors keep theirs and get the file's name.
    """
    with prefix_errors(path):
        try:
            yield
        except OSError as error:
            raise error_type(f"{path}: cannot be read ({error.strerror or error})") from None
        except _READ_ERRORS as error:
            raise error_type(f"{path}: {problem} ({_format_reason(error)})") from None


@contextmanager
def prefix_errors(location: Path | str) -> Iterator[None]:
    """Adds ``location`` to errors within the context that lack it, except MissingExtra and StorageError."""
    try:
        yield
    except FarflungError as error:
        if str(location) not in str(error) and not isinstance(error, MissingExtra | StorageError):
            error.args = (f"{location}: {error}",)
        raise


def _format_reason(error: BaseException) -> str:
    """Formats an error on one line of limited length."""
    text = " ".join(f"{type(error).__name__}: {error}".split()).rstrip(": ")
    return text if len(text) <= 200 else f"{text[:200]}…"


def wrap_decision_errors(name: str, step: int) -> AbstractContextManager[None]:
    """Converts errors from the value of a logged decision, within the context, to one that names it.

    Raises:
      ConfigError: The value does not fit the decision.
    """
    return wrap_read_errors(
        f"--replay: decision {name!r} at step {step}",
        "not what this run decides; give the log of one like it",
    )


def path_exists(path: Path, error_type: type[BadInput] = ConfigError, *, is_folder: bool = False) -> bool:
    """Returns True if a path exists, or with ``is_folder`` if it is a folder.

    Raises:
      BadInput: The path is too long, or permission is denied. The class is ``error_type``.
    """
    with wrap_read_errors(path, "not a path", error_type):
        return path.is_dir() if is_folder else path.exists()


def read_text(path: Path) -> str:
    """Reads a text file without its byte order mark; call this inside :func:`wrap_read_errors`."""
    return path.read_text(encoding="utf-8-sig")


def parse_json(text: str) -> Json:
    """Parses a JSON text; call this inside :func:`wrap_read_errors`.

    Raises:
      ValueError: The text is not JSON, or has an overlong number or invalid Unicode.
    """
    if _LONG_NUMBER.search(text):
        raise ValueError("a number of more than 308 digits")
    value: Json = json.loads(text)
    if "\\ud" in text.lower():
        json.dumps(value, ensure_ascii=False).encode()  # a lone surrogate can be parsed, but not printed
    return value


def replace_nonfinite(value: Any) -> Any:
    """Returns a JSON value with null in place of infinity and NaN, which JSON does not have."""
    return json.loads(json.dumps(value), parse_constant=lambda name: None)


def load_toml(path: Path) -> dict[str, Any]:
    """Loads a TOML file.

    Raises:
      ConfigError: The file is missing or not TOML.
    """
    with wrap_read_errors(path, "not TOML"):
        return tomllib.loads(read_text(path))


def read_number_pairs(path: Path) -> list[tuple[float, float]]:
    """Reads two columns of a CSV file without a header; call this inside :func:`wrap_read_errors`.

    Raises:
      ValueError: An entry is not a number.
    """
    rows = [row for row in csv.reader(read_text(path).splitlines()) if row]
    return [(float(row[0]), float(row[1])) for row in rows]


def read_json_lines(
    path: Path,
    problem: str,
    handle_value: Callable[[Any], object],
    error_type: type[BadInput],
    *,
    is_strict: bool = False,
) -> None:
    """Reads a file of JSON lines and passes each value to a callback; a truncated last line is ignored.

    Args:
      path: File of JSON lines.
      problem: Description of a malformed line for the message.
      handle_value: Callback for each value, which may raise any error that :func:`wrap_read_errors` converts.
      error_type: Class of the error.
      is_strict: True to refuse a truncated last line.

    Raises:
      BadInput: The file cannot be read or a line is malformed. The class is ``error_type``; the message names the line.
    """
    with wrap_read_errors(path, "not text", error_type):
        *lines, last = read_text(path).split("\n")
    if last and (is_strict or not _is_truncated(last)):
        lines.append(last)
    for number, line in enumerate(lines, start=1):
        if line:
            with wrap_read_errors(f"{path}, line {number}", problem, error_type):
                handle_value(parse_json(line))


def _is_truncated(line: str) -> bool:
    """Returns True if a last line without a newline is the beginning of an object."""
    try:
        json.loads(line)
    except (ValueError, RecursionError):
        return line.startswith('{"'[: len(line)])
    return False


# --- writing ------------------------------------------------------------------------------------------------------


@contextmanager
def wrap_write_errors(path: Path) -> Iterator[None]:
    """Converts errors from writing a file or creating a folder, within the context, to one that names it.

    Raises:
      StorageError: The disk is full, permission is denied, or the path is of another kind.
    """
    try:
        yield
    except OSError as error:
        raise StorageError(path, error.strerror or str(error)) from None


def write_atomically(path: Path, write: Callable[[Path], object]) -> None:
    """Writes a file atomically: ``write`` writes to a temporary path, which then replaces the file.

    Raises:
      StorageError: The file cannot be written.
    """
    with wrap_write_errors(path):
        # The name has no process id, since containers that share the folder have equal ids.
        partial = path.with_name(f".{path.name}.{secrets.token_hex(4)}.partial")
        try:
            write(partial)
            partial.replace(path)
        except BaseException:
            with contextlib.suppress(OSError):
                partial.unlink(missing_ok=True)
            raise


def write_text(path: Path, text: str) -> None:
    """Writes a text file atomically; see :func:`write_atomically`."""
    write_atomically(path, lambda partial: partial.write_text(text, encoding="utf-8"))


def format_toml_text(text: str) -> str:
    """Formats a text as a string of TOML, which has no surrogate pairs, unlike JSON's escapes."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def format_toml_comment(text: str) -> str:
    """Formats a text as one line of comment in TOML."""
    return "# " + "".join(char if char.isprintable() else " " for char in text)


def write_json(path: Path, value: Json) -> None:
    """Writes a JSON file atomically; see :func:`write_atomically`."""
    write_text(path, json.dumps(value, indent=2) + "\n")


def drop_partial_line(path: Path) -> None:
    """Drops a truncated last line of a JSON lines file, with a warning, and adds a missing newline.

    Raises:
      StorageError: The file cannot be written.
    """
    if not path.exists():
        return
    with wrap_write_errors(path), path.open("r+b") as file:
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
    """Append-only file of JSON lines, and a context manager that closes it.

    Args:
      path: File, whose folder is created and whose truncated last line is dropped.
      should_overwrite: True to overwrite the file.

    Raises:
      StorageError: The file cannot be written, at creation or at any later call.
    """

    def __init__(self, path: Path, *, should_overwrite: bool = False) -> None:
        self._path = path
        with wrap_write_errors(path):
            path.parent.mkdir(parents=True, exist_ok=True)
        if not should_overwrite:
            drop_partial_line(path)
        with wrap_write_errors(path):
            self._file = path.open("w" if should_overwrite else "a", encoding="utf-8")
        self._last_flush_s = time.monotonic()

    def add(self, row: Mapping[str, Json], *, flush: bool = False) -> None:
        """Appends one line, flushed immediately with ``flush``, otherwise by the first call after a second."""
        time_s = time.monotonic()
        with wrap_write_errors(self._path):
            self._file.write(json.dumps(row, separators=(",", ":")) + "\n")
            if flush or time_s - self._last_flush_s > _FLUSH_EVERY_S:
                self._file.flush()
                self._last_flush_s = time_s

    def close(self) -> None:
        """Flushes and closes the file."""
        with wrap_write_errors(self._path):
            self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.close()
        except StorageError:
            if error is None:  # an earlier error takes precedence
                raise


# --- folders ------------------------------------------------------------------------------------------------------


class RunFiles:
    """Paths of a run's files: settings, trained model and summary.

    Args:
      path: Folder of the run.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config_path = path / "config.json"
        self.model_path = path / "model.safetensors"
        self.summary_path = path / "summary.json"

    def load_config(self) -> dict[str, Json]:
        """Loads the settings of the run.

        Raises:
          CheckpointError: There is no run, or the file is damaged.
        """
        if not path_exists(self.config_path, CheckpointError):
            raise CheckpointError(f"{self.path}: no run there ({self.config_path.name} is missing)")
        return self.load_json(self.config_path)

    def load_summary(self) -> dict[str, Json]:
        """Loads the summary of the run.

        Raises:
          CheckpointError: The run has not ended, or the file is damaged.
        """
        return self.load_json(self.summary_path)

    def load_json(self, path: Path) -> dict[str, Json]:
        """Loads a file of the run that contains a JSON object.

        Raises:
          CheckpointError: The file is damaged.
        """
        with wrap_read_errors(path, "damaged; start the run afresh", CheckpointError):
            content = parse_json(read_text(path))
            if not isinstance(content, dict):
                raise TypeError(f"keys and values were due, not {type(content).__name__}")
            return content


def check_folder(path: Path) -> None:
    """Checks that a path is a folder or does not exist.

    Raises:
      ConfigError: The path is a file.
      StorageError: The path cannot be accessed.
    """
    with wrap_write_errors(path):
        if path.exists() and not path.is_dir():
            raise ConfigError(f"{path}: a file: a run is kept in a folder")


@contextmanager
def lock_folder(folder: Path, activity: str) -> Iterator[None]:
    """Locks a folder for the duration of the context, and creates it if necessary.

    The kernel releases the lock when this process ends for any reason.

    Args:
      folder: Folder; its file ``.lock`` is locked and stays.
      activity: Verb for the message to other processes, such as ``trains``.

    Raises:
      ConfigError: Another process holds the lock, or the path is a file.
      StorageError: The folder cannot be written.
    """
    check_folder(folder)
    path = folder / ".lock"
    with wrap_write_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
    with wrap_write_errors(path):
        lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(lock, 20, 0).decode(errors="replace").strip()
            process = f" (process {holder})" if holder else ""
            raise ConfigError(
                f"{folder}: another command{process} {activity} there: wait until it has ended"
            ) from None
        except OSError as error:
            if error.errno not in _NO_LOCKS_ERRNOS:  # set of a file system without locks
                raise StorageError(path, error.strerror or str(error)) from None
        with wrap_write_errors(path):
            os.ftruncate(lock, 0)
            os.pwrite(lock, f"{os.getpid()}\n".encode(), 0)
        yield
        with contextlib.suppress(OSError):
            os.ftruncate(lock, 0)
    finally:
        os.close(lock)
