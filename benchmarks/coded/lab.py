"""Iterations under stragglers with real processes on this machine, each of which keeps the pace of a phone."""

from __future__ import annotations

import multiprocessing
import statistics
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from benchmarks.coded.rounds import (
    DEVICE,
    DEVICES,
    FEATURES,
    PIECES,
    ROWS,
    UNCODED,
    Coded,
    both_products,
    faster,
    summary,
)
from benchmarks.coded.world import noise
from benchmarks.common import Measured
from farflung.coded.blocks import BlockStore
from farflung.coded.coordinator import Coordinator
from farflung.coded.meeting import Address, run_device, start_coordinator
from farflung.devices import DeviceProfile

__all__ = ["in_pieces"]

RLNC = Coded("rlnc", 8)
ITERATIONS = 15
SEEDS = range(3)
FASTER = 2
"""Devices than in virtual time, so that it takes minutes."""


def _attend(address: Address, place: int, partitions: int, pace: DeviceProfile, seed: int) -> None:
    """What the process of a device runs."""
    torch.set_num_threads(1)
    parts = noise(ROWS, FEATURES, partitions)
    holding = BlockStore(f"part {place}", *parts[place]) if place < partitions else BlockStore()
    run_device(address, holding, patience_s=120.0, connect_timeout_s=60.0, pace=pace, seed=seed)


def times(one: Coded, pieces: int, iterations: int, pace: DeviceProfile, seed: int) -> list[float]:
    """Seconds of each iteration."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    with start_coordinator(Address("127.0.0.1", 0), "run", connect_timeout_s=60.0) as (runtime, at):
        devices = [
            context.Process(target=_attend, args=(at, place, one.partitions, pace, seed), daemon=True)
            for place in range(DEVICES)
        ]
        for device in devices:
            device.start()

        async def coordinate() -> list[float]:
            coordinator = Coordinator(runtime, one.settings(pieces))
            await coordinator.gather()
            coordinator.activate_partitions()
            seconds = await both_products(iterations)(coordinator, runtime)
            await coordinator.end()
            return seconds

        try:
            found: list[float] = runtime.drive(coordinate())
            for device in devices:
                device.join(60.0)
        finally:
            for device in devices:
                device.kill()
    return found


def in_pieces(quick: bool) -> Mapping[str, Measured]:
    """The codes take turns; the ratio of a seed is that of mean iteration times."""
    pace = replace(DEVICE, forward_s=DEVICE.forward_s / (8 if quick else FASTER))
    iterations, seeds = (2, SEEDS[:2]) if quick else (ITERATIONS, SEEDS)
    slow, fast = [], []
    for seed in seeds:
        slow.append(times(UNCODED, 1, iterations, pace, seed))
        fast.append(times(RLNC, PIECES, iterations, pace, seed))
    ratios = faster(slow, fast)
    config: dict[str, Any] = {
        "devices": DEVICES,
        "pieces": PIECES,
        "partitions": {"rlnc": RLNC.partitions, "uncoded": UNCODED.partitions},
        "seconds_for_all_data": pace.forward_s * ROWS,
        "iterations_of_a_seed": iterations,
        "network": "loopback, one process for each device",
        "iteration": {"uncoded, whole": summary(slow), "rlnc": summary(fast)},
        "times_faster_by_seed": ratios,
    }
    middle = statistics.median(ratios)
    return {
        "the same in pieces with real processes in the lab": Measured(middle, (ratios[0], ratios[-1]), config)
    }
