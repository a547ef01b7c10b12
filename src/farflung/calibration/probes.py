"""Measures one quantity each: operations, memory, the rest of a step, messages on loopback."""

from __future__ import annotations

import statistics
import time
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.utils.flop_counter import FlopCounterMode

from farflung._torch import DispatchMode, StorageRef, tree_leaves
from farflung.comm import Endpoint, Purpose
from farflung.config import Training
from farflung.data import InMemory
from farflung.loop import Parts, Replica
from farflung.reducers import CodecReducer
from farflung.sampling import Uniform
from farflung.schedules import Synchronous
from farflung.seeding import RandomState, derive, generator
from farflung.telemetry import Telemetry
from farflung.types import Communicator, Payload, Tag, Workload
from farflung.wall import WallRuntime

__all__ = ["MessageCosts", "forward_flops", "message_costs", "peak_nbytes", "whole_steps_s"]


SAMPLES = 8


def forward_flops(work: Workload, seed: int = 0) -> float:
    """Float operations of a forward pass, per sample: the matrix products and convolutions, two for each product.

    For :func:`farflung.devices.device_profile`, which knows devices by their operations per second.

    Args:
      work: what is to be trained.
      seed: of the model's weights and of dropout.
    """
    with RandomState.scope():
        RandomState(derive(seed, "replica", 0)).install()
        train, _ = work.datasets()
        count = min(SAMPLES, len(train))
        batch = train.take(torch.arange(count), train=True)
        model = work.model(generator(seed, "model"))
        # oneDNN's recurrent layers are one operation whose parts are hidden; switching it warns of Intel's GPUs.
        with warnings.catch_warnings(), torch.no_grad(), FlopCounterMode(display=False) as counter:
            warnings.simplefilter("ignore", UserWarning)
            with torch.backends.mkldnn.flags(enabled=False):
                work.loss(model, batch)
        return float(counter.get_total_flops()) / count


def peak_nbytes(fn: Callable[[], object]) -> int:
    """The most bytes that the tensors made by ``fn`` took at one time; storage that several share counts once.

    Looked at after each operation, so what an operation takes for its own work is not in it, nor what the process
    takes besides: libraries, the device's context.

    Args:
      fn: what to run, once.
    """
    with _Living() as living:
        fn()
    peak: int = living.peak
    return peak


class _Living(DispatchMode):  # type: ignore[misc]
    """Follows the storage of every tensor that an operation returns."""

    def __init__(self) -> None:
        super().__init__()
        self._storages: dict[int, tuple[Any, int]] = {}
        self.peak: int = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        del types
        made = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(made):
            if isinstance(leaf, torch.Tensor):
                storage = leaf.untyped_storage()
                reference = StorageRef(storage)
                self._storages[reference.cdata] = reference, storage.nbytes()
        gone = [key for key, (storage, _) in self._storages.items() if storage.expired()]
        for key in gone:
            del self._storages[key]
        self.peak = max(self.peak, sum(nbytes for _, nbytes in self._storages.values()))
        return made


def whole_steps_s(
    work: Workload, training: Training, *, warm_up: int, rounds: int, clock: Callable[[], float]
) -> float:
    """The median of whole steps of a replica that trains alone, in seconds; its exchanges go nowhere.

    Args:
      work: what to train.
      training: batch size and optimizer.
      warm_up: steps that are not counted.
      rounds: steps that are.
      clock: in seconds.
    """
    sampler = Uniform(seed=derive(training.seed, "sampler"))
    parts = Parts(CodecReducer(), Synchronous(), sampler, InMemory())
    took: list[float] = []

    async def steps(replica: Replica) -> None:
        for _ in range(warm_up + rounds):
            begin = clock()
            await replica.step()
            took.append(clock() - begin)

    runtime = WallRuntime(0, 1, None)
    try:
        runtime.run(steps(Replica(runtime, work, training, parts, Telemetry(0))))
    finally:
        runtime.close()
    return statistics.median(took[warm_up:])


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
    may run in it: the communication threads copy them through the kernel, and encrypt them.

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
    fixed_s, small_s = map(statistics.median, zip(*small, strict=True))
    _, large_s = map(statistics.median, zip(*large, strict=True))
    return fixed_s, max(0.0, large_s - small_s) / (LARGE_NBYTES - SMALL_NBYTES)


def _round(runtimes: Sequence[WallRuntime], number: int, nbytes: int, count: int) -> list[float]:
    """Processor seconds at one end of each of ``count`` messages: of the communication threads, and of all."""
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
    return [(after - then) / (2 * count) for after, then in zip(taken(), before, strict=True)]
