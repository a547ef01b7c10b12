"""A transport within a process: messages go from queue to queue in their order, whatever their priority."""

from __future__ import annotations

import os
import secrets
import threading
from collections import Counter, deque
from collections.abc import Callable, Sequence
from typing import Any

import torch

from farflung.comm import ConnectionTraffic, EventLoop, Listener, Peer, Refusals
from farflung.comm.keys import Keys
from farflung.comm.wire import Frame, read_head
from farflung.errors import PeerLost
from farflung.tasks import Pending, create_completed, create_failed

__all__ = ["InMemoryTransport"]

_here: dict[bytes, InMemoryTransport] = {}
"""The transports of this process, by token."""
_lock = threading.Lock()


class InMemoryTransport:
    """See :class:`farflung.comm.Transport`; what it is not asked for it ignores."""

    listener: Listener

    def __init__(self, rank: int, size: int, **options: Any) -> None:
        del size, options
        self.local_peer = Peer(rank, f"tcp://127.0.0.1:{1 + rank}", secrets.token_bytes(16))
        self.keys: Keys | None = None
        self.refusals, self.queued_nbytes = Refusals(self.local_peer), 0
        self.max_nbytes = 1 << 31
        self._peers: dict[int, Peer] = {}
        self._arrived: deque[tuple[bytes, list[bytearray] | None]] = deque()
        """The token of each sender and its frames; ``None``: it has closed."""
        self._taken: Counter[int] = Counter()
        """Messages that have arrived, by rank."""
        self._ear, self._bell = os.pipe()
        self.loop = EventLoop()
        self.loop.watch(self._ear, readable=self._heard)
        with _lock:
            _here[self.local_peer.token] = self

    def connect_peers(self, peers: Sequence[Peer], *, is_reconnect: bool = False) -> None:
        del is_reconnect
        self._peers.update({peer.rank: peer for peer in peers})
        os.write(self._bell, b"!")

    def remove_peer(self, rank: int) -> None:
        self._peers.pop(rank, None)

    def set_expected(self, count: int) -> None:
        del count

    def accept_visits(self, key: bytes, answer: Callable[[bytes], bytes]) -> None:
        del key, answer

    def get_traffic(self, rank: int) -> ConnectionTraffic:
        return ConnectionTraffic(self._taken[rank], 0)

    def has_failed_auth(self, rank: int) -> bool:
        del rank
        return False

    def send(self, rank: int, frames: Sequence[Frame], *, priority: int = 0, view: int = 0) -> Pending[None]:
        del priority, view
        peer = self._peers.get(rank)
        if peer is None or not self._tell(peer.token, [bytearray(frame) for frame in frames]):
            return create_failed(PeerLost(rank, "its connection is gone"))
        return create_completed(None)

    def _tell(self, token: bytes, frames: list[bytearray] | None) -> bool:
        with _lock:
            other = _here.get(token)
            if other is not None:
                other._arrived.append((self.local_peer.token, frames))
                os.write(other._bell, b"!")
        return other is not None

    def withdraw(self, view: int) -> None:
        del view

    def poll(self, timeout_s: float | None) -> None:
        self.loop.run_once(timeout_s)

    def _heard(self) -> None:
        os.read(self._ear, 4096)
        for _ in range(len(self._arrived)):
            self._take(*self._arrived.popleft())

    def _take(self, token: bytes, frames: list[bytearray] | None) -> None:
        rank = next((rank for rank, peer in self._peers.items() if peer.token == token), None)
        if rank is None:
            self._arrived.append((token, frames))  # until it is admitted
            return
        self._taken[rank] += 1
        if frames is None:
            self.listener.handle_close(rank)
            return
        head = read_head(frames[0], self.max_nbytes)
        tensors = [torch.frombuffer(frame, dtype=torch.uint8).clone() for frame in frames[1:]]
        self.listener.handle_message(rank, head.build_message(tensors))

    def close(self) -> None:
        for peer in self._peers.values():
            self._tell(peer.token, None)
        with _lock:
            del _here[self.local_peer.token]
        self.loop.close()
        os.close(self._ear)
        os.close(self._bell)
