"""What injection sends, counted and reckoned."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from benchmarks.common.worlds import replicas_in
from benchmarks.scadles.limits import BASE, LEAST, MOST, weighted
from farflung.config import Training
from farflung.data import Injection
from farflung.loop import Replica
from farflung.seeding import derive_seed
from farflung.sim import VirtualWorld
from farflung.streams.rates import build_courses
from farflung.workloads import create_workload

__all__ = ["bytes_sent"]

STEPS = 50
CIFAR_KB = 3.073
"""Of a picture of CIFAR-10 and its label, as stored."""


def bytes_sent(law: str, replicas: int, alpha: float, beta: float) -> dict[str, Any]:
    """Of some steps with batches by rate.

    Returns:
      ``sent``: what all replicas have sent beside their gradients; ``copies``: rows of each sender times receivers;
      ``cifar_kb``: of a step, for pictures of CIFAR-10, a copy for each receiver and one for each sender.
    """
    torch.set_num_threads(1)
    task = create_workload("synthetic/quadratic")
    row = task.load_datasets()[0].get_rows(torch.tensor([0]))
    training = Training(steps=STEPS, batch_size=BASE, learning_rate=1e-6)
    found = build_courses(law, replicas, derive_seed(training.seed, "rates"))
    batches = [min(max(round(course.rates[0]), LEAST), MOST) for course in found]
    sharing = Injection(derive_seed(training.seed, "sharing"), alpha, beta)
    rows = sum(
        int(beta * batches[rank]) for step in range(STEPS) for rank in sharing.choose_senders(step, replicas)
    )

    async def train(replica: Replica) -> int:
        for _ in range(STEPS):
            await replica.step()
        return replica.sent_nbytes

    def sent(parts: Mapping[str, str]) -> int:
        world = VirtualWorld(replicas)
        made = replicas_in(world, task, training, {**weighted(law), **parts})
        return sum(world.run([train(one) for one in made]))

    beside = sent({"sharing": f"injection(alpha={alpha}, beta={beta})"}) - sent({})
    each = CIFAR_KB * rows / STEPS
    return {
        "sent": beside,
        "copies": rows * (replicas - 1) * (row.inputs.nbytes + row.targets.nbytes),
        "cifar_kb": [each * (replicas - 1), each],
    }
