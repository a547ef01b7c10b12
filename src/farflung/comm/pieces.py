"""Size of the pieces that a connection sends, adapted to its rate, and the kernel's measurements of it."""

from __future__ import annotations

import math
import socket
import struct
import sys
import time
from contextlib import suppress
from typing import NamedTuple

from farflung.comm.framing import (
    ENCRYPTED_PIECE_NBYTES,
    LOCAL_PIECE_NBYTES,
    MIN_PIECE_NBYTES,
    compute_piece_nbytes,
)

__all__ = ["PieceSizer", "TcpInfo"]

_NOTSENT_LOWAT = 0x201 if sys.platform == "darwin" else 25
_TCP_INFO_NBYTES = 168
"""Size of the kernel's ``struct tcp_info`` up to the delivery rate."""
_ADAPT_INTERVAL_S = 0.05
"""Interval at which a busy connection adapts its piece size to its rate, in seconds."""
_MAX_AWAITED_NBYTES = 1 << 16
"""Most bytes that the kernel waits for before it reports them."""


class TcpInfo(NamedTuple):
    """The kernel's measurements of a connection.

    Args:
      round_trip_s: Smoothed round trip, in seconds.
      loss: Share of segments that were retransmitted.
      control: Name of the congestion control.
      rate_bps: Latest delivery rate.
      idle_s: Seconds since data has arrived.
      received_nbytes: Bytes that have arrived, read or not.
    """

    round_trip_s: float
    loss: float
    control: str
    rate_bps: float
    idle_s: float = math.inf
    received_nbytes: int = 0


class PieceSizer:
    """Size of a connection's pieces by its rate, see :func:`farflung.comm.framing.compute_piece_nbytes`.

    The kernel accepts more when at most a piece is unsent, or a quarter of one while urgent messages are expected.

    Args:
      sock: Socket of the connection.
    """

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self.nbytes = MIN_PIECE_NBYTES
        """Bytes of a piece."""
        self.is_adaptive = True
        """True off loopback."""
        self.busy_s, self.busy_nbytes = 0.0, 0
        """Seconds in which there was more to send than the kernel took, and bytes sent in that time."""
        self._rate_bps, self._expects_urgent = 0.0, False
        self._measured_s, self._measured_nbytes = 0.0, 0
        """Begin of the present measurement, and bytes sent since."""
        self._awaits_bytes, self._awaited_nbytes = False, 1
        """True if the kernel may wait for bytes, since it reports when the last came; and how many it waits for."""

    def start(self, *, is_encrypted: bool) -> None:
        """Sets the first size, once the connection is authenticated."""
        with suppress(OSError):
            self.is_adaptive = self._sock.getpeername()[0] != self._sock.getsockname()[0]
        if self.is_adaptive:
            self._set_nbytes(self.nbytes)
            self._awaits_bytes = self.read_tcp_info() is not None
        else:
            self.nbytes = ENCRYPTED_PIECE_NBYTES if is_encrypted else LOCAL_PIECE_NBYTES

    def await_nbytes(self, nbytes: int) -> None:
        """Has the kernel report bytes once ``nbytes`` of them have arrived, or the connection has ended.

        They are at most a seventh of its buffer, which grows with use: a TLS record of a new connection. With more, BBR
        leaves a standing queue of 50 kB behind its start (measured), and beyond a quarter the kernel limits the window.
        """
        nbytes = min(max(nbytes, 1), _MAX_AWAITED_NBYTES)
        if self._awaits_bytes and nbytes != self._awaited_nbytes:
            nbytes = min(nbytes, self._sock.getsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF) // 7)
            self._awaited_nbytes = nbytes
            self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, nbytes)

    def begin_busy(self) -> None:
        """Begins to measure the rate, since the kernel accepts no more bytes."""
        self._measured_s, self._measured_nbytes = time.monotonic(), 0
        if self.is_adaptive and (info := self.read_tcp_info()) is not None:
            self._adapt(info.rate_bps)

    def record_sent(self, nbytes: int) -> bool:
        """Records bytes sent while the connection is busy; returns True if they have ended a measurement."""
        if not self.is_adaptive:
            return False
        self._measured_nbytes += nbytes
        time_s = time.monotonic()
        took_s = time_s - self._measured_s
        if took_s < _ADAPT_INTERVAL_S:
            return False
        self._adapt(8 * self._measured_nbytes / took_s)
        self.busy_s += took_s
        self.busy_nbytes += self._measured_nbytes
        self._measured_s, self._measured_nbytes = time_s, 0
        return True

    def expect_urgent(self, expects_urgent: bool) -> None:
        """Adapts the size to whether urgent messages are expected, off loopback."""
        if self.is_adaptive and expects_urgent != self._expects_urgent:
            self._expects_urgent = expects_urgent
            self._set_nbytes(compute_piece_nbytes(self._rate_bps, expects_urgent=expects_urgent))

    def _adapt(self, rate_bps: float) -> None:
        """Adapts the size to a rate if it differs by 20 %."""
        self._rate_bps = rate_bps
        nbytes = compute_piece_nbytes(rate_bps, expects_urgent=self._expects_urgent)
        if not 0.8 < nbytes / self.nbytes < 1.25:
            self._set_nbytes(nbytes)

    def _set_nbytes(self, nbytes: int) -> None:
        self.nbytes = nbytes
        unsent_nbytes = nbytes // 4 if self._expects_urgent else nbytes
        with suppress(OSError):
            self._sock.setsockopt(socket.IPPROTO_TCP, _NOTSENT_LOWAT, unsent_nbytes)

    def read_tcp_info(self) -> TcpInfo | None:
        """Reads the kernel's measurements of the connection; None except on Linux."""
        if sys.platform != "linux":
            return None
        info = self._sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_NBYTES)
        control = self._sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16)
        if len(info) < _TCP_INFO_NBYTES:
            return None
        (idle_ms,), (round_trip_us,), (retransmitted,), (segments,) = (
            struct.unpack_from("I", info, at) for at in (52, 68, 100, 156)
        )
        (received_nbytes,), (nbytes_per_s,) = (struct.unpack_from("Q", info, at) for at in (128, 160))
        return TcpInfo(
            round_trip_us / 1e6,
            retransmitted / max(1, segments),
            control.rstrip(b"\0").decode(),
            8.0 * nbytes_per_s,
            idle_ms / 1e3,
            received_nbytes,
        )
