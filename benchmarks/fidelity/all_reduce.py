"""All-reduce on slow links of the lab, by several algorithms; needs root."""

from __future__ import annotations

import json
import statistics
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tyro

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks.common.shaped import in_lab  # noqa: E402
from farflung.network import Link, NetworkProfile, Site  # noqa: E402


@dataclass(frozen=True)
class Options:
    """Times all-reduces of 4 kB, 0.4 MB and 4 MB in the lab."""

    nodes: int = 4
    """How many nodes."""
    latency: float = 0.05
    """One way, in seconds."""
    mbps: float = 20.0
    """What a node can send, and receive, in Mbit/s."""
    idle: float = 3.0
    """How long connections rest in the idle rows, in seconds."""
    repetitions: int = 5
    """Timed, after two that are not."""
    nbytes: tuple[int, ...] = (4_096, 400_000, 4_000_000)
    """Of the tensors."""
    only: str = ""
    """Only this algorithm."""
    fifo: bool = False
    """First come, first served, in the place of equal shares."""
    congestion_control: str | None = None
    """Of the nodes' TCP; this machine's when not given."""


def main() -> None:
    """Prints a line for each algorithm and size."""
    options = tyro.cli(Options)
    bps = 1e6 * options.mbps
    site = Site("all", None, Link(options.latency), up_bps=bps, down_bps=bps)
    profile = NetworkProfile(f"{options.latency * 1e3:g} ms, {options.mbps:g} Mbit/s", (site,))
    runs = []
    for nbytes in options.nbytes:
        at_most = 14 * options.latency + 2 * limit_s(options, nbytes)
        for how in ("direct", "ring", "native"):
            if options.only in ("", how):
                runs.append((how, nbytes, 0.0, at_most, options.repetitions))
                if how == "direct" and options.idle:
                    runs.append((how, nbytes, options.idle, at_most, options.repetitions))
    print(f"{profile.name}, {options.nodes} nodes; seconds, median (least to most) of {options.repetitions}")
    for said in run(profile, options, runs):
        what = (
            f"{said['how']}{', idle ' + format(said['idle_s'], 'g') + ' s before' if said['idle_s'] else ''}"
        )
        print(
            f"{said['nbytes']:>9} B  {what:<28}{said['median']:.4f} ({said['least']:.4f} to {said['most']:.4f})"
            f"   limit {limit_s(options, said['nbytes']):.4f}",
            flush=True,
        )


def limit_s(options: Options, nbytes: int) -> float:
    """Two delays, and the time in which a node can send what it has to."""
    sent = 2 * (options.nodes - 1) / options.nodes * nbytes
    return 2 * options.latency + 8 * sent / (1e6 * options.mbps)


def run(profile: NetworkProfile, options: Options, runs: list[Any]) -> list[dict[str, Any]]:
    """For each run, what its slowest node took."""
    rows = in_lab(
        profile,
        options.nodes,
        "benchmarks.fidelity.all_reduce_worker",
        json.dumps(runs),
        fair=not options.fifo,
        congestion_control=options.congestion_control,
    )
    answers = []
    for of_all in zip(*rows, strict=True):
        slowest = [max(times) for times in zip(*(row["seconds"] for row in of_all), strict=True)]
        answers.append(
            {**of_all[0], "median": statistics.median(slowest), "least": min(slowest), "most": max(slowest)}
        )
    return answers


if __name__ == "__main__":
    main()
