"""One recipe on one network, in virtual time and in the lab."""

from __future__ import annotations

import json
import math
import statistics
import tempfile
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import farflung as package
from benchmarks.common.runs import farflung, last_event
from benchmarks.fidelity.recipes import PERIODIC, RECIPES
from farflung.devices import find_device
from farflung.lab import PairMeasurement, apply_measured_delays
from farflung.lab.tun import read_congestion_control
from farflung.network import find_network
from farflung.recipes import Recipe, parse_recipe
from farflung.telemetry import Event, read_events

__all__ = ["PACED", "SHORT", "WORKLOAD", "Cell", "calibrated", "compared", "measured", "recipe_of", "use"]

WORKLOAD, BATCH_SIZE, PERIODIC_BATCH_SIZE, UNPACED_BATCH_SIZE = "fashion-mnist/cnn", 16, 4, 64
FORWARD_S = 0.008
"""Of a paced device, per sample: a step computes for 0.384 s, so that four nodes' own time fits in on this machine."""
PACED = f'name = "paced"\nforward_s = {FORWARD_S}\n'
SHORT = 5
"""Steps that are a short run of their own, in which TCP finds its rates; those after them are judged apart."""
LEAST, MOST = 5, 17
"""Of those after."""
LEAST_EVERY = 32
"""Steps over which the use of processors is judged, and no fewer than two periods."""
RUN_S = 12.0
"""No more steps than these take, beyond the least."""
HEADER_NBYTES = 52
"""Of IP and TCP with timestamps, in each packet that an interface counts."""


@dataclass(frozen=True)
class Cell:
    """What is compared.

    Args:
      network: its name.
      profile: as TOML, of a network that was drawn; empty: the name is known.
      recipe: a name in :data:`benchmarks.fidelity.recipes.RECIPES`.
      nodes: how many replicas.
      paced: whether they compute at the pace of a slow device; otherwise as fast as this machine does.
      seed: that drew it; of jitter and loss in the lab.
    """

    network: str
    profile: str
    recipe: str
    nodes: int
    paced: bool
    seed: int

    @property
    def batch_size(self) -> int:
        """Samples of a step."""
        if self.recipe in PERIODIC:
            return PERIODIC_BATCH_SIZE
        return BATCH_SIZE if self.paced else UNPACED_BATCH_SIZE


def calibrated(cell: Cell, recipes: Collection[str], *, rounds: int) -> str:
    """This machine as a device, as TOML, with as many replicas at once as are to run on it.

    Args:
      cell: says how many, and how large their steps are.
      recipes: names of those whose coding is measured.
      rounds: steps that are timed.
    """
    chosen = [recipe_of(name) for name in recipes]
    codecs = {str(one.codec) for one in chosen if one.reducer == "codec"}
    reducers = {str(one.reducer) for one in chosen} - {"codec"}
    with tempfile.TemporaryDirectory() as scratch:
        out = Path(scratch) / "device.toml"
        farflung(
            "calibrate", "--workload", WORKLOAD, "--data", "packaged", "--batch-size", str(cell.batch_size),
            "--replicas", str(cell.nodes), "--rounds", str(rounds), "--out", str(out),
            *(["--codecs", *sorted(codecs)] if codecs else []),
            *(["--reducers", *sorted(reducers)] if reducers else []),
        )  # fmt: skip
        return out.read_text(encoding="utf-8")


def measured(cell: Cell, calibration: str, *, quick: bool) -> dict[str, Any]:
    """The lab's times of a cell's first steps, and of those after them; as many as virtual time finds room for.

    Args:
      cell: which.
      calibration: this machine with as many replicas, as TOML.
      quick: as few steps as make sense.
    """
    control = read_congestion_control()
    virtual = _simulated(cell, control, [], calibration, SHORT + (LEAST if quick else MOST))
    fit = sum(end <= RUN_S for end in virtual)
    steps = max(SHORT + LEAST, min(fit, len(virtual) - 1))
    with tempfile.TemporaryDirectory() as folder:
        scratch = Path(folder)
        lab, report = _in_lab(cell, _network(cell, scratch), steps, scratch)
        real = _ends(list(read_events(lab / "telemetry" / "rank-0.jsonl")))
        began = [float(one) for one in report["first_steps_s"]]
        real = [end - (max(began) - began[0]) for end in real]  # from when all have begun
        durations = [after - before for before, after in pairwise(real[SHORT:])]
        paces = [last_event(lab, rank, "pace") for rank in range(cell.nodes)] if cell.paced else []
        return {
            "steps": steps,
            "short_lab_s": real[SHORT],
            "lab_s": _mean(real[SHORT : steps + 1]),
            "ends_s": [round(end, 4) for end in real],
            "standard_error_s": statistics.stdev(durations) / math.sqrt(len(durations)),
            **_bytes(lab, cell.nodes, report["counters"]),
            "overran": sum(p["num_overruns"] for p in paces) / sum(p["steps"] for p in paces)
            if paces
            else 0.0,
            "pairs": report["pairs"],
            "congestion_control": report["congestion_control"],
            "lab_seconds": report["seconds"],
        }


