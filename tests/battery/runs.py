"""Makes the battery's runs and reads what they leave behind.

Everything that knows how a run is made stands in :func:`virtual_half` and :func:`wall_half`.
"""

from __future__ import annotations

import functools
import hashlib
import shutil
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from farflung.calibration import count_forward_flops
from farflung.devices import find_device
from farflung.runs import (
    DEFAULT_DEVICE,
    PreparedRun,
    RunConfig,
    RunFolder,
    SimulatedConfig,
    joining,
    simulate_prepared,
)
from farflung.state_trees import load_tree
from farflung.telemetry import Event
from farflung.wall import LaunchEnv
from tests.battery import coded
from tests.battery.cases import CASES, DENSE, Case, known
from tests.pool import Pool, digest

__all__ = ["exact_roots", "outcome"]

VERSION = torch.__version__.partition("+")[0]
"""Of torch; bits are recorded by it."""


def outcome(pool: Pool, name: str, path: Path) -> dict[str, Any]:
    """Bits, bytes and virtual times of a case, as ``expected.json`` has them.

    Raises:
      AssertionError: the two worlds end with other bits.
    """
    if name == DENSE:
        return {"parameters": _after_three_exchanges(path)}
    case = CASES[name]
    if case is None:
        found = coded.outcome()
        return {**found, "bits": {VERSION: found["bits"]}}
    worlds: dict[str, dict[str, Any]] = {}
    if case.virtual:
        worlds["virtual"] = virtual(case, path / "virtual")
    worlds["wall"] = wall(pool, case, path / "wall", path / "virtual" / "decisions.jsonl")
    bits = [one.pop("bits") for one in worlds.values()]
    assert bits[0] == bits[-1], f"{name}: in virtual time it ends with other bits than on the wall clock"
    return {"bits": {VERSION: bits[0]}, **worlds}


@functools.cache
def exact_roots() -> torch.library.Library:
    """Makes torch round square roots as IEEE 754 has it, in this process and for as long as the result is kept.

    MKL's are made of an approximation that each generation of processors rounds in its own way, whatever the
    environment says.
    """
    library = torch.library.Library("aten", "IMPL")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # that it replaces one
        library.impl("sqrt", _root, "CPU")
    return library


def _root(x: Tensor) -> Tensor:
    root = torch.empty_like(x)
    np.sqrt(x.numpy(), out=root.numpy())
    return root


def _after_three_exchanges(path: Path) -> list[float]:
    """Some numbers of each parameter after three steps of synchronous SGD."""
    steps = 3
    virtual_half(Case("dense", {"workers": 2}), path, steps, resumed=False)
    model = load_tree(path / "checkpoints" / f"step-{steps:08d}" / "shared.safetensors")["model"]
    flat = [tensor.double().flatten() for _, tensor in sorted(model.items())]
    return [number for one in flat for number in one[:: max(1, len(one) // SEEN)].tolist()]


SEEN = 16
"""Numbers of each parameter that are recorded after three exchanges, about."""


# --- in virtual time ------------------------------------------------------------------------------------------


def virtual(case: Case, path: Path) -> dict[str, Any]:
    """Trains in virtual time to the half and from there to the end; what is recorded of it, times included."""
    steps = case.whole["steps"]
    virtual_half(case, path, steps // 2, resumed=False)
    virtual_half(case, path, steps, resumed=True)
    return {**_outcome(path, steps), "times": _times(path)}


def virtual_half(case: Case, path: Path, steps: int, *, resumed: bool) -> None:
    """One half in virtual time."""
    with known():
        config = SimulatedConfig.resolve({**case.whole, "network": case.network, "steps": steps})
        device = find_device(DEFAULT_DEVICE, forward_flops=count_forward_flops(config.task))
        config = replace(
            config, device=replace(device, coding=None)
        )  # times of networks, not of this or that codec
        folder = RunFolder(path, is_resumed=resumed)
        run = PreparedRun(config, folder)
        simulate_prepared(run)


# --- on the wall clock ----------------------------------------------------------------------------------------


def wall(pool: Pool, case: Case, path: Path, replay: Path) -> dict[str, Any]:
    """The same on worker processes, which make again what is decided in ``replay``, where there is anything."""
    steps = case.whole["steps"]
    for until in (steps // 2, steps):
        resumed = until == steps
        with known():
            config = RunConfig.resolve({**case.whole, "steps": until})
        timed = any(decision.timing for decision in RunFolder(replay.parent).load_decisions())
        again = replay if timed and not resumed else None
        with RunFolder(path, is_resumed=resumed).begin_run(config.to_json(), again):
            pass
        pool.run(
            config.workers,
            "tests.battery.runs.wall_half",
            name=case.name,
            path=str(path),
            steps=until,
            resumed=resumed,
        )
    return _outcome(path, steps)


def wall_half(
    rank: int,
    size: int,
    store: dist.PrefixStore,
    *,
    name: str,
    path: str,
    steps: int,
    resumed: bool,
) -> None:
    """One replica's half."""
    del store  # they meet in a file, as the workers of a command do
    exact_roots()
    env = LaunchEnv(rank, size, rank, size, Path(path, f"meeting-{steps}"))
    with known():
        case = CASES[name]
        assert case is not None
        config = RunConfig.resolve({**case.whole, "steps": steps})
        run = PreparedRun(config, RunFolder(Path(path), is_resumed=resumed))
        joining.train_replica(run, _nobody, env)


# --- what they leave behind -----------------------------------------------------------------------------------


def _outcome(path: Path, steps: int) -> dict[str, Any]:
    """Bits and bytes of a run: of the checkpoint at its end, of each loss on its way, and of its evaluations."""
    events = _events(path)
    shared = load_tree(path / "checkpoints" / f"step-{steps:08d}" / "shared.safetensors")
    losses = [[event["loss"] for event in own if event["event"] == "step"] for own in events]
    ends = [[event for event in own if event["event"] == "end"] for own in events]
    finals = [[(end["final_loss"], end["final_accuracy"]) for end in own] for own in ends]
    shutil.rmtree(path / "checkpoints")
    return {
        "bits": {"parameters": digest(shared["model"]), "losses": _sha(losses), "evaluations": _sha(finals)},
        "bytes": [[end["bytes_sent_per_replica"] for end in own] for own in ends],
    }


def _times(path: Path) -> list[dict[str, Any]]:
    """For each replica the virtual seconds at which steps and halves ended, and what each half took."""
    return [
        {
            "steps": [event["t"] for event in own if event["event"] == "step"],
            "ends": [event["t"] for event in own if event["event"] == "end"],
            "durations": [_leg(event)["duration_s"] for event in own if event["event"] == "end"],
        }
        for own in _events(path)
    ]


def _leg(end: Event) -> Event:
    """What was done since the run was resumed, or all of one in one piece."""
    leg = end.get("last_leg", end)
    assert isinstance(leg, dict)
    return leg


def _events(path: Path) -> list[list[Event]]:
    return [own for _, own in sorted(RunFolder(path, is_resumed=True).load_events().items())]


def _sha(value: object) -> str:
    return hashlib.sha256(repr(value).encode()).hexdigest()


def _nobody(event: Event) -> None:
    """Shows nothing."""
    del event
