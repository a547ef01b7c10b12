"""Peers beside three recipes of ours: time, bytes, processor time and memory to one accuracy, in the lab."""

from __future__ import annotations

import math
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.common import Benchmark, Group, Kept, Measured, main
from benchmarks.peers.paced import STEP_S
from benchmarks.peers.trained import (
    BATCH,
    JUDGES,
    LARGE_TASK,
    NODES,
    PILOT,
    RATES,
    TASK,
    TIMES,
    TRAININGS,
    Learned,
    Timed,
    Trained,
    lab,
    large_curve,
    learned,
    spent_in_lab,
    steps_to,
)
from benchmarks.peers.worker import (
    LARGE,
    LARGE_OURS,
    LONG,
    NO_EXCHANGE,
    OURS,
    POWERSGDS,
    SYNCHRONOUS,
    SYSTEMS,
)
from benchmarks.presets.courses import WITHIN
from benchmarks.presets.language import CORPUS

FOLDER = Path(__file__).parent
NETWORKS = ("wifi-10mbps", "wifi-100mbps", "four-regions", "lan-1g")
TIMED, TIMED_WHERE_SLOW = 200, 50
"""Steps that are timed: whole periods of every system; fewer, but on the LAN, of what is soon alike."""
ROUNDS = {"wifi-100mbps": 3, "lan-1g": 3}
"""How often all systems are timed one after another where processors limit them; once where the network does."""
COSTS = {"bytes to target": "sent", "processor time to target": "processor_s", "peak memory": "peak_mb"}
COSTS_ON = "wifi-100mbps"
"""The network whose lab run says what else a system takes, which hardly hangs on the network."""
FP16 = "DDP, fp16 hook"
WITH_FP16 = "best named composition over DDP with its fp16 hook, wifi-10mbps"
LAN = "lan-1g"
LAN_ROW = "best over the best peer, lan-1g"
APART = "powersgd rank 4, loss apart from PyTorch's powerSGD_hook of the same rank, 20newsgroups/gpt"
TINY = "benchmarks.peers.paced:Paced(layers=1, heads=1, width=8)"
LARGE_ROWS = {
    "wifi-10mbps": {
        "43 MB of gradients, best named composition over torchft DiLoCo, 10 Mbit/s": "torchft DiLoCo, 43 MB",
        "43 MB of gradients, best named composition over DDP with its PowerSGD hook, 10 Mbit/s": (
            "DDP, PowerSGD hook, 43 MB"
        ),
    },
    "wifi-100mbps": {
        "43 MB of gradients, best named composition over torchft DiLoCo, 100 Mbit/s": "torchft DiLoCo, 43 MB",
    },
}
"""Of each network, with the peer of each."""


def best_row(network: str) -> str:
    """Its name in ``expected.toml``, as of those that follow."""
    return LAN_ROW if network == LAN else f"best named composition over the best peer, {network}"


def whole_row(network: str) -> str:
    return f"best named composition, a whole training in the lab over its predicted time, {network}"


def system_row(name: str, what: str, network: str = COSTS_ON) -> str:
    return f"{name}, {what}, {network}"


def costs_on(network: str) -> Mapping[str, str]:
    """What else is measured of a system on a network: what its row says, and what a rank calls it."""
    return COSTS if network == COSTS_ON else {}


def rows_of(name: str, network: str) -> tuple[str, ...]:
    """Of a system on a network."""
    costs = (system_row(name, cost) for cost in costs_on(network))
    return (system_row(name, "time to target", network), *costs)


def timed(name: str, network: str) -> list[dict[str, Any]]:
    """What steps take of a system in the lab, in each round over all systems that are installed."""
    rounds = ROUNDS.get(network, 1)
    beside = {name} if rounds == 1 else {one for one, system in SYSTEMS.items() if system.installed}
    taken = [{one: timed_once(one, network, number) for one in sorted(beside)} for number in range(rounds)]
    return [of_all[name] for of_all in taken]


def timed_once(name: str, network: str, number: int) -> dict[str, Any]:
    """What steps take in all until they are alike, and each after that."""
    system = SYSTEMS[name]
    after = TIMED_WHERE_SLOW if system.until < LONG and network != LAN else TIMED
    steps = system.until + after
    key = {"name": name, "network": network, "steps": steps, "round": number}
    training = Trained(name, RATES[system.optimizer][0], PILOT, steps, every=0)
    return Kept(FOLDER, "timings").once(key, partial(spent_in_lab, training, network))


def spent(rounds: Sequence[Mapping[str, Any]], what: str, steps: float) -> list[float]:
    """Of so many steps, by each round."""

    def by(found: Mapping[str, Any]) -> float:
        until, first, each = map(float, (found["until"], *found[what]))
        return first * steps / until if steps < until else first + each * (steps - until)

    return [by(found) for found in rounds]


