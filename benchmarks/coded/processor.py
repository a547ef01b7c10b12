"""Processor time of the coordinator: one decode, and an iteration on covtype, whose devices are other processes."""

from __future__ import annotations

import functools
import multiprocessing
import statistics
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from benchmarks.coded.models import samples
from benchmarks.coded.world import Part, noise, parts_of
from benchmarks.common import Measured
from farflung.coded import CODES, GD, Code, Decoder, Logistic, Problem
from farflung.coded.blocks import BlockStore
from farflung.coded.codes import get_plan
from farflung.coded.coordinator import Coordinator, Settings
from farflung.coded.meeting import Address, run_device, start_coordinator
from farflung.spec import build

__all__ = ["decode", "iteration"]

DECODED = (50, 40)
"""N and K."""
DECODED_ROWS = 1_000
"""Of a partition."""
DRAWS = 200
DEVICES, PARTITIONS = 12, 8
ITERATIONS = 40
QUICK_ROWS = 800
RATE = 1e-7
DECODE_ROW = "processor time of a decode, K=40"
ITERATION_ROW = "processor time of the coordinator per iteration, covtype, N=12"


def decode_times(code: Code, draws: int) -> list[float]:
    """Milliseconds from the first answer to all partitions, in random order, by a decoder that has no plans yet."""
    devices, partitions = DECODED
    random = np.random.default_rng(0)
    coded = [code.draw_row(index, partitions, 0) for index in range(devices - partitions)]
    rows = torch.cat([torch.eye(partitions, dtype=torch.float64), torch.stack(coded)])
    answers = (rows @ torch.from_numpy(random.standard_normal((partitions, DECODED_ROWS))))[:, :, None]
    found = []
    for _ in range(draws):
        order = random.permutation(devices).tolist()
        get_plan.cache_clear()
        begin = time.process_time()
        decoder = Decoder[int](partitions)
        for device in order:
            decoder.add(device, rows[device])
            if (plan := decoder.find_plan()) is not None:
                plan.apply({device: answers[device] for device in plan.indices})
                break
        found.append(1e3 * (time.process_time() - begin))
    return found


def decode(quick: bool) -> Mapping[str, Measured]:
    """The median over orders of answers, and its quartiles."""
    torch.set_num_threads(1)
    draws = 5 if quick else DRAWS
    found: dict[str, list[float]] = {
        name: decode_times(build("code", name, CODES), draws) for name in ("rlnc", "mds")
    }
    low, middle, high = statistics.quantiles(found["rlnc"], n=4)
    devices, partitions = DECODED
    config: dict[str, Any] = {
        "devices": devices,
        "partitions": partitions,
        "rows_of_a_partition": DECODED_ROWS,
        "outputs": 1,
        "draws": draws,
        "median_ms": {name: statistics.median(times) for name, times in found.items()},
        "most_ms": {name: max(times) for name, times in found.items()},
    }
    return {DECODE_ROW: Measured(middle, (low, high), config)}


@functools.cache
def _parts(quick: bool) -> list[Part]:
    if quick:
        return noise(QUICK_ROWS, 54, PARTITIONS)
    rows, targets = samples("covtype", quick)
    return parts_of(torch.from_numpy(rows), torch.from_numpy(targets), PARTITIONS)


def _attend(address: Address, place: int, quick: bool) -> None:
    """What the process of a device runs."""
    torch.set_num_threads(1)
    holding = BlockStore()
    if place < PARTITIONS:
        features, labels = _parts(quick)[place]
        holding = BlockStore(f"part {place}", features.clone(), labels.clone())
        _parts.cache_clear()
    run_device(address, holding, patience_s=120.0, connect_timeout_s=60.0)


def iteration_times(settings: Settings, iterations: int, quick: bool) -> tuple[list[float], list[float]]:
    """Milliseconds of iterations, and of both products alone."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    with start_coordinator(Address("127.0.0.1", 0), "run", connect_timeout_s=60.0) as (runtime, at):
        devices = [
            context.Process(target=_attend, args=(at, place, quick), daemon=True) for place in range(DEVICES)
        ]
        for device in devices:
            device.start()

        async def coordinate() -> tuple[list[float], list[float]]:
            coordinator = Coordinator(runtime, settings)
            await coordinator.gather()
            labels = torch.cat([one.labels for one in coordinator.activate_partitions()])
            problem = Problem(coordinator, Logistic(), labels[:, None])
            solver = GD(learning_rate=RATE, tol=1e-300)
            state = await solver.init(problem)
            whole, products = [], []
            for _ in range(iterations):
                begin = time.process_time()
                state = await solver.step(problem, state)
                whole.append(1e3 * (time.process_time() - begin))
                begin = time.process_time()
                await coordinator.multiply_transposed(await coordinator.multiply(state.weights[:-1]))
                products.append(1e3 * (time.process_time() - begin))
            await coordinator.end()
            return whole, products

        try:
            found: tuple[list[float], list[float]] = runtime.drive(coordinate())
            for device in devices:
                device.join(60.0)
        finally:
            for device in devices:
                device.kill()
    return found


def iteration(quick: bool) -> Mapping[str, Measured]:
    """Of gradient descent at the default settings: loss and both products, all threads counted; others beside."""
    torch.set_num_threads(1)
    iterations = 2 if quick else ITERATIONS
    default = Settings(partitions=PARTITIONS, devices=DEVICES, redundancy=0, min_timeout_s=60.0)
    tried = {
        f"{one.transposed}, {one.pieces} pieces": one
        for one in (default, replace(default, pieces=1), replace(default, transposed="repair", pieces=1))
    }
    found = {name: iteration_times(one, iterations, quick) for name, one in tried.items()}
    low, middle, high = statistics.quantiles(next(iter(found.values()))[0], n=4)
    config: dict[str, Any] = {
        "data": "noise" if quick else "covtype, class 2 against the rest",
        "samples": sum(len(labels) for _, labels in _parts(quick)),
        "devices": DEVICES,
        "partitions": PARTITIONS,
        "code": default.code,
        "iterations": iterations,
        "network": "loopback, one process for each device, on the same cores",
        "iteration_ms": {name: statistics.median(whole) for name, (whole, _) in found.items()},
        "both_products_ms": {name: statistics.median(products) for name, (_, products) in found.items()},
    }
    return {ITERATION_ROW: Measured(middle, (low, high), config)}
