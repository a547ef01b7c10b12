"""One simulation in a process of its own: prints its seconds and its memory as JSON.

python -m benchmarks.simulator.worker mlp REPLICAS STEPS
python -m benchmarks.simulator.worker resnet8 REPLICAS STEPS
"""

from __future__ import annotations

import json
import os
import resource
import sys
import time
from typing import Any

import torch
import torch._dynamo  # what the first optimizer would import

from benchmarks.simulator.workload import MLP, SAMPLES_EACH
from farflung.config import Training
from farflung.devices import DeviceProfile
from farflung.loop import Replica, share_parameters
from farflung.network import Link
from farflung.recipes import Recipe
from farflung.runs import make_replica
from farflung.sim import VirtualWorld
from farflung.types import Workload
from farflung.workloads import create_workload

__all__ = ["simulate"]

LINK = Link(0.01, 1e8)
DEVICE = DeviceProfile(forward_s=1e-4)


def simulate(work: Workload, replicas: int, steps: int, *, own_samples: bool) -> dict[str, Any]:
    """Trains replicas with a parameter server over links that are alike; no evaluation."""
    world = VirtualWorld(replicas, LINK, device=DEVICE)
    training = Training.resolve(work.defaults, {"steps": steps, "seed": 0})
    shares = None
    if own_samples:
        shares = [torch.arange(SAMPLES_EACH) + SAMPLES_EACH * rank for rank in range(replicas)]
    made = [
        make_replica(runtime, work, Recipe(collective="parameter_server"), training, shares=shares)
        for runtime in world.runtimes
    ]

    share_parameters(made)

    async def steps_of(replica: Replica) -> None:
        for _ in range(steps):
            await replica.step()

    world.run([steps_of(replica) for replica in made])
    first = list(made[0].model.parameters())
    for other in made[1:]:
        assert all(torch.equal(a, b) for a, b in zip(first, other.model.parameters(), strict=True))
    return {"virtual_s": world.clock.time(), "parameters": sum(p.numel() for p in first)}


def run(what: str, count: int, steps: int) -> dict[str, Any]:
    """One simulation, by name."""
    if what == "mlp":
        return simulate(MLP(count), count, steps, own_samples=True)
    return simulate(create_workload("cifar10/resnet8"), count, steps, own_samples=False)


def measured(what: str, count: int, steps: int) -> dict[str, Any]:
    """The same with what it has cost this process."""
    wall, processor = time.perf_counter(), time.process_time()
    found = run(what, count, steps)
    return {
        "seconds": time.perf_counter() - wall,
        "processor_s": time.process_time() - processor,
        "gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,
        "load_average": os.getloadavg()[0],
        **found,
    }


if __name__ == "__main__":
    # Small products gain nothing from a second thread; convolutions do.
    torch.set_num_threads(2 if sys.argv[1] == "resnet8" else 1)
    print(json.dumps(measured(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))))
