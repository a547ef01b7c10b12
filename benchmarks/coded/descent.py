"""All bytes of gradient descent on a9a, to a stated objective, under either code."""

from __future__ import annotations

from collections import Counter
from collections.abc import Coroutine, Mapping
from typing import Any, TypeVar

import torch

from benchmarks.coded.world import parts_of, run
from benchmarks.common import Measured
from farflung.coded import GD, LBFGS, InMemoryProducts, Logistic, Problem, solve
from farflung.coded.coordinator import Coordinator, Settings
from farflung.data import a9a
from farflung.tasks import Pending, Task
from farflung.types import Runtime

__all__ = ["total_bytes"]

DEVICES, PARTITIONS = 20, 16
WITHIN = 0.01
"""The target: the objective at most so much above the optimum, relative to it."""
MOST = 5_000
QUICK_ITERATIONS = 2
PARTS = ("encoding", "operands", "answers")
T = TypeVar("T")


def total_bytes(quick: bool) -> Mapping[str, Measured]:
    """RLNC over MDS; both take the same steps, as their products are exact."""
    torch.set_num_threads(1)
    train, _ = a9a.load()
    features, targets = train.inputs.to(torch.float64), train.targets.to(torch.float64)
    held = Problem(InMemoryProducts(features), Logistic(), targets[:, None])
    optimum = _now(solve(LBFGS(), held, max_iterations=1000)).objective
    rate = _now(GD().init(held)).learning_rate
    goal = (1 + WITHIN) * optimum
    iterations = QUICK_ITERATIONS if quick else _now(_until(held, rate, goal))
    parts = parts_of(features, targets, PARTITIONS)
    sent, objectives = {}, {}
    for code in ("rlnc", "mds"):
        settings = Settings(
            partitions=PARTITIONS, devices=DEVICES, code=code, redundancy=0, pieces=1, min_timeout_s=60.0
        )

        async def descend(coordinator: Coordinator, runtime: Runtime) -> float:
            del runtime
            problem = Problem(coordinator, Logistic(), targets[:, None])
            state = await solve(GD(learning_rate=rate, tol=1e-15), problem, max_iterations=iterations)
            return state.objective

        ran = run(parts, settings, descend)
        sent[code], objectives[code] = Counter(ran.sent), ran.found
    totals = {code: sum(bytes_[kind] for kind in PARTS) for code, bytes_ in sent.items()}
    ratio = totals["rlnc"] / totals["mds"]
    encoding = {code: bytes_["encoding"] for code, bytes_ in sent.items()}
    each = (totals["mds"] - encoding["mds"]) / (iterations + 1)
    config: dict[str, Any] = {
        "devices": DEVICES,
        "partitions": PARTITIONS,
        "target": f"objective at most {WITHIN:.0%} above the optimum",
        "optimum": optimum,
        "objectives": objectives,
        "iterations": iterations,
        "learning_rate": rate,
        "nbytes": {
            code: {kind: bytes_[kind] for kind in (*PARTS, "members")} for code, bytes_ in sent.items()
        },
        "ratio_by_part": {kind: sent["rlnc"][kind] / sent["mds"][kind] for kind in PARTS},
        "ratio_by_iterations": {
            str(count): (encoding["rlnc"] + count * each) / (encoding["mds"] + count * each)
            for count in (0, 1, 10, 100, 1000)
        },
        "note": "all N devices are asked and answer in every round",
    }
    row = "total bytes, encoding and iterations to the target, over MDS, (20,16), gradient descent on a9a"
    reason = (
        "operands and answers of all iterations weigh most here; the source does not say over how many "
        "iterations its total counts"
    )
    return {row: Measured(ratio, (ratio, ratio), config, simulated=True, reason=reason)}


async def _until(problem: Problem, rate: float, goal: float) -> int:
    """How many iterations reach a goal."""
    solver = GD(learning_rate=rate, tol=1e-15)
    state = await solver.init(problem)
    while state.objective > goal:
        if state.iterations == MOST:
            raise RuntimeError(f"gradient descent is at {state.objective} after {MOST} iterations")
        state = await solver.step(problem, state)
    return state.iterations


def _now(steps: Coroutine[Pending[Any], None, T]) -> T:
    """Of products that are there at once."""
    return Task(steps, lambda step: step(), eager_start=True).result()
