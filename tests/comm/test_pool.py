"""Memory that is used again, and only once nobody has it."""

from __future__ import annotations

import pytest
import torch

from farflung.comm import pool
from farflung.comm.pool import Pool


def test_a_buffer_comes_again_once_no_tensor_of_it_is_left() -> None:
    memory = Pool()
    first = torch.frombuffer(memory.take(64), dtype=torch.float32)
    view = first.reshape(4, 4)[1:]
    second = torch.frombuffer(memory.take(64), dtype=torch.float32)
    assert second.data_ptr() != first.data_ptr()
    where = first.data_ptr()
    del first
    assert torch.frombuffer(memory.take(64), dtype=torch.float32).data_ptr() not in (where, second.data_ptr())
    del view
    assert torch.frombuffer(memory.take(64), dtype=torch.float32).data_ptr() == where


def test_no_more_is_kept_than_so_many_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool, "KEPT_NBYTES", 1000)
    memory = Pool()
    held = [memory.take(300) for _ in range(5)]
    assert len({id(one) for one in held}) == 5
    assert memory._nbytes == 900
    memory.take(800)
    assert (memory._nbytes, list(memory._by_size)) == (800, [800])
    large = memory.take(2000)
    assert (memory._nbytes, len(large)) == (0, 2000)
