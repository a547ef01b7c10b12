"""Measurements of single quantities: operations, memory, the rest of a step, and messages on loopback."""

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
from farflung.loop import Components, Replica
from farflung.reducers import CodecReducer
from farflung.sampling import UniformSampler
from farflung.schedules import Synchronous
from farflung.seeding import RandomState, create_generator, derive_seed
from farflung.telemetry import Telemetry
from farflung.types import Communicator, Payload, Tag, Workload
from farflung.wall import WallRuntime

__all__ = [
    "MessageCosts",
    "count_forward_flops",
    "measure_message_cpu_costs",
    "measure_peak_nbytes",
    "measure_step_s",
]


FLOP_SAMPLES = 8


def count_forward_flops(work: Workload, seed: int = 0) -> float:
    """Counts the FLOPs of a forward pass per sample, in matrix products and convolutions.

    For :func:`farflung.devices.find_device`, which knows devices by their operations per second.

    Args:
      work: Workload to train.
      seed: Seed of the model's weights and of dropout.
    """
    with RandomState.preserve_globals():
        RandomState(derive_seed(seed, "replica", 0)).install()
        train, _ = work.load_datasets()
        count = min(FLOP_SAMPLES, len(train))
        batch = train.take(torch.arange(count), train=True)
        model = work.build_model(create_generator(seed, "model"))
        # oneDNN's recurrent layers are one operation whose parts are hidden; switching it warns of Intel's GPUs.
        with warnings.catch_warnings(), torch.no_grad(), FlopCounterMode(display=False) as counter:
            warnings.simplefilter("ignore", UserWarning)
            with torch.backends.mkldnn.flags(enabled=False):
                work.compute_losses(model, batch)
        return float(counter.get_total_flops()) / count


def measure_peak_nbytes(fn: Callable[[], object]) -> int:
    """Returns the peak memory of tensors created by ``fn``; shared storage counts once.

    Memory is measured after each operation. It excludes temporary memory of operations, and what the process
    uses for libraries or the device's context.

    Args:
      fn: Function to run once.
    """
    with _StorageTracker() as tracker:
        fn()
    peak: int = tracker.peak
    return peak


class _StorageTracker(DispatchMode):  # type: ignore[misc]
    """Dispatch mode that tracks the storage of every tensor that an operation returns."""

    def __init__(self) -> None:
        super().__init__()
        self._storages: dict[int, tuple[Any, int]] = {}
        self.peak: int = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        del types
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                storage = leaf.untyped_storage()
                reference = StorageRef(storage)
                self._storages[reference.cdata] = reference, storage.nbytes()
        expired = [key for key, (storage, _) in self._storages.items() if storage.expired()]
        for key in expired:
            del self._storages[key]
        self.peak = max(self.peak, sum(nbytes for _, nbytes in self._storages.values()))
        return result


def measure_step_s(
    work: Workload, training: Training, *, warm_up: int, rounds: int, clock: Callable[[], float]
) -> float:
    """Returns the median seconds of the steps of a replica that trains alone and exchanges nothing.

    Args:
      work: Workload to train.
      training: Batch size and optimizer.
      warm_up: Number of steps that are not counted.
      rounds: Number of counted steps.
      clock: Function that returns seconds.
    """
    sampler = UniformSampler(seed=derive_seed(training.seed, "sampler"))
    parts = Components(CodecReducer(), Synchronous(), sampler, InMemory())
    durations: list[float] = []

    async def run_steps(replica: Replica) -> None:
        for _ in range(warm_up + rounds):
            begin = clock()
            await replica.step()
            durations.append(clock() - begin)

    runtime = WallRuntime(0, 1, None)
    try:
        runtime.run(run_steps(Replica(runtime, work, training, parts, Telemetry(0))))
    finally:
        runtime.close()
    return statistics.median(durations[warm_up:])


SMALL_NBYTES, LARGE_NBYTES = 1 << 10, 1 << 22
SMALL_COUNT, LARGE_COUNT = 100, 6
"""Messages of a round, each answered by the next, as in exchanges, where replicas wait for each other."""
WARM_UP = 1


class MessageCosts(NamedTuple):
    """Processor seconds at each end of a message, in the order of :class:`farflung.devices.CodingRates`.

    Args:
      message_s: Seconds per message of any size.
      copy_s_per_byte: Seconds per byte.
      encrypt_s_per_byte: Additional seconds per byte if encrypted.
    """

    message_s: float
    copy_s_per_byte: float
    encrypt_s_per_byte: float


def measure_message_cpu_costs(*, rounds: int = 5, slowdown: float = 1.0) -> MessageCosts:
    """Measures processor seconds per message and per byte, plain and encrypted, at one end of a connection.

    A message costs the time of the communication threads. Its bytes cost the time of the whole process, since
    these threads copy them through the kernel and encrypt them; so nothing else may run in it.

    Args:
      rounds: Number of rounds of each kind.
      slowdown: Factor by which everything slows down because replicas take turns.

    Raises:
      RunLost: The sockets failed.
    """
    message_s, plain_s = _measure_pair(False, rounds)
    _, encrypted_s = _measure_pair(True, rounds)
    costs = (message_s, plain_s, max(0.0, encrypted_s - plain_s))
    return MessageCosts(*(float(f"{slowdown * seconds:.4g}") for seconds in costs))


def _measure_pair(encrypt: bool, rounds: int) -> tuple[float, float]:
    """Measures processor seconds at one end, of a message and of each byte."""
    store = dist.HashStore()

    def create_runtime(rank: int) -> WallRuntime:
        return WallRuntime(rank, 2, store, endpoint=Endpoint(encrypt=encrypt))

    with ThreadPoolExecutor(2) as pool:
        runtimes = list(pool.map(create_runtime, (0, 1)))
        try:
            small, large = (
                [
                    _measure_messages(runtimes, first + number, nbytes, count)
                    for number in range(WARM_UP + rounds)
                ][WARM_UP:]
                for first, nbytes, count in (
                    (0, SMALL_NBYTES, SMALL_COUNT),
                    (WARM_UP + rounds, LARGE_NBYTES, LARGE_COUNT),
                )
            )
        finally:
            list(pool.map(WallRuntime.close, runtimes))
    fixed_s, small_s = map(statistics.median, zip(*small, strict=True))
    _, large_s = map(statistics.median, zip(*large, strict=True))
    return fixed_s, max(0.0, large_s - small_s) / (LARGE_NBYTES - SMALL_NBYTES)


def _measure_messages(
    runtimes: Sequence[WallRuntime], exchange_number: int, nbytes: int, num_messages: int
) -> list[float]:
    """Returns processor seconds per message and end: of the communication threads, and of the process."""
    payload = Payload((torch.zeros(nbytes, dtype=torch.uint8),))

    async def run_replica(comm: Communicator) -> None:
        for hop in range(num_messages):
            tag = Tag(Purpose.MEASURE.build_exchange_id(exchange_number), 0, hop)
            if hop % 2 == comm.rank:
                await comm.send(payload, 1 - comm.rank, tag)
            else:
                await comm.recv(1 - comm.rank, tag)

    def read_cpu_s() -> tuple[float, float]:
        return sum(runtime.communication_cpu_s for runtime in runtimes), time.process_time()

    before = read_cpu_s()
    for task in [runtime.launch(run_replica(runtime.comm)) for runtime in runtimes]:
        task.wait()
    return [
        (after - baseline) / (2 * num_messages) for after, baseline in zip(read_cpu_s(), before, strict=True)
    ]