def system_rows(name: str, network: str, quick: bool) -> Mapping[str, Measured]:
    """What a system takes to the target on a network."""
    rows = rows_of(name, network)
    if quick:
        tiny = Trained(name, 0.01, 0, steps=4, every=1, batch=4, task="synthetic/quadratic")
        return {rows[0]: Measured(tiny.train(nodes=2)[-1][1], None)}
    SYSTEMS[name].check(name)
    came, rounds = learned(name), timed(name, network)
    config = settings(came, rounds)
    measured = {rows[0]: until_target(came, rounds, "seconds", config)}
    for cost, what in costs_on(network).items():
        peaks = [found["peak_mb"] for found in rounds]
        measured[system_row(name, cost)] = (
            Measured(statistics.median(peaks), (min(peaks), max(peaks)), config)
            if what == "peak_mb"
            else until_target(came, rounds, what, config)
        )
    return measured


def until_target(
    came: Learned, rounds: Sequence[Mapping[str, Any]], what: str, config: dict[str, Any]
) -> Measured:
    """The mean over seeds of medians of rounds, or the best accuracy where a seed does not come there."""
    if came.there is None:
        return Measured.missed(statistics.fmean(came.bests), came.target, config)
    each = [spent(rounds, what, steps) for steps in came.steps if steps is not None]
    spread = (min(map(min, each)), max(map(max, each)))
    return Measured(statistics.fmean(map(statistics.median, each)), spread, config)


