"""One TCP connection in the lab against its model in virtual time, on drawn networks; needs root.

Messages of one size over one connection: the first, six in regular use, one after three seconds of rest, one more.
Rows are kept in ``results/one_flow.jsonl``. Networks of the seeds in FITTED were looked at when the model was made,
others judge it.
"""

from __future__ import annotations

import json
import math
import random
import statistics
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, get_args

import tyro

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks.common.shaped import in_lab  # noqa: E402
from farflung.errors import LabError  # noqa: E402
from farflung.lab.tun import build_address  # noqa: E402
from farflung.network import Link, NetworkProfile, Wiring  # noqa: E402
from farflung.network.tcp import CongestionControl  # noqa: E402
from farflung.sim.clock import VirtualClock  # noqa: E402
from farflung.sim.flows import Flows  # noqa: E402

RESULTS = Path(__file__).parent / "results" / "one_flow.jsonl"
FITTED = (1, 2)
CONTROLS = get_args(CongestionControl)
REST_S = 3.0
LOSSY = ((0.005, 50e6, 0.01), (0.02, 20e6, 0.02), (0.05, 20e6, 0.01), (0.05, 20e6, 0.003), (0.1, 10e6, 0.001))
"""Delay, bandwidth and loss, of the networks on which what a flow gets under loss is judged."""
LOSSY_NBYTES, LOSSY_MESSAGES = 1_000_000, 8


@dataclass(frozen=True)
class Options:
    """Measures connections on drawn networks, or compares what was measured with the model."""

    seed: int | None = None
    """Of the networks to draw and measure; without it, what is kept is compared."""
    networks: int = 8
    """How many."""
    lossy: bool = False
    """Measure on links that lose packets."""


Plan = tuple[str, int, list[float]]
"""Congestion control, bytes of each message, seconds of rest before each."""


def drawn(seed: int, networks: int) -> Iterator[tuple[Link, list[Plan]]]:
    """Links of 1 to 300 ms and 1 to 200 Mbit/s, and on each two sizes from 10 kB to 4 MB that pass in two seconds."""
    rng = random.Random(seed)
    for _ in range(networks):
        latency_s = round(10 ** rng.uniform(-3, math.log10(0.3)), 4)
        bps = 1e6 * round(10 ** rng.uniform(0, math.log10(200)), 2)
        most = max(2e4, min(4e6, 2.0 * bps / 8))
        sizes = [round(10 ** rng.uniform(4, math.log10(most))) for _ in range(2)]
        gap = round(rng.uniform(0.02, 0.4), 3)
        rests = [0.0, *[gap] * 6, REST_S, gap]
        yield Link(latency_s, bps), [(control, size, rests) for size in sizes for control in CONTROLS]


def keep(seed: int, link: Link, plans: list[Plan]) -> None:
    """Measures on one link, and appends a row for each connection."""
    profile = NetworkProfile.create_uniform(link, 2)
    try:
        sent, _ = in_lab(
            profile, 2, "benchmarks.fidelity.one_flow_worker", json.dumps(plans), build_address(1)
        )
    except LabError as error:
        print(error, flush=True)
        return
    about = {
        "seed": seed,
        "latency_s": link.latency_s,
        "bandwidth_bps": link.bandwidth_bps,
        "loss": link.loss,
    }
    with RESULTS.open("a", encoding="utf-8") as rows:
        for row in sent:
            rows.write(json.dumps({**about, **row}) + "\n")
            print({**about, **row}, flush=True)


def predicted(row: dict[str, Any], congestion: CongestionControl | None) -> list[float]:
    """What each message of a connection takes in virtual time, begun as long after the last one as in the lab."""
    link = Link(row["latency_s"], row["bandwidth_bps"], loss=row["loss"])
    profile = replace(NetworkProfile.create_uniform(link, 2), congestion=congestion)
    ends = [begin_s + took_s for begin_s, took_s in zip(row["begins_s"], row["seconds"], strict=True)]
    rests = [begin_s - end_s for begin_s, end_s in zip(row["begins_s"][1:], ends, strict=False)]
    clock = VirtualClock()
    flows, took = Flows(clock, Wiring(profile), seed=0), list[float]()

    def send() -> None:
        begin_s = clock.time()

        def arrived(t: float) -> None:
            if len(took) < len(rests):
                clock.call_at(t + rests[len(took)], send)
            took.append(t - begin_s)

        flows.send(0, 1, row["nbytes"], 0, arrived)

    send()
    clock.run()
    return took


def of_kinds(seconds: list[float]) -> dict[str, float]:
    """The first message, the second, the median of those in regular use, the one after a rest."""
    used = statistics.median(seconds[2:-2])
    return {"first": seconds[0], "second": seconds[1], "used": used, "rested": seconds[-2]}


def compare() -> None:
    """Errors of the model, and of a link that has its whole rate from the first byte, by set, control and kind."""
    rows = [json.loads(line) for line in RESULTS.read_text(encoding="utf-8").splitlines()]
    errors: dict[tuple[str, str, str], list[tuple[float, float]]] = {}
    for row in rows:
        if not row["loss"]:
            real, ideal = of_kinds(row["seconds"]), of_kinds(predicted(row, None))
            model = of_kinds(predicted(row, row["control"]))
            which = "fitted" if row["seed"] in FITTED else "judged"
            for kind, seconds in real.items():
                pair = (abs(model[kind] / seconds - 1), abs(ideal[kind] / seconds - 1))
                errors.setdefault((which, row["control"], kind), []).append(pair)
    print("| set | control | message | connections | model: mean (worst) | ideal link: mean (worst) |")
    print("|---|---|---|---|---|---|")
    for (which, control, kind), pairs in sorted(errors.items()):
        cells = [f"{statistics.mean(one):.1%} ({max(one):.0%})" for one in zip(*pairs, strict=True)]
        print(f"| {which} | {control} | {kind} | {len(pairs)} | {cells[0]} | {cells[1]} |")
    print("\n| loss | one way | Mbit/s of the link | control | Mbit/s | model |\n|---|---|---|---|---|---|")
    for row in rows:
        if row["loss"]:
            bits = 8e-6 * row["nbytes"] * (len(row["seconds"]) - 1)
            got, model_got = (
                bits / math.fsum(s[1:]) for s in (row["seconds"], predicted(row, row["control"]))
            )
            link = f"{row['loss']:.1%} | {1e3 * row['latency_s']:g} ms | {row['bandwidth_bps'] / 1e6:g}"
            print(f"| {link} | {row['control']} | {got:.1f} | {model_got:.1f} |")


def main() -> None:
    """Measures, or prints a table."""
    options = tyro.cli(Options)
    if options.seed is not None:
        for link, plans in drawn(options.seed, options.networks):
            keep(options.seed, link, plans)
    if options.lossy:
        plans = [(control, LOSSY_NBYTES, [0.0] * LOSSY_MESSAGES) for control in CONTROLS]
        for latency_s, bps, loss in LOSSY:
            keep(0, Link(latency_s, bps, loss=loss), plans)
    if options.seed is None and not options.lossy:
        compare()


if __name__ == "__main__":
    main()
