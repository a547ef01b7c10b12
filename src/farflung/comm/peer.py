"""How replicas make themselves known to each other through the run's store."""

from __future__ import annotations

import ipaddress
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass

from farflung.comm.interface import is_loopback
from farflung.comm.keys import Keys, is_public_key
from farflung.errors import ConfigError, ProtocolError

__all__ = ["Peer", "check_peers"]

_ADDRESS = re.compile(r"tcp://(?:([0-9.]+)|\[([0-9A-Fa-f:.]+)\]):[0-9]{1,5}")


@dataclass(frozen=True, slots=True)
class Peer:
    """How a replica is reached and recognised."""

    rank: int
    address: str
    token: bytes
    key: str | None = None
    """Its public key; ``None`` where nothing is encrypted."""

    @property
    def host(self) -> str:
        """The address without transport and port.

        Raises:
          ValueError: it is none that ZeroMQ would reach by TCP without asking anybody.
        """
        found = _ADDRESS.fullmatch(self.address)
        if found is None:
            raise ValueError(f"{self.address!r} is no address")
        return str(ipaddress.ip_address(found[1] or found[2]))

    def to_json(self) -> str:
        """For the store."""
        key = {} if self.key is None else {"key": self.key}
        return json.dumps({"rank": self.rank, "address": self.address, "token": self.token.hex(), **key})

    @staticmethod
    def from_json(text: str | bytes) -> Peer:
        """Reads :meth:`to_json`.

        Raises:
          ProtocolError: something else was published.
        """
        try:
            fields = json.loads(text)
            token, key = bytes.fromhex(fields["token"]), fields.get("key")
            peer = Peer(int(fields["rank"]), str(fields["address"]), token, key)
            if not (peer.host and 0 < len(token) < 256 and (key is None or is_public_key(key))):
                raise ValueError(text)
            return peer
        except (ValueError, KeyError, TypeError, RecursionError):
            raise ProtocolError(f"the store holds {text[:60]!r} where an address was due") from None


def check_peers(me: Peer, others: Sequence[Peer], keys: Keys | None) -> None:
    """Whether ``others`` and this replica can make up a run.

    Args:
      me: this replica.
      others: the rest, as the store names them.
      keys: this replica's, with the list of those it accepts.

    Raises:
      ConfigError: some encrypt and others do not, or a key is not on the list.
      ProtocolError: two have one name, or nothing would be encrypted on the way to one.
    """
    for peer in others:
        if (me.key is None) != (peer.key is None):
            plain, sealed = (me, peer) if me.key is None else (peer, me)
            raise ConfigError(
                f"rank {plain.rank} listens on its own machine alone ({plain.address}), rank {sealed.rank} encrypts "
                f"({sealed.address}): give all machines the same --master-addr, or each its own --interface"
            )
        if peer.key is None and not is_loopback(peer.host):
            raise ProtocolError(
                f"the store sends rank {me.rank} to {peer.address} for rank {peer.rank}, where it does not encrypt: "
                "is it written to from another machine?"
            )
        if keys is not None and keys.listed is not None and peer.key not in keys.listed:
            raise ConfigError(
                f"rank {peer.rank} at {peer.address} has the key {peer.key}, which is not in the folder of --keys "
                "here: copy the .public file of its machine there"
            )
    for names in ({peer.rank for peer in (me, *others)}, {peer.token for peer in (me, *others)}):
        if len(names) <= len(others):
            raise ProtocolError("the store names one replica twice: is another run using it?")