def settings(came: Learned, rounds: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    def median(what: str) -> float:
        each: list[float] = [found[what][1] for found in rounds]
        return statistics.median(each)

    return {
        "workload": TASK,
        "reduced": "CIFAR-10 at 16 x 16, 20,000 training samples, ResNet-8",
        "replicas": NODES,
        "batch": BATCH,
        "seeds": list(JUDGES),
        "pilot": PILOT,
        "learned": vars(came),
        "rounds": len(rounds),
        "step_s": median("seconds"),
        "kB_a_step": median("sent") / 1e3,
        "processor_s_a_step": median("processor_s"),
        "peak_mb": statistics.median(found["peak_mb"] for found in rounds),
    }


def compared(network: str, quick: bool) -> Mapping[str, Measured]:
    """The best of ours beside the best peer, and a whole training of it in the lab."""
    if quick:
        return {}
    ours = [*OURS, SYNCHRONOUS] if network == LAN else [*OURS]
    peers = [name for name in SYSTEMS if name not in OURS and name != SYNCHRONOUS]
    for name in peers:
        SYSTEMS[name].check(name)
    seconds = {name: times_of(name, network) for name in (*ours, *peers)}
    config = {"seeds": list(JUDGES), "network": network, "seconds": seconds}
    best = fastest(ours, seconds)
    rivals = {best_row(network): fastest(peers, seconds)}
    if network == NETWORKS[0]:
        rivals[WITH_FP16] = FP16
    if best is None:
        closest = max((learned(name) for name in ours), key=lambda came: statistics.fmean(came.bests))
        missed = Measured.missed(statistics.fmean(closest.bests), closest.target, config)
        return dict.fromkeys(rivals, missed)
    rows = {row: over(best, rival, seconds, config) for row, rival in rivals.items() if rival is not None}
    return {**rows, whole_row(network): whole(best, network, statistics.median(seconds[best]))}


def times_of(name: str, network: str) -> list[float]:
    """To the target, by each round; none where it does not come there."""
    came = learned(name)
    return [] if came.there is None else spent(timed(name, network), "seconds", came.there)


def fastest(names: Sequence[str], seconds: Mapping[str, Sequence[float]]) -> str | None:
    """Of those that come there."""
    there = [name for name in names if seconds[name]]
    return min(there, key=lambda name: statistics.median(seconds[name]), default=None)


def over(best: str, rival: str, seconds: Mapping[str, Sequence[float]], config: dict[str, Any]) -> Measured:
    """The median of the rounds' ratios."""
    ours, theirs = seconds[best], seconds[rival]
    config = {**config, "best": best, "over": rival}
    if not theirs:
        came = learned(rival)
        return Measured.missed(
            statistics.fmean(came.bests), came.target, config, reason=f"{rival} does not come there"
        )
    ratios = [one / other for one, other in zip(theirs, ours, strict=True)]
    return Measured(statistics.median(ratios), (min(ratios), max(ratios)), config)


def whole(name: str, network: str, predicted_s: float) -> Measured:
    """As many steps as take it to the target, the accuracy at their end, and their time over the predicted."""
    came = learned(name)
    assert came.there is not None
    steps = round(came.there)
    training = Trained(name, came.rate, JUDGES[0], steps, every=steps)

    def measure() -> dict[str, Any]:
        ranks = lab(training, network)
        took = [one["marks"][-1]["seconds"] - one["marks"][0]["seconds"] for one in ranks]
        return {"seconds": statistics.median(took), "accuracy": ranks[0]["looks"][-1][1]}

    found = Kept(FOLDER, "whole").once({**vars(training), "network": network}, measure)
    ratio = found["seconds"] / predicted_s
    config = {
        "seeds": [JUDGES[0]],
        "system": name,
        "target": came.target,
        "predicted_s": predicted_s,
        **found,
    }
    return Measured(ratio, (ratio, ratio), config)


def apart(quick: bool) -> Mapping[str, Measured]:
    """What losses of PyTorch's PowerSGD and ours differ by, means over the last half of a training and over seeds."""
    of_each = Trained("", 0.001, PILOT, steps=1000, batch=3, task=CORPUS)
    seeds = [PILOT, *JUDGES]
    if quick:
        of_each, seeds = replace(of_each, steps=4, every=1, batch=4, task="synthetic/quadratic"), [PILOT]
    losses: dict[str, list[float]] = {}
    for name in POWERSGDS:
        trained = [replace(of_each, name=name, seed=seed) for seed in seeds]
        looks = [one.train(nodes=2) if quick else TRAININGS.curve(one) for one in trained]
        losses[name] = [statistics.fmean(loss for *_, loss in each[len(each) // 2 :]) for each in looks]
    differences = [abs(ours - theirs) for theirs, ours in zip(*losses.values(), strict=True)]
    config = {
        "workload": CORPUS,
        "replicas": NODES,
        "batch": of_each.batch,
        "steps": of_each.steps,
        "learning_rate": of_each.rate,
        "seeds": seeds,
        "losses": losses,
    }
    return {APART: Measured(statistics.fmean(differences), (min(differences), max(differences)), config)}


def large(network: str, quick: bool) -> Mapping[str, Measured]:
    """How much sooner the best of ours comes to a loss than each peer, at a device's pace and 43 MB of gradients.

    A peer that does not come there counts with all its steps, so the figure is the least that it may be.
    """
    if quick:
        tiny = Trained(NO_EXCHANGE, 0.01, PILOT, steps=4, every=0, batch=1, task=TINY)
        return dict.fromkeys(LARGE_ROWS[network], Measured(len(tiny.train(nodes=2)), None))
    reference, *names = LARGE
    times = {name: TIMES.curve(Timed(name, network)) for name in names}
    curves = {name: large_curve(name) for name in times if name != NO_EXCHANGE}
    target = large_curve(reference)[-1][1] + WITHIN
    without = times[NO_EXCHANGE]["seconds"][1]
    there = {name: steps for name, curve in curves.items() if (steps := steps_to(curve, target)) is not None}
    seconds = {
        name: spent([times[name]], "seconds", steps)[0] + steps * (STEP_S - without)
        for name, curve in curves.items()
        for steps in (there.get(name, curve[-1][0]),)
    }
    config = {
        "workload": LARGE_TASK,
        "network": network,
        "replicas": NODES,
        "seeds": [PILOT],
        "target": target,
        "seconds": seconds,
        "steps": {name: there.get(name) for name in curves},
        "losses": {name: curve[-1][1] for name, curve in curves.items()},
        "step_s": {name: STEP_S + found["seconds"][1] - without for name, found in times.items()},
        "kB_a_step": {name: found["sent"][1] / 1e3 for name, found in times.items()},
    }
    best = min(LARGE_OURS, key=lambda name: seconds[name] if name in there else math.inf)
    if best not in there:
        return dict.fromkeys(LARGE_ROWS[network], Measured.missed(curves[best][-1][1], target, config))
    rows = {}
    for row, peer in LARGE_ROWS[network].items():
        ratio = seconds[peer] / seconds[best]
        at_least = (
            {} if peer in there else {"at_least": f"not there in {curves[peer][-1][0]:,} steps: {peer}"}
        )
        rows[row] = Measured(ratio, (ratio, ratio), {**config, "best": best, **at_least})
    return rows


CANARIES = tuple(dict.fromkeys(canary for system in SYSTEMS.values() for canary in system.canaries))
BENCHMARK = Benchmark(
    FOLDER,
    [
        *(
            Group(
                rows_of(name, network),
                partial(system_rows, name, network),
                "measured",
                2.0 if network == "four-regions" else 0.5,
                SYSTEMS[name].canaries or CANARIES,
            )
            for network in NETWORKS
            for name in SYSTEMS
        ),
        *(
            Group(
                (best_row(network), *([WITH_FP16] if network == NETWORKS[0] else []), whole_row(network)),
                partial(compared, network),
                "measured",
                1.0,
                CANARIES,
            )
            for network in NETWORKS
        ),
        *(
            Group(
                tuple(rows),
                partial(large, network),
                "trainings",
                20.0,
                [canary for system in LARGE.values() for canary in system.canaries],
            )
            for network, rows in LARGE_ROWS.items()
        ),
        Group((APART,), apart, "trainings", 0.5, POWERSGDS["powersgd, rank 4, AdamW"].canaries),
    ],
    TRAININGS,
)

if __name__ == "__main__":
    sys.exit(main(BENCHMARK))
