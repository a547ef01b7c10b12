"""How much sooner the chosen rule is there on slow links: steps to the target, times simulated seconds of a step."""

from __future__ import annotations

from dataclasses import replace

from benchmarks.common import Measured
from benchmarks.common.worlds import replicas_in
from benchmarks.sampling.gains import Gains
from benchmarks.sampling.regimes import Regime
from benchmarks.sampling.training import BATCH, DEVICE, LATENCY_S, MBPS, REPLICAS, Sampled, slow
from farflung.config import Training
from farflung.data import PARTITIONS
from farflung.loop import Replica
from farflung.runs.simulation import limit_to_one_thread
from farflung.workloads import create_workload

__all__ = ["TIME_ROW", "sooner", "step_s"]

TIME_ROW = "covtype, class 4, time to average precision at 10 Mbit/s, chosen rule over uniform"
WARM_UP, STEPS = 2, 8


def step_s(training: Sampled, mbps: float) -> float:
    """Seconds of virtual time of a step; computing, scoring and the exchange are charged."""
    task = create_workload(training.workload)
    world, ends = slow(task, mbps), list[float]()

    async def go(replica: Replica) -> None:
        for _ in range(WARM_UP + STEPS):
            await replica.step()
            if replica.runtime.comm.rank == 0:
                ends.append(world.clock.time())

    settings = Training(
        steps=WARM_UP + STEPS, batch_size=BATCH, learning_rate=training.learning_rate, optimizer="adam"
    )
    shares = PARTITIONS["iid"]().split(task.load_datasets()[0], REPLICAS, seed=training.seed)
    with limit_to_one_thread():
        world.run(
            [
                go(one)
                for one in replicas_in(world, task, settings, {"sampler": training.sampler}, shares=shares)
            ]
        )
    return (ends[-1] - ends[WARM_UP - 1]) / STEPS


def sooner(regime: Regime, found: Gains) -> Measured:
    """The time of uniform sampling to the regime's target over that of the chosen rule."""
    seconds = {
        f"{mbps:g} Mbit/s": {
            one: step_s(regime.training(one, regime.rates[0], 0), mbps) for one in ("uniform", found.chosen)
        }
        for mbps in MBPS
    }
    slower = {at: both[found.chosen] / both["uniform"] for at, both in seconds.items()}
    factor, spread = found.factors[found.chosen], found.spreads[found.chosen]
    config = {
        **found.config,
        "chosen": found.chosen,
        "device": DEVICE,
        "latency_s": LATENCY_S,
        "seconds_of_a_step": seconds,
        "times_sooner": {at: None if factor is None else factor / each for at, each in slower.items()},
    }
    if factor is None or spread is None:
        return replace(found.measured(found.chosen), config=config, simulated=True)
    own = slower[f"{MBPS[0]:g} Mbit/s"]
    return Measured(factor / own, (spread[0] / own, spread[1] / own), config, simulated=True)
