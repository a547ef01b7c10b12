"""Memory shared by a supervisor and its process, and the certificate of that process's end.

The supervisor knows nothing of the run while its process lives. After the end it reads the key of the run, the
addresses of the other members and the last report from this memory, and visits these members.
"""

from __future__ import annotations

import json
import logging
import mmap
import os
import struct
import tempfile
import threading
import time
import zlib
from collections.abc import Mapping

from farflung.comm.visits import Access
from farflung.membership.messages import MalformedMessage, MemberReport, MessageCodec

__all__ = ["SUPERVISOR", "Page", "announce_end"]

SUPERVISOR = "FARFLUNG_SUPERVISOR"
"""Variable with the supervisor's process id and the descriptor of the page, separated by a colon."""
DELIVERY_S = 10.0
"""Maximum time in which a supervisor tries to reach a member."""
_RETRY_S = 0.5
_SLOT = 1 << 20
_HEAD = struct.Struct("<QII")
"""Number of a text from 1 on, its bytes, and their CRC-32."""


class Page:
    """Memory shared by a process and its supervisor, with the two latest texts.

    If a process is killed during a write, the previous text stays intact; see rule R8 of the protocol.

    Args:
      fd: Inheritable descriptor of the memory; -1 if forks inherit it.
    """

    def __init__(self, fd: int = -1) -> None:
        self._memory = mmap.mmap(fd, 2 * _SLOT)
        self._num_writes, _ = self._read_latest()
        self._access, self._report = b"", b""

    @staticmethod
    def create_memory() -> int:
        """Creates memory for a page, and returns its descriptor."""
        if hasattr(os, "memfd_create"):
            fd = os.memfd_create("farflung")
        else:
            with tempfile.TemporaryFile() as file:
                fd = os.dup(file.fileno())
        os.ftruncate(fd, 2 * _SLOT)
        return fd

    @staticmethod
    def from_environment(environment: Mapping[str, str] = os.environ) -> Page | None:
        """Returns the page of this process and its supervisor, or ``None``."""
        pid, _, fd = environment.get(SUPERVISOR, "").partition(":")
        if not pid:
            return None
        if int(pid) != os.getppid():  # this process may outlive the one whose end the supervisor sees
            logging.getLogger("farflung").warning(
                "farflung worker has started another process, which has started this one: its end is not certified"
            )
            return None
        return Page(int(fd))

    def write_access(self, name: str, access: Access) -> None:
        """Writes the name of the process, and the access of its supervisor to the other members."""
        self._access = json.dumps([name, access.to_json()]).encode()
        self._write()

    def write_report(self, report: bytes) -> None:
        """Writes the latest report; raises ``ValueError`` if it is too long."""
        self._report = report
        self._write()

    def _write(self) -> None:
        text = self._access + b"\n" + self._report
        if len(text) > _SLOT - _HEAD.size:
            raise ValueError(f"a report of {len(text):,} bytes")
        self._num_writes += 1
        at = self._num_writes % 2 * _SLOT
        self._memory[at : at + _HEAD.size] = bytes(_HEAD.size)
        self._memory[at + _HEAD.size : at + _HEAD.size + len(text)] = text
        self._memory[at : at + _HEAD.size] = _HEAD.pack(self._num_writes, len(text), zlib.crc32(text))

    def _read_latest(self) -> tuple[int, bytes]:
        latest = (0, b"")
        for at in (0, _SLOT):
            number, length, checksum = _HEAD.unpack_from(self._memory, at)
            text = self._memory[at + _HEAD.size : at + _HEAD.size + length]
            if number and len(text) == length and zlib.crc32(text) == checksum:
                latest = max(latest, (number, text))
        return latest

    def read(self) -> tuple[str, Access, bytes] | None:
        """Returns name, access and latest report, empty before the first; ``None`` before the process is a member."""
        _, text = self._read_latest()
        content, _, report = text.partition(b"\n")
        if not content:
            return None
        name, access = json.loads(content)
        return name, Access.from_json(access), report


def announce_end(page: Page, exit_code: int) -> list[threading.Thread]:
    """Announces the certified end of a process to all other members; ``waitpid`` must have returned for it.

    Returns:
      Threads of the deliveries, which end within :data:`DELIVERY_S`.
    """
    content = page.read()
    if content is None:
        return []
    name, access, text = content
    codec, final_report = MessageCodec(access.key), None
    if text:
        message = codec.decode(text)
        if not isinstance(message, MemberReport):
            raise MalformedMessage("a final report of another kind")
        final_report = message
    signed = codec.encode(codec.sign_certificate(name, exit_code, final_report)).decode()
    threads = [
        threading.Thread(target=_deliver_certificate, args=(access, address, signed), daemon=True)
        for address in access.addresses
    ]
    for thread in threads:
        thread.start()
    return threads


def _deliver_certificate(access: Access, address: str, certificate: str) -> None:
    deadline = time.monotonic() + DELIVERY_S
    while (left_s := deadline - time.monotonic()) > 0:
        try:
            access.ask(address, {"certificate": certificate}, left_s)
        except ConnectionRefusedError:  # that member has ended too
            return
        except (OSError, ValueError):
            time.sleep(min(_RETRY_S, left_s))
        else:
            return
