"""Parameters kept once give the runs of parameters kept by each replica, to the last bit."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from farflung.config import Training
from farflung.data import NoSharing
from farflung.devices import DeviceProfile, VaryingStraggler
from farflung.loop import Checkpoints, Replica, share_parameters
from farflung.network import find_network
from farflung.recipes import parse_recipe
from farflung.sampling import UniformSampler
from farflung.sim import VirtualWorld
from farflung.streams import RateLimited
from farflung.telemetry import Event, Telemetry
from farflung.types import Communicator, Json
from farflung.workloads import create_workload


def made(
    world: VirtualWorld, name: str, settings: Mapping[str, Json], events: list[Event], folder: Path | None
) -> list[Replica]:
    work = create_workload(name, **({"data": "packaged"} if name.startswith("fashion-mnist") else {}))
    training = Training.resolve(work.defaults, {"steps": 4, "batch_size": 4, "seed": 1, **settings})
    return [
        Replica(
            runtime,
            work,
            training,
            parse_recipe("synchronous").build_components(training.seed),
            Telemetry(runtime.comm.rank, events.append),
            None if folder is None else _checkpoints(folder, runtime.comm),
        )
        for runtime in world.runtimes
    ]


def _checkpoints(folder: Path, comm: Communicator) -> Checkpoints:
    return Checkpoints(folder, comm.rank, comm.size, is_leader=comm.rank == 0)


def trained(
    once: bool, name: str, settings: Mapping[str, Json], folder: Path | None = None
) -> tuple[list[str], list[Replica]]:
    device = DeviceProfile(forward_s=1e-3, stragglers=(VaryingStraggler(1.0),))
    world = VirtualWorld(3, network=find_network("4g"), device=device, seed=2)
    events: list[Event] = []
    replicas = made(world, name, settings, events, folder)
    assert not once or share_parameters(replicas)
    world.run([replica.run() for replica in replicas])
    return [json.dumps(event) for event in events], replicas


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("synthetic/quadratic", {"momentum": 0.9}),
        ("synthetic/quadratic", {"optimizer": "adam", "clip_norm": 0.5, "evaluate_every": 2}),
        ("fashion-mnist/cnn", {"clip_norm": 1.0, "steps": 2, "evaluate_every": 0}),
    ],
)
def test_no_bit_changes(name: str, settings: dict[str, Json]) -> None:
    events, diverged = trained(False, name, settings)
    events_once, together = trained(True, name, settings)
    assert events_once == events
    for one, other in zip(diverged, together, strict=True):
        for (key, a), b in zip(
            one.model.state_dict().items(), other.model.state_dict().values(), strict=True
        ):
            assert torch.equal(a, b), key
    places = {next(replica.model.parameters()).data_ptr() for replica in together}
    assert len(places) == 1


def test_a_checkpoint_is_what_it_would_be(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"checkpoint_every": 2}
    _, diverged = trained(False, "synthetic/quadratic", settings, tmp_path / "apart")
    _, together = trained(True, "synthetic/quadratic", settings, tmp_path / "together")
    for one, other in zip(diverged, together, strict=True):
        for replica in (one, other):
            replica.resume(4)
        assert str(one.optimizer.state_dict()) == str(other.optimizer.state_dict())
        assert torch.equal(*(next(replica.model.parameters()) for replica in (one, other)))


def test_replicas_that_may_differ_stay_apart() -> None:
    world, events = VirtualWorld(2), list[Event]()
    replicas = made(world, "synthetic/quadratic", {}, events, None)
    with torch.no_grad():
        next(replicas[1].model.parameters()).add_(1.0)
    assert not share_parameters(replicas)
    assert replicas[0].lockstep is None


class Scores(UniformSampler):
    """A sampler that may read parameters between steps."""


class Rows(NoSharing):
    """A sharing that may do so."""


@pytest.mark.parametrize(
    "other",
    [{"sampler": Scores(0)}, {"stream": RateLimited(5.0)}, {"sharing": Rows()}],
    ids=lambda part: str(*part),
)
def test_parts_that_work_between_steps_or_wait_keep_replicas_apart(other: dict[str, Any]) -> None:
    replicas = made(VirtualWorld(2), "synthetic/quadratic", {}, [], None)
    replicas[1].components = replace(replicas[1].components, **other)
    assert not share_parameters(replicas)
    assert [replica.lockstep for replica in replicas] == [None, None]
    replicas[1].components = replicas[0].components
    assert share_parameters(replicas)
