"""Visits: a process that is not a member of a run asks a member a question, at that member's port.

A supervisor brings a certificate; a replica asks to join. Both ends prove by HMAC that they know the run's key,
for this connection only. If the run encrypts, this is inside TLS. Neither end knows a certificate of the
other, so the proofs cover the member's certificate too (``tls-server-end-point`` of RFC 5929): a machine in the
middle would have to show another one.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import secrets
import socket
import ssl
import struct
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from farflung.comm.keys import convert_to_der
from farflung.comm.peer import CHALLENGE, HELLO, PROOF_NBYTES, VISITOR_RANK
from farflung.errors import FarflungError
from farflung.types import Json

__all__ = ["LENGTH", "MAX_NBYTES", "Access", "compute_visit_proof", "process_question", "receive_exactly"]

LENGTH = struct.Struct("<I")
"""Header of a question and of its answer, which are JSON."""
MAX_NBYTES = 1 << 22


def compute_visit_proof(
    key: bytes, end: Literal["member", "visitor"], nonces: bytes, certificate: str | bytes | None
) -> bytes:
    """Computes the proof that one end of a connection knows the run's key.

    Args:
      key: Key of the run.
      end: End that proves it.
      nonces: The member's nonce, then the visitor's.
      certificate: Certificate of the member, in PEM or DER; None without encryption.
    """
    der = convert_to_der(certificate) if isinstance(certificate, str) else certificate or b""
    text = b"farflung " + end.encode() + nonces + hashlib.sha256(der).digest()
    return hmac.digest(key, text, "sha256")


def process_question(find: Callable[[Any], Mapping[str, Json]], question: bytes) -> bytes:
    """Processes a question: encodes the result of ``find``, or the error that it raises."""
    try:
        answer = find(json.loads(question))
    except (FarflungError, RecursionError, ValueError) as error:
        answer = {"refused": str(error)}
    return json.dumps(answer).encode()


@dataclass(frozen=True, slots=True)
class Access:
    """Credentials by which a process that is not a member reaches a run.

    Args:
      key: Key of the run, a secret.
      is_encrypted: True if the run encrypts.
      addresses: HOST:PORT of the members that accept connections, by seniority.
    """

    key: bytes
    is_encrypted: bool
    addresses: Sequence[str]

    def to_json(self) -> dict[str, Json]:
        return {"key": self.key.hex(), "encrypted": self.is_encrypted, "addresses": list(self.addresses)}

    @staticmethod
    def from_json(fields: Mapping[str, Any]) -> Access:
        """Reads :meth:`to_json`; raises ``ValueError``, ``KeyError`` or ``TypeError`` if it is malformed."""
        key, encrypted = bytes.fromhex(fields["key"]), fields["encrypted"]
        if len(key) < PROOF_NBYTES or not isinstance(encrypted, bool):
            raise ValueError("no key of a run")
        return Access(key, encrypted, [str(address) for address in fields["addresses"]])

    def ask(self, address: str, question: Mapping[str, Json], patience_s: float) -> dict[str, Any]:
        """Asks a member a question.

        Args:
          address: Address of the member.
          question: Question, see :mod:`farflung.wall.visits`.
          patience_s: Most seconds that the visit may take.

        Returns:
          The answer.

        Raises:
          OSError: the member was not reached, does not know the key, or does not accept it.
        """
        deadline_s = time.monotonic() + patience_s
        host, _, port = address.rpartition(":")
        raw_socket = socket.create_connection((host.strip("[]"), int(port)), timeout=patience_s)
        with _wrap_tls(raw_socket) if self.is_encrypted else raw_socket as connection:
            *_, nonce = CHALLENGE.unpack(receive_exactly(connection, CHALLENGE.size, deadline_s))
            visitor_nonce = secrets.token_bytes(16)
            der = connection.getpeercert(True) if isinstance(connection, ssl.SSLSocket) else None
            visitor_proof = compute_visit_proof(self.key, "visitor", nonce + visitor_nonce, der)
            connection.sendall(HELLO.pack(VISITOR_RANK, 0, visitor_nonce, visitor_proof))
            proof = receive_exactly(connection, PROOF_NBYTES, deadline_s)
            if not hmac.compare_digest(
                proof, compute_visit_proof(self.key, "member", nonce + visitor_nonce, der)
            ):
                raise ConnectionError("another run")
            text = json.dumps(question).encode()
            connection.sendall(LENGTH.pack(len(text)) + text)
            (nbytes,) = LENGTH.unpack(receive_exactly(connection, LENGTH.size, deadline_s))
            answer: dict[str, Any] = json.loads(
                receive_exactly(connection, min(nbytes, MAX_NBYTES), deadline_s)
            )
            return answer


def _wrap_tls(plain: socket.socket) -> ssl.SSLSocket:
    """Wraps a socket in TLS, before the member is authenticated."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    with plain:  # the wrapped socket takes over its descriptor, unless the handshake fails
        return context.wrap_socket(plain)


def receive_exactly(connection: socket.socket, nbytes: int, deadline_s: float) -> bytes:
    """Receives exactly ``nbytes`` bytes, until a time on the monotonic clock.

    Raises:
      OSError: they did not arrive, or the connection was closed.
    """
    data = b""
    while len(data) < nbytes:
        connection.settimeout(max(1e-3, deadline_s - time.monotonic()))
        part = connection.recv(nbytes - len(data))
        if not part:
            raise ConnectionError("the connection was closed")
        data += part
    return data
