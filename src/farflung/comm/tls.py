"""TLS of one connection, apart from its socket."""

from __future__ import annotations

import ssl

from farflung.comm.wire import Frame

__all__ = ["TlsStream"]


class TlsStream:
    """TLS of one connection: encrypts outgoing bytes, and decrypts those that have arrived.

    Args:
      context: TLS settings.
      is_server: True if the other end has connected.
    """

    def __init__(self, context: ssl.SSLContext, *, is_server: bool) -> None:
        self._outgoing, self._incoming = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._object = context.wrap_bio(self._incoming, self._outgoing, server_side=is_server)

    @property
    def has_pending(self) -> bool:
        """True if arrived bytes have not been read."""
        return bool(self._incoming.pending or self._object.pending())

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

    def read(self, buffer: memoryview) -> int | None:
        """Decrypts into a buffer; returns the number of bytes, or None if more must arrive first."""
        try:
            return self._object.read(len(buffer), buffer)  # type: ignore[return-value]
        except ssl.SSLWantReadError:
            return None

    def encrypt(self, *buffers: Frame) -> list[memoryview]:
        """Encrypts bytes at once, so that the kernel takes many records together; returns all bytes to be sent."""
        if buffers:
            self._object.write(b"".join(buffers))
        return [memoryview(self._outgoing.read())] if self._outgoing.pending else []
