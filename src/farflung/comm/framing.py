"""Framing: the transport's overhead on the wire, and the size of the pieces in which a message is sent."""

from __future__ import annotations

from typing import TypeVar

import numpy as np
import numpy.typing as npt

from farflung.comm.wire import INLINE_NBYTES

__all__ = ["compute_piece_nbytes", "compute_wire_nbytes"]

RECORD_HEADER_NBYTES = 8
"""Header of a record: size u32, kind u8, three bytes of 0; see :mod:`farflung.comm.records`."""
HEAD_NBYTES = 56
"""Head of a message of one flat tensor, which carries up to :data:`farflung.comm.wire.INLINE_NBYTES` bytes."""
PIECE_HEADER_NBYTES = 13
"""Header of a piece: message number u32, tensor u8, offset u64."""
TLS_RECORD_NBYTES = 1 << 14
TLS_OVERHEAD_NBYTES = 22
"""Header, type and tag of a TLS 1.3 record of at most :data:`TLS_RECORD_NBYTES` (RFC 8446 Sec. 5.2)."""
PIECE_S, MIN_PIECE_NBYTES, MAX_PIECE_NBYTES = 0.01, 1 << 14, 1 << 18
"""Seconds in which a link carries a piece that urgent messages wait for, and bounds of it, off loopback."""
BULK_PIECE_S, BULK_PIECE_NBYTES = 0.2, 1 << 16
"""Seconds and bytes up to which a piece may be larger while no urgent message is expected."""
URGENT_NBYTES = 1 << 22
"""Bytes to a peer, after a message has overtaken another, for which more urgent messages are expected."""
LOCAL_PIECE_NBYTES, ENCRYPTED_PIECE_NBYTES = 1 << 21, 1 << 18
"""Piece within a machine, plain and encrypted."""

N = TypeVar("N", int, npt.NDArray[np.int64])


def compute_piece_nbytes(rate_bps: float, *, expects_urgent: bool = False) -> int:
    """Computes the bytes of a piece on a link.

    Args:
      rate_bps: Rate of the link, which may be infinite.
      expects_urgent: True if urgent messages are expected, see :data:`URGENT_NBYTES`.
    """
    nbytes = min(max(rate_bps / 8 * PIECE_S, MIN_PIECE_NBYTES), MAX_PIECE_NBYTES)
    bulk_nbytes = 0 if expects_urgent else min(rate_bps / 8 * BULK_PIECE_S, BULK_PIECE_NBYTES)
    return int(max(nbytes, bulk_nbytes))


def compute_wire_nbytes(nbytes: N, piece_nbytes: N, *, is_encrypted: bool) -> N:
    """Computes the bytes on the wire of a message with one flat tensor; of several messages, for an array.

    Args:
      nbytes: Bytes of the payload.
      piece_nbytes: Bytes of a piece; see :func:`compute_piece_nbytes`.
      is_encrypted: True if the connection is encrypted.
    """
    pieces = -(-nbytes // piece_nbytes) * (nbytes > INLINE_NBYTES)
    framed = (
        RECORD_HEADER_NBYTES + HEAD_NBYTES + nbytes + (RECORD_HEADER_NBYTES + PIECE_HEADER_NBYTES) * pieces
    )
    total: N = framed + is_encrypted * TLS_OVERHEAD_NBYTES * -(-framed // TLS_RECORD_NBYTES)
    return total
