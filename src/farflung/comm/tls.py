"""TLS of one connection, apart from its socket."""

from __future__ import annotations

import ssl

from farflung.comm.wire import Frame

__all__ = ["TlsStream"]

_HEADER_NBYTES = 5
"""Header of a record: type u8, version u16, size u16 (RFC 8446 Sec. 5.1)."""


class TlsStream:
    """TLS of one connection: encrypts outgoing bytes, and decrypts those that have arrived.

    Args:
      context: TLS settings.
      is_server: True if the other end has connected.
    """

    def __init__(self, context: ssl.SSLContext, *, is_server: bool) -> None:
        self._outgoing, self._incoming = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._object = context.wrap_bio(self._incoming, self._outgoing, server_side=is_server)
        self._header, self._rest_nbytes = b"", 0
        """Begin of a header that has arrived in part, and bytes missing behind the last complete header."""

    @property
    def has_pending(self) -> bool:
        """True if arrived bytes have not been read."""
        return bool(self._incoming.pending or self._object.pending())

    @property
    def missing_nbytes(self) -> int:
        """Bytes of the record under way that have not arrived; 0 between two records."""
        return self._rest_nbytes or (_HEADER_NBYTES - len(self._header)) % _HEADER_NBYTES

    def get_peer_certificate(self) -> bytes | None:
        """Returns the other end's authenticated certificate in DER; None if it has shown none."""
        return self._object.getpeercert(True)

    def try_handshake(self) -> bool:
        """Continues the handshake; returns False if it needs more bytes of the other end."""
        try:
            self._object.do_handshake()
        except ssl.SSLWantReadError:
            return False
        return True

    def feed(self, data: memoryview) -> None:
        """Takes in bytes that have arrived."""
        self._incoming.write(data)
        header_at = self._rest_nbytes
        while header_at < len(data):
            fragment = data[header_at : header_at + _HEADER_NBYTES - len(self._header)]
            self._header += fragment
            header_at += len(fragment)
            if len(self._header) == _HEADER_NBYTES:
                header_at += int.from_bytes(self._header[3:], "big")
                self._header = b""
        self._rest_nbytes = header_at - len(data)

    def read(self, buffer: memoryview) -> int | None:
        """Decrypts arrived records into a buffer; returns the number of bytes, or None if more must arrive first."""
        nbytes = 0
        while nbytes < len(buffer):
            try:
                count: int = self._object.read(len(buffer) - nbytes, buffer[nbytes:])  # type: ignore[assignment]
            except ssl.SSLWantReadError:
                return nbytes or None
            if not count:
                break
            nbytes += count
        return nbytes

    def encrypt(self, *buffers: Frame) -> list[memoryview]:
        """Encrypts bytes at once, so that the kernel takes many records together; returns all bytes to be sent."""
        for buffer in buffers:
            self._object.write(buffer)
        return [memoryview(self._outgoing.read())] if self._outgoing.pending else []
