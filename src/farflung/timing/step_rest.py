"""What a replica does in a step beside its passes: drawing samples, making them ready, keeping count."""

from __future__ import annotations

import statistics
from collections.abc import Callable

from farflung.config import Training
from farflung.data import InMemory
from farflung.reducers import CodecReducer
from farflung.replica import Parts, Replica
from farflung.runtime import WallRuntime
from farflung.sampling import Uniform
from farflung.schedules import Synchronous
from farflung.seeding import derive
from farflung.telemetry import Telemetry
from farflung.types import Workload

__all__ = ["whole_steps_s"]


def whole_steps_s(
    work: Workload, training: Training, *, warm_up: int, rounds: int, clock: Callable[[], float]
) -> float:
    """The median of whole steps of a replica that trains alone, in seconds; its exchanges go to nobody.

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
