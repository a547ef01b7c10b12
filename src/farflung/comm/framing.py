"""What the transport adds to a message on the wire, and how large the pieces are in which a message leaves."""

from __future__ import annotations

from typing import TypeVar

import numpy as np
import numpy.typing as npt

from farflung.comm.wire import INLINE

__all__ = ["piece_nbytes", "wire_nbytes"]

RECORD_NBYTES = 8
"""Before each record: size u32, kind u8, three bytes of 0; see :mod:`farflung.comm.records`."""
HEAD_NBYTES = 56
"""The wire's head of a message of one flat tensor; :data:`farflung.comm.wire.INLINE` bytes or fewer ride in it."""
MORE_NBYTES = 13
"""Before the tensor bytes of a piece: message number u32, tensor u8, offset u64."""
TLS_RECORD_NBYTES = 1 << 14
TLS_NBYTES = 22
"""Of TLS 1.3, for each record of at most :data:`TLS_RECORD_NBYTES`: header, type and tag (RFC 8446 Sec. 5.2)."""
PIECE_S, LEAST_PIECE_NBYTES, MOST_PIECE_NBYTES = 0.01, 1 << 14, 1 << 18
"""Off loopback a piece is what a link carries in this time, within these bounds."""
LOCAL_PIECE_NBYTES, SEALED_PIECE_NBYTES = 1 << 21, 1 << 18
"""A piece within a machine, plain and encrypted."""

N = TypeVar("N", int, npt.NDArray[np.int64])


def piece_nbytes(rate_bps: float) -> int:
    """Bytes of a piece on a link of this rate, which may be infinite."""
    return int(min(max(rate_bps / 8 * PIECE_S, LEAST_PIECE_NBYTES), MOST_PIECE_NBYTES))


def wire_nbytes(nbytes: N, piece: N, *, sealed: bool) -> N:
    """Bytes on the wire of a message with so many bytes of payload, as one flat tensor has; of several at once.

    Args:
      nbytes: of the payload.
      piece: bytes of a piece; see :func:`piece_nbytes`.
      sealed: whether the connection is encrypted.
    """
    pieces = -(-nbytes // piece) * (nbytes > INLINE)
    framed = RECORD_NBYTES + HEAD_NBYTES + nbytes + (RECORD_NBYTES + MORE_NBYTES) * pieces
    whole: N = framed + sealed * TLS_NBYTES * -(-framed // TLS_RECORD_NBYTES)
    return whole
