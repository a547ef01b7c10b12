"""A TCP proxy that stands between two replicas: it keeps what passes, and can cut it off."""

from __future__ import annotations

import contextlib
import re
import socket
import threading

import torch.distributed as dist

from tests.helpers import PATIENCE_S


class Proxy:
    """Listens on loopback and hands everything on to ``target``, an address as a peer publishes it."""

    def __init__(self, target: str) -> None:
        host, _, port = target.removeprefix("tcp://").rpartition(":")
        self._target = (host, int(port))
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"tcp://127.0.0.1:{self._listener.getsockname()[1]}"
        self.to_target: list[bytearray] = []
        """What came from those who connected, by connection."""
        self.from_target: list[bytearray] = []
        self._sockets: list[socket.socket] = []
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()

    @property
    def passed(self) -> bytes:
        """Everything that has passed, either way."""
        return b"".join(map(bytes, [*self.to_target, *self.from_target]))

    def cut(self) -> None:
        """Closes what is connected, and whatever comes later finds nobody."""
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        for link in self._sockets:
            with contextlib.suppress(OSError):
                link.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self.cut()
        for thread in self._threads:
            thread.join(PATIENCE_S)
        for link in (self._listener, *self._sockets):
            link.close()

    def _accept(self) -> None:
        while True:
            try:
                near = self._listener.accept()[0]
                far = socket.create_connection(self._target)
            except OSError:
                return
            self._sockets += [near, far]
            self.to_target.append(bytearray())
            self.from_target.append(bytearray())
            for source, sink, kept in ((near, far, self.to_target[-1]), (far, near, self.from_target[-1])):
                self._threads.append(
                    threading.Thread(target=self._pump, args=(source, sink, kept), daemon=True)
                )
                self._threads[-1].start()

    @staticmethod
    def _pump(source: socket.socket, sink: socket.socket, kept: bytearray) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                kept += data
                sink.sendall(data)
        for link in (source, sink):
            with contextlib.suppress(OSError):
                link.shutdown(socket.SHUT_RDWR)


class Detour(dist.Store):
    """A store that sends those who connect to some ranks through proxies, as anybody between the machines could."""

    def __init__(self, *ranks: int) -> None:
        super().__init__()
        self.store = dist.HashStore()
        self.proxies: dict[int, Proxy] = {}
        self._ranks = ranks

    def set(self, key: str, value: str) -> None:
        self.store.set(
            key, re.sub(r'"rank[\\": ]+(\d+)[\\", ]+address[\\": ]+(tcp://[0-9.:]+)', self._divert, value)
        )

    def _divert(self, found: re.Match[str]) -> str:
        rank, address = int(found[1]), found[2]
        if rank not in self._ranks:
            return found[0]
        if rank not in self.proxies:
            self.proxies[rank] = Proxy(address)
        return found[0].replace(address, self.proxies[rank].address)

    def get(self, key: str) -> bytes:
        return self.store.get(key)

    def check(self, keys: list[str]) -> bool:
        return self.store.check(keys)

    def close(self) -> None:
        for proxy in self.proxies.values():
            proxy.close()
