"""The case of coded training: gradient descent among devices of which one is lost and one joins."""

from __future__ import annotations

import hashlib
from typing import Any

import torch

from farflung.coded.coordinator import Coordinator
from farflung.coded.linear_model import Logistic, Problem
from farflung.coded.solvers import GD, solve
from farflung.faults import FaultPlan
from tests.coded_runs import Run, part

__all__ = ["outcome"]

PARTITIONS, DEVICES, ITERATIONS = 4, 6, 30


def outcome() -> dict[str, Any]:
    """Bits of the weights, bytes by kind and the virtual time at the end.

    The device of rank 2 crashes after some iterations, and another joins later, so blocks are repaired and decoded.
    """
    labels = torch.cat([part(number)[1] for number in range(PARTITIONS)])
    weights: list[torch.Tensor] = []

    async def train(coordinator: Coordinator) -> float:
        coordinator.activate_partitions()
        problem = Problem(coordinator, Logistic(), labels[:, None])
        state = await solve(GD(learning_rate=0.01, tol=1e-15), problem, max_iterations=ITERATIONS)
        weights.append(state.weights)
        return state.objective

    faults = FaultPlan().crash(2, at_s=0.6).join(DEVICES + 1, at_s=1.2)
    run = Run(PARTITIONS, DEVICES, later=(None,), faults=faults, settings={"seed": 3})
    seen = run(train)
    (found,) = weights
    return {
        "bits": {
            "parameters": hashlib.sha256(found.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest(),
            "objective": repr(seen.found),
        },
        "virtual": {
            "bytes": {kind: seen.total(kind) for kind in sorted(seen.sent)},
            "times": [seen.ended_s],
        },
    }
