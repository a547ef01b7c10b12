"""A web server on this machine, for downloads that break off, change or are refused."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TypeVar

from farflung.data.source import File

S = TypeVar("S", bound=ThreadingHTTPServer)
CONTENT = bytes(range(256)) * 4096  # 1 MiB


class Server(ThreadingHTTPServer):
    """Serves ``content``; the first ``break_after`` entries end a response after that many bytes."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.content = CONTENT
        self.break_after: list[int] = []
        self.asked = 0
        self.status = 200

    def file(self, **known: object) -> File:
        values: dict[str, object] = {
            "nbytes": len(CONTENT),
            "md5": hashlib.md5(CONTENT).hexdigest(),
            "url": f"http://127.0.0.1:{self.server_port}/set.bin",
        }
        return File("set.bin", **{**values, **known})  # type: ignore[arg-type]


class Handler(BaseHTTPRequestHandler):
    """GET."""

    server: Server

    def do_GET(self) -> None:
        self.server.asked += 1
        if self.server.status != 200:
            self.send_error(self.server.status)
            return
        body = self.server.content
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body[: self.server.break_after.pop(0)] if self.server.break_after else body)

    def log_message(self, format: str, *args: object) -> None:
        pass


@contextmanager
def running(server: S) -> Iterator[S]:
    """Inside, a server answers."""
    with server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


def serving() -> AbstractContextManager[Server]:
    """A server that answers inside."""
    return running(Server())
