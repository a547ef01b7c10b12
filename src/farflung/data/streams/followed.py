"""Samples from files that somebody appends to."""

from __future__ import annotations

import os
import struct
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import BinaryIO, Unpack

from farflung.data.streams.buffer import Buffering, buffered
from farflung.data.streams.live import LiveStream, Reach, Records
from farflung.data.streams.messages import Decoder
from farflung.errors import DataError
from farflung.files import reading
from farflung.options import text_option

__all__ = ["SUFFIX", "FileSource", "append", "files", "whole_records"]

SUFFIX = ".records"
"""Of the files in a folder that are followed."""
LARGEST = 1 << 30
"""Bytes of the largest message; more is no record."""
BLOCK = 1 << 20
LOOK_S = 0.02
"""How long to wait before looking again at files to which nothing was added."""

_LENGTH = struct.Struct("<I")


@buffered
def files(
    path: str,
    decoder: str | Decoder | None = None,
    skip: int = 100,
    deadline_s: float = 60.0,
    **buffer: Unpack[Buffering],
) -> LiveStream:
    r"""Samples from files that somebody appends to, one in a record.

    A record is four bytes, the length of a message as a little-endian number, and the message in the form of
    :func:`as_messages`. The position in a file is that of a record's first byte. A last record that is not whole yet
    is waited for.

    Args:
      path: a file, with ``{rank}`` in it one for each replica; or a folder, whose files ``*.records`` are taken by
        name, number :math:`p` by the replica :math:`p \bmod n` of :math:`n`.
      decoder: gives inputs and targets of the one sample in a message's bytes, and raises where there is none: a
        function, or ``module:function``; ``None``: messages are safetensors.
      skip: messages that may be skipped because they do not decode; one more ends the run.
      deadline_s: how long a step waits while nothing is added.
      buffer: how what has arrived is kept; see :class:`Buffer`. The backlog is 65,536 samples when not given: the file
        keeps the others.

    Raises:
      ConfigError: a value out of its range.
    """
    text_option("stream files", "path", path)
    return LiveStream(FileSource(path), decoder, skip, deadline_s, buffer)


def append(file: BinaryIO, messages: Iterable[bytes]) -> None:
    """Adds a record for each message."""
    file.write(b"".join(part for one in messages for part in (_LENGTH.pack(len(one)), one)))


def whole_records(file: BinaryIO) -> int:
    """The bytes of a file up to the end of its last whole record."""
    at, size = 0, _size(file)
    while at + _LENGTH.size <= size:
        (length,) = _LENGTH.unpack(os.pread(file.fileno(), _LENGTH.size, at))
        if at + _LENGTH.size + length > size:
            break
        at += _LENGTH.size + length
    return at


class FileSource:
    """Files as partitions; see :func:`files`."""

    trouble = ""

    def __init__(self, path: str) -> None:
        self._path = path
        self._files: dict[int, tuple[Path, BinaryIO]] = {}
        self._positions: dict[int, int] = {}
        self._paused = False

    @property
    def name(self) -> str:
        """The path."""
        return self._path

    def open(self, rank: int, size: int) -> Mapping[int, Reach]:
        """Opens the files of a replica.

        Raises:
          DataError: they cannot be read, or there is none for it.
        """
        self._path = self._path.replace("{rank}", str(rank))
        whole = Path(self._path)
        with reading(whole, "cannot be followed", DataError):
            found = {0: whole}
            if whole.is_dir():
                every = sorted(whole.glob(f"*{SUFFIX}"))
                found = {number: one for number, one in enumerate(every) if number % size == rank}
                if not found:
                    raise DataError(
                        f"{whole}: {len(every)} files *{SUFFIX} for {size} replicas: there must be one for each"
                    )
            self._files = {number: (one, one.open("rb")) for number, one in found.items()}
            return {number: Reach(0, _size(file), 0) for number, (_, file) in self._files.items()}

    def start(self, positions: Mapping[int, int]) -> None:
        """Reads from there on."""
        self._positions = dict(positions)

    def read(self, most: int, wait_s: float) -> list[Records]:
        """Whole records that were added.

        Raises:
          DataError: a file has become shorter, or holds something else.
        """
        until = time.monotonic() + wait_s
        while True:
            records: list[Records] = []
            for number in self._files:
                added = self._added(number, most - sum(len(one.values) for one in records))
                records += [added] if added.values else []
            if records or time.monotonic() >= until or self._paused:
                return records
            time.sleep(LOOK_S)

    def pause(self, paused: bool) -> None:
        """Whether to read nothing."""
        self._paused = paused

    def used(self, positions: Mapping[int, int], step: int) -> None:
        """Files keep no such thing."""

    def close(self) -> None:
        """Closes the files."""
        for _, file in self._files.values():
            file.close()

    def _added(self, number: int, most: int) -> Records:
        path, file = self._files[number]
        at, now = self._positions[number], time.time()
        positions: list[int] = []
        values: list[bytes] = []
        if most <= 0 or self._paused:
            return Records(number, positions, at, values, [])
        with reading(path, "cannot be followed", DataError):
            size = _size(file)
            if size < at:
                raise DataError(f"{path}: became shorter: {size} bytes, and {at} were read")
            data = os.pread(file.fileno(), BLOCK, at)
            begin = 0
            while len(values) < most and begin + _LENGTH.size <= len(data):
                (length,) = _LENGTH.unpack_from(data, begin)
                if length > LARGEST:
                    raise DataError(f"{path}: no record at byte {at + begin}: {length} bytes long")
                end = begin + _LENGTH.size + length
                if end > len(data):
                    if at + end > size:
                        break
                    data += os.pread(file.fileno(), end - len(data), at + len(data))
                positions.append(at + begin)
                values.append(data[begin + _LENGTH.size : end])
                begin = end
        self._positions[number] = at + begin
        return Records(number, positions, at + begin, values, [now] * len(values))


def _size(file: BinaryIO) -> int:
    return os.fstat(file.fileno()).st_size
