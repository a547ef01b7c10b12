"""What latency costs delayed updates, and how devices add up by delayed gradient averaging."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from benchmarks.common import Measured, Simulated, coding_of
from benchmarks.common.shaped import paced_step_s
from benchmarks.common.worlds import replicas_in
from benchmarks.delayed.model import delayed_s, fedavg_s, scalability, synchronous_s
from farflung.calibration import count_forward_flops
from farflung.comm import predict_cost_s
from farflung.config import Training
from farflung.devices import DeviceProfile, find_device
from farflung.loop import Replica
from farflung.network import Link, NetworkProfile, find_network
from farflung.seeding import create_generator
from farflung.sim import VirtualWorld
from farflung.workloads import create_workload

__all__ = [
    "HIDDEN",
    "IN_REGIONS",
    "LATENCIES_MS",
    "NBYTES",
    "NODES",
    "REGIONS",
    "SCALE",
    "STEP_S",
    "TASKS",
    "in_regions",
    "latencies",
    "scalability_row",
    "speed_up_row",
    "speed_ups",
]

# --- scalability against latency ---------------------------------------------------------------------------------

LATENCIES_MS = (0, 1, 5, 10, 50, 100, 500, 1000)
STEP_S, NBYTES = 0.3, round(97.5 * 2**20)
SCALE = 1000
"""Bytes and bandwidth are divided by it, so that times stay as they are."""
BANDWIDTH_BPS, DEVICE = 25e9, "v100"
COLLECTIVE = "multi_parameter_server"
"""In two delays; direct would carry what is left of the gradient after scaling in one."""
METHODS = {
    "SSGD": {"collective": COLLECTIVE, "schedule": "synchronous"},
    "FedAvg": {"collective": COLLECTIVE, "schedule": "delayed(delay=0, period=20)"},
    "DTS": {"collective": COLLECTIVE, "schedule": "delayed(delay=20, period=4)"},
}


def scalability_row(latency_ms: int) -> str:
    """Its name in ``expected.toml``."""
    return f"scalability at {latency_ms} ms over that at 0 ms"


def latencies(quick: bool) -> Mapping[str, Measured]:
    """Scalability at each latency over that at none, of whole runs with what is under way at their end."""
    steps = 10 if quick else 1000
    counts = {name: steps if name == "DTS" else min(steps, 40) for name in METHODS}
    found: dict[str, dict[int, float]] = {name: {} for name in METHODS}
    uncoded: dict[str, dict[int, float]] = {name: {} for name in METHODS}
    for latency_ms in LATENCIES_MS[:1] if quick else LATENCIES_MS:
        network = NetworkProfile.create_uniform(Link(latency_ms / 1e3, BANDWIDTH_BPS / SCALE), 4)
        for name, parts in METHODS.items():
            for scores, coding in ((found, coding_of(DEVICE, reduced=SCALE)), (uncoded, None)):
                run = Simulated(parts, network, STEP_S, NBYTES // SCALE, coding)
                scores[name][latency_ms] = scalability(STEP_S, run.run(counts[name]) / counts[name])
    config = {
        "nodes": 4,
        "step_s": STEP_S,
        "gradient_bytes": NBYTES,
        "bandwidth_bps": BANDWIDTH_BPS,
        "steps": steps,
        "methods": METHODS,
        "device": DEVICE,
        "scalability": found,
        "scalability_without_coding": uncoded,
        "predicted_s": {latency_ms: _predicted(latency_ms / 1e3) for latency_ms in found["DTS"]},
        "reduced": f"bytes and bandwidth divided by {SCALE}, coding as of all bytes; 40 steps of SSGD and FedAvg",
    }
    rows = {}
    for latency_ms, ours in found["DTS"].items():
        ratio = ours / found["DTS"][0]
        rows[scalability_row(latency_ms)] = Measured(ratio, (ratio, ratio), config, simulated=True)
    return rows


def _predicted(latency_s: float) -> dict[str, float]:
    busy = predict_cost_s(NetworkProfile.create_uniform(Link(0.0, BANDWIDTH_BPS), 4), COLLECTIVE, NBYTES)
    return {
        "SSGD": synchronous_s(STEP_S, 2 * latency_s, busy),
        "FedAvg": fedavg_s(STEP_S, 2 * latency_s, busy, period=20),
        "DTS": delayed_s(STEP_S, 2 * latency_s, busy, delay=20, period=4),
    }


# --- four regions with real processes -----------------------------------------------------------------------------

REGIONS, REGIONS_WORKLOAD, REGIONS_BATCH = "four-regions", "fashion-mnist/mlp", 16
HIDDEN = {"schedule": "delayed(delay=20, period=8)", "codec": "error_feedback(topk(density=0.01))"}
"""A delay that covers the latency, and a period and a codec that make up for the bandwidth."""
IN_REGIONS = {
    "four regions, real processes, ratios kept (97.5 MiB gradient, 0.3 s step)": (HIDDEN, 24, 120),
    "four regions, synchronous SGD for comparison": ({"schedule": "synchronous"}, 1, 4),
}
"""Parts of the recipe, steps before those that count, and steps that count."""


def in_regions(quick: bool) -> Mapping[str, Measured]:
    """A step of one node over that of four in the lab; bandwidths are as much smaller as the gradient is."""
    model = create_workload(REGIONS_WORKLOAD).build_model(create_generator(0, "model"))
    smaller = sum(p.nbytes for p in model.parameters()) / NBYTES
    network = find_network(REGIONS)
    if not quick:
        network = network.scale(bandwidth=smaller, reason=f"of a gradient {1 / smaller:.0f} times smaller")
    rows = {}
    for name, (parts, warm_up, steps) in list(IN_REGIONS.items())[: 1 if quick else None]:
        found = paced_step_s(
            network,
            4,
            REGIONS_WORKLOAD,
            *("--recipe", "synchronous", "--deadline", "600"),
            *(text for part, value in parts.items() for text in (f"--{part}", value)),
            batch=REGIONS_BATCH,
            forward_s=STEP_S / 3 / REGIONS_BATCH,
            warm_up=2 if quick else warm_up,
            steps=8 if quick else steps,
        )
        ratio = scalability(STEP_S, found)
        config = {
            "workload": REGIONS_WORKLOAD,
            "network": REGIONS,
            "bandwidths_divided_by": 1 / smaller,
            "step_s": STEP_S,
            "found_step_s": found,
            "steps": steps,
            "parts": parts,
        }
        rows[name] = Measured(ratio, (ratio, ratio), config)
    return rows


# --- delayed gradient averaging on slow devices -------------------------------------------------------------------


@dataclass(frozen=True)
class Task:
    """What stands for one of the source's two tasks.

    Args:
      workload: its name.
      exchange_steps: how many steps an exchange takes: what the published speed-ups of FedAvg with K = 5 and K = 10
        amount to.
      learning_rate: of SGD with momentum 0.9.
    """

    workload: str
    exchange_steps: float
    learning_rate: float


TASKS = {
    "vision": Task("cifar10/resnet8", 11.0, 0.02),
    "language": Task("tinyshakespeare/lstm", 9.0, 0.5),
}
NODES, DGA_BATCH, DGA_STEPS = (1, 2, 4, 8), 8, 200
DGA_DEVICE = "raspberry-pi-4"
AVERAGED = {
    "FedAvg K=5": {"collective": "ring", "schedule": "delayed(delay=0, period=5)"},
    "FedAvg K=10": {"collective": "ring", "schedule": "delayed(delay=0, period=10)"},
    "DGA K=5 D=20": {"collective": "ring", "schedule": "delayed(delay=20, period=5)"},
}
OURS = "DGA K=5 D=20"


def speed_up_row(nodes: int, task: str) -> str:
    """Its name in ``expected.toml``."""
    return f"DGA K=5 D=20, {nodes} nodes, {task}"


def speed_ups(task: str, quick: bool) -> Mapping[str, Measured]:
    """Throughput of several nodes over that of one, with links on which FedAvg takes as long as published."""
    steps, exchange = 5 if quick else DGA_STEPS, TASKS[task].exchange_steps
    rows = {}
    scores: dict[int, dict[str, float]] = {}
    for nodes in NODES[:2] if quick else NODES:
        gains, scores[nodes] = {}, {}
        for name, parts in AVERAGED.items():
            seconds, scores[nodes][name] = _averaged(TASKS[task], parts, nodes, steps, scored=not quick)
            gains[name] = nodes * steps / seconds
        config = {
            "workload": TASKS[task].workload,
            "device": DGA_DEVICE,
            "nodes": nodes,
            "batch": DGA_BATCH,
            "exchange_in_steps": exchange,
            "steps": steps,
            "seeds": [0],
            "times_one_node": gains,
            "test_score": dict(scores),
            "predicted": {
                "FedAvg K=5": nodes / fedavg_s(1.0, exchange - 1, 1.0, period=5),
                "FedAvg K=10": nodes / fedavg_s(1.0, exchange - 1, 1.0, period=10),
                OURS: nodes / delayed_s(1.0, exchange - 1, 1.0, delay=20, period=5),
            },
        }
        if nodes > 1:
            rows[speed_up_row(nodes, task)] = Measured(
                gains[OURS], (gains[OURS], gains[OURS]), config, simulated=True
            )
    return rows


def _averaged(
    task: Task, parts: Mapping[str, str], nodes: int, steps: int, *, scored: bool
) -> tuple[float, float]:
    """Seconds of a training whose steps take one each, with what is under way at its end; and its test score.

    Coding takes the share of a step that it takes on the device.
    """
    torch.set_num_threads(1)
    work = create_workload(task.workload)
    nbytes = sum(p.nbytes for p in work.build_model(create_generator(0, "model")).parameters())
    network = None if nodes == 1 else _taking(task.exchange_steps, nodes, nbytes)
    pi = find_device(DGA_DEVICE, forward_flops=count_forward_flops(work))
    device = DeviceProfile(
        forward_s=1 / (3 * DGA_BATCH),
        coding=coding_of(DGA_DEVICE, times=1 / (3 * DGA_BATCH * pi.forward_s)),
        cores=pi.cores,
    )
    world = VirtualWorld(nodes, device=device, network=network)
    training = Training(steps=steps, batch_size=DGA_BATCH, learning_rate=task.learning_rate, momentum=0.9)

    async def train(replica: Replica) -> tuple[float, float]:
        for _ in range(steps):
            await replica.step()
        await replica.flush()
        seconds = replica.runtime.read_clock()
        return seconds, (await replica.evaluate()).metric if scored else 0.0

    found = world.run([train(replica) for replica in replicas_in(world, work, training, parts)])
    return max(seconds for seconds, _ in found), found[0][1]


def _taking(exchange_s: float, nodes: int, nbytes: int) -> NetworkProfile:
    """Links on which an exchange takes so long: one second for bytes, the rest latency."""

    def cost(latency_s: float, bandwidth_bps: float) -> float:
        return predict_cost_s(
            NetworkProfile.create_uniform(Link(latency_s, bandwidth_bps), nodes), "ring", nbytes
        )

    bandwidth = 1e6 * cost(0.0, 1e6)
    latency = (exchange_s - 1) / (cost(1.0, bandwidth) - 1)
    return NetworkProfile.create_uniform(Link(latency, bandwidth), nodes)
