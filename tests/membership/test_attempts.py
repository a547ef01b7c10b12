"""Exchanges that are made again: the attempt of an earlier view has no part in the newer one; whose silence counts."""

from __future__ import annotations

from unittest.mock import Mock

import numpy as np
import pytest
import torch

from farflung.comm import ExchangeChannel, Purpose
from farflung.errors import WaitEnded
from farflung.faults import FaultPlan
from farflung.membership import View
from farflung.membership.connections import Connections
from farflung.membership.subgroup import Subgroup
from farflung.network import Link
from farflung.sim import VirtualRuntime, VirtualWorld
from farflung.tasks import Pending
from farflung.types import Payload


def test_an_attempt_that_resumes_in_a_newer_view_neither_sends_nor_takes_messages() -> None:
    comm = Mock(rank=0, size=3, lane=None)
    comm.recv.return_value = comm.send.return_value = Pending()
    views = ["first"]
    sent_counts = np.zeros(3, dtype=np.int64)
    group = Subgroup(comm, [0, 2], is_current=lambda: views[-1] == "first", sent_counts=sent_counts)
    attempt = ExchangeChannel(group, Purpose.STEP.build_exchange_id(7), 0)
    payload = Payload((torch.zeros(2),))
    assert not attempt.recv(1, 0).is_done
    assert not attempt.send(payload, 1, 0).is_done
    sent, calls = [0, 0, payload.nbytes], len(comm.mock_calls)
    assert sent_counts.tolist() == sent
    views.append("second")
    attempt.post_recv_buffer(1, 0, torch.zeros(2))
    for ended in (attempt.recv(1, 1), attempt.send(payload, 1, 1)):
        with pytest.raises(WaitEnded, match="rank 2"):
            raise ended.error  # type: ignore[misc]
    assert (sent_counts.tolist(), len(comm.mock_calls)) == (sent, calls)


def test_one_that_stood_still_itself_counts_the_silence_of_others_from_then_on() -> None:
    """An answer takes longer than the time between two questions, and what arrived meanwhile is not heard yet."""
    world = VirtualWorld(
        2, Link(1.0), faults=FaultPlan().hang(0, at_s=0.2, for_s=50.0), needs_all_members=False
    )
    view = View(1, ("0", "1"), (0,), (("0", "1"),))
    member = Mock(connected_names={"1"})

    async def watch(runtime: VirtualRuntime) -> float:
        connections = Connections(runtime, member, lambda: view, 2.0, False, lambda: None)
        assert await connections.probe_members(0.5) == {"1"}
        return connections.compute_silence_s("1")

    async def rest(runtime: VirtualRuntime) -> float:
        await runtime.sleep_until(60.0)
        return 0.0

    silent_s, _ = world.run([watch(world.runtimes[0]), rest(world.runtimes[1])])
    assert silent_s == 0.5
