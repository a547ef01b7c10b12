"""What a supervisor and the process that it has started share: the process's last report, and certificates."""

from __future__ import annotations

import mmap
import socket
import struct
import zlib
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

from farflung.membership.messages import Codec, Malformed, Report

__all__ = ["Page", "Supervised", "Supervisor"]

_SLOT = 1 << 20
_HEAD = struct.Struct("<QII")
"""The number of a report from 1 on, its bytes, and their CRC-32."""


class Page:
    """Memory that a process and its parent share, with the latest two texts that were written.

    A process that is killed while it writes leaves the text before whole; see rule R8 of the protocol.
    """

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, 2 * _SLOT)
        self._count = 0

    def write(self, text: bytes) -> None:
        """Write a text; raises ``ValueError`` where it is too long."""
        if len(text) > _SLOT - _HEAD.size:
            raise ValueError(f"a report of {len(text):,} bytes")
        self._count += 1
        at = self._count % 2 * _SLOT
        self._memory[at : at + _HEAD.size] = bytes(_HEAD.size)
        self._memory[at + _HEAD.size : at + _HEAD.size + len(text)] = text
        self._memory[at : at + _HEAD.size] = _HEAD.pack(self._count, len(text), zlib.crc32(text))

    def read(self) -> bytes:
        """Return the latest whole text; empty where there is none."""
        found = (0, b"")
        for at in (0, _SLOT):
            number, length, checksum = _HEAD.unpack_from(self._memory, at)
            text = self._memory[at + _HEAD.size : at + _HEAD.size + length]
            if number and len(text) == length and zlib.crc32(text) == checksum:
                found = max(found, (number, text))
        return found[1]


@dataclass(frozen=True)
class Supervised:
    """A process's end.

    Args:
      key: signs certificates.
      page: takes its reports.
      certificates: a datagram socket on which certificates of other processes come.
    """

    key: bytes
    page: Page
    certificates: socket.socket


class Supervisor:
    """The end of the process that has started others, which are named by their numbers.

    Args:
      key: signs certificates.
      count: how many processes there are.
    """

    def __init__(self, key: bytes, count: int) -> None:
        self._codec = Codec(key)
        pairs = [socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM) for _ in range(count)]
        self._ends = [ours for ours, _ in pairs]
        self.processes = [Supervised(key, Page(), theirs) for _, theirs in pairs]
        """The ends of the processes, to be inherited by a fork."""

    def ended(self, number: int, exit_code: int, running: Sequence[int]) -> None:
        """Certify to those that run that a process has ended; after ``waitpid`` has returned for it."""
        will: Report | None = None
        if text := self.processes[number].page.read():
            message = self._codec.decode(text)
            if not isinstance(message, Report):
                raise Malformed("a will that is no report")
            will = message
        signed = self._codec.encode(self._codec.certify(str(number), exit_code, will))
        for other in running:
            with suppress(ConnectionError):  # it has just ended too
                self._ends[other].send(signed)

    def close(self) -> None:
        """Close all sockets."""
        for end in (*self._ends, *(process.certificates for process in self.processes)):
            end.close()
