"""Peers: addresses and credentials that replicas publish in the run's store."""

from __future__ import annotations

import ipaddress
import json
import re
import struct
from collections.abc import Sequence
from dataclasses import dataclass

from farflung.comm.interface import explain_reachability, is_loopback
from farflung.comm.keys import Keys, compute_fingerprint, is_public_key
from farflung.errors import ConfigError, ProtocolError

__all__ = ["CHALLENGE", "HELLO", "PROOF_NBYTES", "VISITOR_RANK", "Peer", "check_peers", "should_connect"]

CHALLENGE = struct.Struct("<2sBx16s")
HELLO = struct.Struct("<IB3x16s32s")
"""Rank, number of the connection, nonce, proof."""
PROOF_NBYTES = 32
VISITOR_RANK = (1 << 32) - 1
"""Rank of a process that is not a member; see :mod:`farflung.comm.visits`."""
_MAX_NAME_LENGTH = 255
"""Most characters of a machine's name."""
_ADDRESS = re.compile(r"tcp://(?:([0-9.]+)|\[([0-9A-Fa-f:.]+)\]):([0-9]{1,5})")


@dataclass(frozen=True, slots=True)
class Peer:
    """Address and credentials of a replica."""

    rank: int
    address: str | None
    """Address; None if no peer can connect to it."""
    token: bytes
    key: str | None = None
    """Certificate, see :class:`farflung.comm.keys.Keys`; None without encryption."""
    machine: str | None = None
    """Name of the only machine that can reach it; None if others can."""

    @property
    def address_text(self) -> str:
        """The address, or a note that there is none, for errors."""
        return self.address or "no way in"

    @property
    def host(self) -> str | None:
        """Host of the address, without transport and port; None if there is no address.

        Raises:
          ValueError: it is not an IP address.
        """
        return None if self.address is None else self.host_and_port[0]

    @property
    def host_and_port(self) -> tuple[str, int]:
        """Host and port to connect to; raises as :attr:`host`."""
        match = _ADDRESS.fullmatch(self.address or "")
        if match is None or not 0 < int(match[3]) < 1 << 16:
            raise ValueError(f"{self.address!r} is no address")
        return str(ipaddress.ip_address(match[1] or match[2])), int(match[3])

    def to_json(self) -> str:
        fields = {
            "rank": self.rank,
            "address": self.address,
            "token": self.token.hex(),
            "key": self.key,
            "machine": self.machine,
        }
        return json.dumps({name: value for name, value in fields.items() if value is not None})

    @staticmethod
    def from_json(text: str | bytes) -> Peer:
        """Reads :meth:`to_json`.

        Raises:
          ProtocolError: the text is malformed.
        """
        try:
            fields = json.loads(text)
            token, address, key = bytes.fromhex(fields["token"]), fields.get("address"), fields.get("key")
            machine = None if fields.get("machine") is None else str(fields["machine"])[:_MAX_NAME_LENGTH]
            peer = Peer(int(fields["rank"]), None if address is None else str(address), token, key, machine)
            valid = (
                0 <= peer.rank < VISITOR_RANK and 0 < len(token) < 256 and (key is None or is_public_key(key))
            )
            if not valid or (address is not None and not peer.host):
                raise ValueError(text)
            return peer
        except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
            raise ProtocolError(f"the store holds {text[:60]!r} where an address was due") from None


def should_connect(source: Peer, target: Peer) -> bool:
    """Returns True if ``source`` is the replica of a pair that connects to the other.

    If both are reachable, the higher rank connects; if one is, the other connects. Neither does if none is
    reachable, and a third relays their messages, see :class:`farflung.comm.routes.RoutingTable`.
    """
    return target.address is not None and (source.address is None or source.rank > target.rank)


def check_peers(local_peer: Peer, peers: Sequence[Peer], keys: Keys | None) -> None:
    """Checks that ``peers`` and this replica can make up a run.

    Args:
      local_peer: This replica.
      peers: All other replicas, as the store names them.
      keys: Keys of this replica, with the names that it accepts.

    Raises:
      ConfigError: some encrypt and others do not, or a key is not on the list.
      ProtocolError: two have one name, or the route to one would not be encrypted.
    """
    for peer in peers:
        if (local_peer.key is None) != (peer.key is None):
            plain, encrypting = (local_peer, peer) if local_peer.key is None else (peer, local_peer)
            raise ConfigError(
                f"rank {plain.rank} listens only on its own machine ({plain.address_text}), rank "
                f"{encrypting.rank} encrypts "
                f"({encrypting.address_text}): {explain_reachability()}"
            )
        if peer.key is None and peer.host is not None and not is_loopback(peer.host):
            raise ProtocolError(
                f"the store sends rank {local_peer.rank} to {peer.address} for rank {peer.rank}, where it does "
                f"not encrypt: "
                "is it written to from another machine?"
            )
        if keys is not None and keys.accepted_names is not None and peer.key not in keys.accepted_names:
            raise ConfigError(
                f"rank {peer.rank} at {peer.address_text} has the key {compute_fingerprint(peer.key or '')}, "
                f"which is not in the "
                "folder of --keys here: copy the .public file of its machine there"
            )
    for names in (
        {peer.rank for peer in (local_peer, *peers)},
        {peer.token for peer in (local_peer, *peers)},
    ):
        if len(names) <= len(peers):
            raise ProtocolError("the store names one replica twice: is another run using it?")