def compared(cell: Cell, lab: Mapping[str, Any], calibration: str) -> dict[str, Any]:
    """Virtual time's times of the same steps, and how far they are off.

    Args:
      cell: which.
      lab: what :func:`measured` gave of it.
      calibration: as there.
    """
    pairs = [PairMeasurement(**pair) for pair in lab["pairs"]]
    virtual = _simulated(cell, lab["congestion_control"], pairs, calibration, lab["steps"])
    short_s, long_s = virtual[SHORT], _mean(virtual[SHORT : lab["steps"] + 1])
    return {
        "short_simulated_s": short_s,
        "short_error": abs(short_s / lab["short_lab_s"] - 1.0),
        "simulated_s": long_s,
        "error": abs(long_s / lab["lab_s"] - 1.0),
    }


def use(cell: Cell, calibration: str, period: int, *, quick: bool) -> dict[str, Any]:
    """Measure the share of the time in which processors compute, in the lab and in virtual time.

    Args:
      cell: of paced devices.
      calibration: this machine with as many replicas, as TOML.
      period: steps between two exchanges; whole periods count, after the first.
      quick: as few periods as make sense.
    """
    steps = period * (1 + (1 if quick else max(2, LEAST_EVERY // period)))
    computed_s = (steps - period) * cell.batch_size * FORWARD_S * 3
    with tempfile.TemporaryDirectory() as folder:
        scratch = Path(folder)
        lab, report = _in_lab(cell, _network(cell, scratch), steps, scratch)
        real = _ends(list(read_events(lab / "telemetry" / "rank-0.jsonl")))
        paces = [last_event(lab, rank, "pace") for rank in range(cell.nodes)]
    pairs = [PairMeasurement(**pair) for pair in report["pairs"]]
    virtual = _simulated(cell, report["congestion_control"], pairs, calibration, steps)
    in_lab, simulated = (computed_s / (ends[steps] - ends[period]) for ends in (real, virtual))
    return {
        "steps": steps,
        "lab": in_lab,
        "simulated": simulated,
        "error": abs(simulated / in_lab - 1.0),
        "overran": sum(p["num_overruns"] for p in paces) / sum(p["steps"] for p in paces),
    }


def recipe_of(name: str) -> Recipe:
    """One of :data:`RECIPES` or :data:`PERIODIC` as an object."""
    changes = dict((RECIPES | PERIODIC)[name])
    return parse_recipe(changes.pop("recipe")).with_components(**changes)


def _network(cell: Cell, scratch: Path) -> str:
    if not cell.profile:
        return cell.network
    file = scratch / "network.toml"
    file.write_text(cell.profile, encoding="utf-8")
    return str(file)


def _settings(cell: Cell, steps: int) -> dict[str, object]:
    """Of both worlds."""
    return {
        **(RECIPES | PERIODIC)[cell.recipe],
        "workload": WORKLOAD,
        "data": "packaged",
        "workers": cell.nodes,
        "steps": steps,
        "batch_size": cell.batch_size,
        "checkpoint_every": 0,
        "evaluate_every": 0,
    }


def _simulated(
    cell: Cell, control: str, pairs: Sequence[PairMeasurement], calibration: str, steps: int
) -> list[float]:
    """When each step ends; with the delays that the lab has measured where they are not the profile's."""
    with tempfile.TemporaryDirectory() as folder:
        scratch = Path(folder)
        network = f"{_network(cell, scratch)}(congestion={control})"
        profile = apply_measured_delays(find_network(network).with_nodes(cell.nodes), pairs)
        machine = scratch / "machine.toml"
        machine.write_text(calibration, encoding="utf-8")
        device = find_device(str(machine))
    if cell.paced:
        # Coding and messages are this machine's own, and take the processor while the replica idles.
        device = replace(device, layers=(), forward_s=FORWARD_S, backward_s=None, optimizer_s=0.0, cores=2.0)
    run = package.simulate(**_settings(cell, steps), network=profile, device=device)  # type: ignore[arg-type]
    return _ends(run.events[0])


def _in_lab(cell: Cell, network: str, steps: int, scratch: Path) -> tuple[Path, Mapping[str, Any]]:
    """The run's folder, and what the lab has reported."""
    out, report, device = scratch / "lab", scratch / "report.json", scratch / "device.toml"
    device.write_text(PACED, encoding="utf-8")
    settings = _settings(cell, steps)
    farflung(
        "lab", "--network", network, "--nodes", str(cell.nodes), "--seed", str(cell.seed), "--any-delay",
        "--report", str(report), "--logs", str(scratch / "logs"), "train", "--json", "--quiet", "--out", str(out),
        *(text for name, value in settings.items() for text in (f"--{name.replace('_', '-')}", str(value))),
        *(["--pace", str(device)] if cell.paced else []),
    )  # fmt: skip
    return out, json.loads(report.read_text(encoding="utf-8"))


def _ends(events: Sequence[Event]) -> list[float]:
    """0, and when each step has ended, in seconds since the first one began."""
    times = [float(str(one["t"])) for one in events if one["event"] in ("begin", "step")]
    return [t - times[0] for t in times]


def _mean(ends: Sequence[float]) -> float:
    return (ends[-1] - ends[0]) / (len(ends) - 1)


def _bytes(lab: Path, nodes: int, counters: Sequence[Mapping[str, int]]) -> dict[str, float]:
    ends = [last_event(lab, rank, "end") for rank in range(nodes)]
    said = sum(end["bytes_sent_per_replica"] for end in ends)
    counted = sum(one["sent_nbytes"] - HEADER_NBYTES * one["sent_packets"] for one in counters)
    return {"bytes": said, "counted_bytes": counted, "bytes_error": abs(counted / said - 1.0)}
