"""Memory that is used again, and only once nobody has it."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor

from farflung.comm import ExchangeChannel, pool
from farflung.comm.pool import MIN_POOLED_NBYTES, BufferPool, allocate_like
from farflung.comm.wire import MessageKind, encode
from farflung.sim import LinkModel, VirtualWorld
from farflung.types import Payload, Tag
from tests.helpers import same_bits


def test_a_buffer_comes_again_once_no_tensor_of_it_is_left() -> None:
    memory = BufferPool()
    first = torch.frombuffer(memory.take_buffer(64), dtype=torch.float32)
    view = first.reshape(4, 4)[1:]
    second = torch.frombuffer(memory.take_buffer(64), dtype=torch.float32)
    assert second.data_ptr() != first.data_ptr()
    where = first.data_ptr()
    del first
    assert torch.frombuffer(memory.take_buffer(64), dtype=torch.float32).data_ptr() not in (
        where,
        second.data_ptr(),
    )
    del view
    assert torch.frombuffer(memory.take_buffer(64), dtype=torch.float32).data_ptr() == where


def test_no_more_is_kept_than_so_many_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool, "MAX_POOL_NBYTES", 1000)
    memory = BufferPool()
    held = [memory.take_buffer(300) for _ in range(5)]
    assert len({id(one) for one in held}) == 5
    assert memory._nbytes == 900
    memory.take_buffer(800)
    assert (memory._nbytes, list(memory._by_size)) == (800, [800])
    large = memory.take_buffer(2000)
    assert (memory._nbytes, len(large)) == (0, 2000)


LARGE = torch.zeros(MIN_POOLED_NBYTES // 4)


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool, "_scratch", pool._ThreadLocalPool())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.uint8])
def test_scratch_is_like_the_tensor_it_was_asked_for(dtype: torch.dtype) -> None:
    for like in (
        torch.zeros(3, 100_000, dtype=dtype),
        torch.zeros(0, dtype=dtype),
        torch.zeros(7, dtype=dtype),
    ):
        scratch = allocate_like(like)
        assert (scratch.dtype, scratch.shape) == (like.dtype, like.shape)
        assert scratch.is_contiguous()
        assert scratch.data_ptr() % 64 == 0
        assert same_bits(scratch.copy_(like), like)


def test_scratch_comes_again_once_neither_a_view_nor_a_frame_of_it_is_left() -> None:
    first = allocate_like(LARGE)
    where, view = first.data_ptr(), first[5:]
    frames = encode(MessageKind.DATA, 0, Tag(1), Payload((first,)))
    del first
    assert allocate_like(LARGE).data_ptr() != where
    del view
    assert allocate_like(LARGE).data_ptr() != where
    del frames
    assert allocate_like(LARGE).data_ptr() == where


def test_small_scratch_is_not_pooled() -> None:
    allocate_like(LARGE[1:])
    assert not pool._scratch.pool._by_size
    allocate_like(LARGE)
    assert list(pool._scratch.pool._by_size) == [LARGE.nbytes + 64]


def test_each_thread_has_scratch_of_its_own() -> None:
    where = allocate_like(LARGE).data_ptr()
    with ThreadPoolExecutor(1) as other:
        assert other.submit(lambda: allocate_like(LARGE).data_ptr()).result() != where
    assert allocate_like(LARGE).data_ptr() == where


@pytest.mark.parametrize("name", ["all_gather", "direct", "ring", "parameter_server"])
def test_sums_side_by_side_never_write_where_somebody_still_reads(name: str) -> None:
    """What virtual time sends is the sender's own memory, and arrives when the sender has gone on."""
    size, rounds, numel = 3, 4, 3 * MIN_POOLED_NBYTES // 4
    parts = torch.arange(size * rounds * 2 * numel, dtype=torch.float32).remainder_(8191.0)
    parts = parts.view(rounds * 2, size, numel)
    world = VirtualWorld(size, LinkModel(latency_s=1.0))
    totals: list[list[Tensor]] = [[] for _ in range(size)]

    async def replica(rank: int) -> None:
        runtime = world.runtimes[rank]

        async def one(number: int) -> Tensor:
            channel = ExchangeChannel(runtime.comm, number, 0)
            own, side = parts[number, rank].clone(), torch.ones(1, dtype=torch.float64)
            return (await channel.get_collective(name)(channel, own, side))[0]

        for number in range(0, 2 * rounds, 2):
            await runtime.sleep_until(4.0 * number + rank / 4)
            both = runtime.launch(one(number)), runtime.launch(one(number + 1))
            totals[rank] += [await total for total in both]

    world.run([replica(rank) for rank in range(size)])
    for of_rank in totals:
        assert torch.equal(torch.stack(of_rank), parts.sum(dim=1))
