"""Coded devices that join one by one: ``python -m benchmarks.coded.joins`` stores what each fetches and brings.

Virtual time; K devices with a partition each begin without coded blocks.
"""

from __future__ import annotations

import statistics
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.coded.answers import beyond
from benchmarks.coded.encoding import FEATURES_OF_K, ROWS_EACH, Transposed
from benchmarks.coded.pictures import draw_joins
from benchmarks.coded.world import noise
from benchmarks.common.kept import Kept
from farflung.coded.blocks import BlockStore
from farflung.coded.codes import compute_rank, compute_redundancy
from farflung.coded.coordinator import Coordinator, Settings
from farflung.coded.device import Device
from farflung.coded.registry import BlockRegistry
from farflung.coded.run import simulate
from farflung.faults import FaultPlan
from farflung.network import Link
from farflung.sim import VirtualRuntime, VirtualWorld

__all__ = ["joined", "main", "measure"]

FOLDER = Path(__file__).parent
PICTURE = FOLDER.parents[1] / "docs" / "coded_joins.svg"
PARTITIONS, JOINS = 16, 8
SEEDS, ORDERS = range(5), 1_000
EVERY_S = 0.2
"""Long enough for a block to be made."""
LINK = Link(latency_s=0.001, bandwidth_bps=1e9)
KINDS: dict[str, Transposed] = {"rows": "repair", "rows and columns": "columns"}


def joined(
    code: str, transposed: Transposed, seed: int, partitions: int = PARTITIONS, joins: int = JOINS
) -> tuple[list[int], list[Tensor]]:
    """A run with joins.

    Args:
      code: as text.
      transposed: how the product with residuals is had; by ``repair`` blocks of rows are all that is made.
      seed: of the code.
      partitions: K.
      joins: of devices without data.

    Returns:
      Payload bytes of kind ``encoding`` that each of those devices was sent, and the rows of all blocks before the
      first join and after each, (blocks, K) float64.
    """
    plan = FaultPlan()
    for place in range(joins):
        plan = plan.join(1 + partitions + place, at_s=(1 + place) * EVERY_S)
    world = VirtualWorld(1 + partitions + joins, LINK, needs_all_members=False, faults=plan)
    settings = Settings(
        partitions=partitions,
        devices=partitions,
        code=code,
        seed=seed,
        redundancy=0,
        pieces=1,
        transposed=transposed,
        min_timeout_s=60.0,
    )
    parts = noise(ROWS_EACH * partitions, FEATURES_OF_K * partitions, partitions)
    seen: list[Tensor] = []

    async def join_all(coordinator: Coordinator) -> None:
        coordinator.activate_partitions()
        operand = torch.ones(coordinator.features, 1, dtype=torch.float64)
        for place in range(1, joins + 2):
            while coordinator.elapsed_s < (place - 0.1) * EVERY_S:
                await coordinator.multiply(operand)
            seen.append(_rows(coordinator.registry))

    def attend(runtime: VirtualRuntime) -> Device:
        place = runtime.comm.rank - 1
        return Device(
            runtime, BlockStore(f"part {place}", *parts[place]) if place < partitions else BlockStore()
        )

    simulate(world, settings, attend, join_all)
    sent = [runtime.comm.sent_bytes.to_json().get("encoding") for runtime in world.runtimes]
    by_device = [sum(to[1 + partitions + place] for to in sent if to) for place in range(joins)]
    return by_device, seen


def _rows(registry: BlockRegistry) -> Tensor:
    """Coefficients of the blocks of rows that are made."""
    unknowns = registry.list_unknowns("rows")
    return torch.tensor(
        [
            [block.coefficients.get(one, 0.0) for one in unknowns]
            for block in registry.list_ready_blocks("rows")
        ],
        dtype=torch.float64,
    )


def measure(code: str, transposed: Transposed) -> list[dict[str, Any]]:
    """After each join, means over seeds of the code."""
    partition = 8 * ROWS_EACH * FEATURES_OF_K * PARTITIONS
    runs = [joined(code, transposed, seed) for seed in SEEDS]
    found = []
    for place in range(JOINS):
        extras: list[int] = []
        for seed, (_, seen) in zip(SEEDS, runs, strict=True):
            rows, orders = seen[place + 1], np.random.default_rng(seed)
            counts = [beyond(rows, orders) for _ in range(ORDERS)]
            extras += [place + 1 if extra is None else extra for extra in counts]
        nbytes = [by_device[place] for by_device, _ in runs]
        after = [seen[place + 1] for _, seen in runs]
        found.append(
            {
                "nbytes_fetched": nbytes,
                "partitions_fetched": statistics.fmean(nbytes) / partition,
                "coded_blocks": [len(rows) - PARTITIONS for rows in after],
                "rank": [compute_rank(rows) for rows in after],
                "rank_of_coded_blocks": [compute_rank(rows[PARTITIONS:]) for rows in after],
                "may_vanish_in_the_worst_case": [compute_redundancy(rows, max_losses=3) for rows in after],
                "extra_answers": statistics.fmean(extras),
            }
        )
    return found


def _line(code: str, transposed: Transposed) -> dict[str, Any]:
    return {"joins": measure(code, transposed)}


def main() -> None:
    """Measures what is not stored, and draws all."""
    torch.set_num_threads(1)
    kept = Kept(FOLDER, "joins")
    lines = [
        kept.once(
            {
                "code": code,
                "kinds": kinds,
                "transposed": transposed,
                "partitions": PARTITIONS,
                "rows_of_a_partition": ROWS_EACH,
                "features": FEATURES_OF_K * PARTITIONS,
                "seeds": list(SEEDS),
                "orders_of_a_seed": ORDERS,
            },
            partial(_line, code, transposed),
        )
        for code in ("rlnc", "mds")
        for kinds, transposed in KINDS.items()
    ]
    draw_joins(PICTURE, lines)


if __name__ == "__main__":
    main()
