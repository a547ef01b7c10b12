"""Stores that are served: at one address, and never waited for without end."""

from __future__ import annotations

import threading

import pytest
import torch.distributed as dist

from farflung.wall import stores


def test_a_store_is_served_at_one_address() -> None:
    first, second = stores.serve_store("127.0.0.1", 0), stores.serve_store("localhost", 0)
    first.set("key", "one")
    second.set("key", "two")
    assert (first.get("key"), second.get("key")) == (b"one", b"two")
    with pytest.raises(OSError, match="in use"):
        stores.serve_store("127.0.0.1", first.port)


def test_a_store_that_does_not_answer_is_waited_for_a_while_only(monkeypatch: pytest.MonkeyPatch) -> None:
    made = threading.Event()
    monkeypatch.setattr(stores, "_SERVE_S", 0.0)
    monkeypatch.setattr(dist, "TCPStore", lambda *_, **__: made.wait())
    try:
        with pytest.raises(OSError, match="timed out"):
            stores.serve_store("127.0.0.1", 0)
    finally:
        made.set()
