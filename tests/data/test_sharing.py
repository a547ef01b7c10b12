"""Samples that move between replicas, and those that stay."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch

from farflung.comm import ExchangeChannel
from farflung.data import Injection, NoSharing, TensorDataset
from farflung.errors import ConfigError, ProtocolError
from farflung.sim import VirtualWorld
from farflung.types import Batch, Payload, Sharing

SAMPLE_NBYTES = 8 + 1
"""Of one of :func:`rows`, with its label."""


def rows(rank: int, count: int) -> Batch:
    inputs = torch.arange(2.0 * count).reshape(count, 2) + 100 * rank
    return Batch(inputs, torch.full((count,), rank, dtype=torch.uint8))


def shared(sharing: Sharing, counts: list[int], step: int = 0) -> tuple[list[Batch], list[int]]:
    """What each of some replicas trains on, that had so many rows, and the bytes that each has sent."""
    world = VirtualWorld(len(counts))
    channels = [ExchangeChannel(runtime.comm, step, 0) for runtime in world.runtimes]
    samples = TensorDataset(torch.zeros(1, 2), torch.zeros(1))
    found = world.run(
        [
            sharing.inject_samples(channel, samples, rows(rank, count), step=step)
            for rank, (channel, count) in enumerate(zip(channels, counts, strict=True))
        ]
    )
    return found, [channel.sent_nbytes for channel in channels]


def test_nothing_leaves() -> None:
    sharing: Sharing = NoSharing()
    found, sent = shared(sharing, [2, 3])
    assert not sharing.has_data_transfers
    assert not any(sharing.is_injection_due(step) for step in range(100))
    assert [len(batch) for batch in found] == [2, 3]
    assert sent == [0, 0]


def test_senders_are_drawn_anew_for_each_step_and_alike_on_all() -> None:
    sharing, other = Injection(3, alpha=0.3), Injection(4, alpha=0.3)
    drawn = [sharing.choose_senders(step, 10) for step in range(200)]
    assert drawn == [Injection(3, alpha=0.3).choose_senders(step, 10) for step in range(200)]
    assert drawn != [other.choose_senders(step, 10) for step in range(200)]
    assert {len(senders) for senders in drawn} == {3}
    often = Counter(rank for senders in drawn for rank in senders)
    assert len(often) == 10
    assert max(often.values()) < 2 * min(often.values())


def test_so_many_send() -> None:
    counts = {
        alpha: len(Injection(0, alpha=alpha).choose_senders(7, 10)) for alpha in (0.05, 0.1, 0.25, 0.5, 1.0)
    }
    assert counts == {0.05: 1, 0.1: 1, 0.25: 3, 0.5: 5, 1.0: 10}
    assert len(Injection(0, alpha=0.28).choose_senders(7, 25)) == 7


@pytest.mark.parametrize("beta", [0.25, 0.5, 1.0])
def test_all_train_on_their_own_rows_and_on_what_the_senders_sent(beta: float) -> None:
    sharing, counts = Injection(5, alpha=0.5, beta=beta), [8, 3, 12, 5]
    senders = sharing.choose_senders(0, 4)
    found, sent = shared(sharing, counts)
    for rank, batch in enumerate(found):
        parts = [rows(rank, counts[rank])]
        for sender in senders:
            if sender != rank:
                whole, count = rows(sender, counts[sender]), int(beta * counts[sender])
                parts.append(Batch(whole.inputs[:count], whole.targets[:count]))
        assert torch.equal(batch.inputs, torch.cat([part.inputs for part in parts]))
        assert torch.equal(batch.targets, torch.cat([part.targets for part in parts]))
        copies = 3 * int(beta * counts[rank]) if rank in senders else 0
        assert sent[rank] == copies * SAMPLE_NBYTES


def test_one_replica_sends_to_nobody() -> None:
    (batch,), sent = shared(Injection(1), [4])
    assert torch.equal(batch.inputs, rows(0, 4).inputs)
    assert sent == [0]


def test_batches_can_be_kept() -> None:
    assert Injection(0).get_local_batch_size(32, 16) == 32
    sharing = Injection(0, keep_batch=True)
    assert sharing.get_local_batch_size(32, 16) == round(32 / 5)
    assert sharing.get_local_batch_size(1, 16) == 1


def test_samples_of_another_kind_are_refused() -> None:
    world = VirtualWorld(2)
    sharing = Injection(0, alpha=1.0)
    channels = [ExchangeChannel(runtime.comm, 0, 0) for runtime in world.runtimes]
    samples = TensorDataset(torch.zeros(1, 2), torch.zeros(1))

    async def other() -> None:
        channels[1].send(
            Payload((torch.zeros(2, 3), torch.zeros(2, dtype=torch.uint8))), 0, channels[1].reserve_hops(1)
        )

    with pytest.raises(ProtocolError, match="rank 1 sent samples of another kind"):
        world.run([sharing.inject_samples(channels[0], samples, rows(0, 4), step=0), other()])


@pytest.mark.parametrize("options", [{"alpha": 0.0}, {"alpha": 1.5}, {"beta": -0.1}, {"beta": True}])
def test_bad_options_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=f"{next(iter(options))} .* must be above 0 and at most 1"):
        Injection(0, **options)
