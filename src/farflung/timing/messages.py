"""Measures what messages take on this machine: two replicas on loopback, by the sockets that training has."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import torch
import torch.distributed as dist

from farflung.comm import Endpoint, Purpose
from farflung.runtime import WallRuntime
from farflung.types import Communicator, Payload, Tag

__all__ = ["MessageCosts", "message_costs"]

SMALL_NBYTES, LARGE_NBYTES = 1 << 10, 1 << 22
SMALL_COUNT, LARGE_COUNT = 100, 6
"""Messages of a round: each is answered by the next, as in exchanges, where replicas wait for each other."""
WARM_UP = 1


class MessageCosts(NamedTuple):
    """Processor seconds at each end of a message, in the order of :class:`farflung.devices.CodingRates`.

    Args:
      message_s: whatever its size.
      copy_s_per_byte: of its bytes.
      encrypt_s_per_byte: besides, where it is encrypted.
    """

    message_s: float
    copy_s_per_byte: float
    encrypt_s_per_byte: float


def message_costs(*, rounds: int = 5, turns: float = 1.0) -> MessageCosts:
    """Medians of rounds of small and of large messages, plain and encrypted, halved between the two ends.

    Of a message, what the communication threads take counts; of its bytes all that this process takes, so nothing else
    may run in it: ZeroMQ's own threads copy them through the kernel, and encrypt them.

    Args:
      rounds: of each kind.
      turns: how many times as long everything takes, because others have their turns.

    Raises:
      RunLost: the sockets failed.
    """
    message_s, plain_s = _pair(False, rounds)
    _, hidden_s = _pair(True, rounds)
    found = (message_s, plain_s, max(0.0, hidden_s - plain_s))
    return MessageCosts(*(float(f"{turns * seconds:.4g}") for seconds in found))


def _pair(encrypt: bool, rounds: int) -> tuple[float, float]:
    """Processor seconds at one end, of a message and of each byte."""
    store = dist.HashStore()

    def begin(rank: int) -> WallRuntime:
        return WallRuntime(rank, 2, store, endpoint=Endpoint(encrypt=encrypt))

    with ThreadPoolExecutor(2) as both:
        runtimes = list(both.map(begin, (0, 1)))
        try:
            small, large = (
                [_round(runtimes, first + number, nbytes, count) for number in range(WARM_UP + rounds)][
                    WARM_UP:
                ]
                for first, nbytes, count in (
                    (0, SMALL_NBYTES, SMALL_COUNT),
                    (WARM_UP + rounds, LARGE_NBYTES, LARGE_COUNT),
                )
            )
        finally:
            list(both.map(WallRuntime.close, runtimes))
    fixed_s = statistics.median(one.threads_s for one in small)
    more_s = statistics.median(one.all_s for one in large) - statistics.median(one.all_s for one in small)
    return fixed_s, max(0.0, more_s) / (LARGE_NBYTES - SMALL_NBYTES)


class _Taken(NamedTuple):
    """Processor seconds at one end of a message: of the communication threads, and of all."""

    threads_s: float
    all_s: float


def _round(runtimes: Sequence[WallRuntime], number: int, nbytes: int, count: int) -> _Taken:
    """Of one of ``count`` messages to and fro."""
    payload = Payload((torch.zeros(nbytes, dtype=torch.uint8),))

    async def replica(comm: Communicator) -> None:
        for hop in range(count):
            tag = Tag(Purpose.MEASURE.at(number), 0, hop)
            if hop % 2 == comm.rank:
                await comm.send(payload, 1 - comm.rank, tag)
            else:
                await comm.recv(1 - comm.rank, tag)

    def taken() -> tuple[float, float]:
        return sum(runtime.communication_cpu_s for runtime in runtimes), time.process_time()

    before = taken()
    for task in [runtime.launch(replica(runtime.comm)) for runtime in runtimes]:
        task.wait()
    return _Taken(*((after - then) / (2 * count) for after, then in zip(taken(), before, strict=True)))
