"""Recipe ``auto`` of ``farflung train``: the network is measured, and rank 0 plans before all ranks train."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from farflung.calibration import calibrate
from farflung.comm import Endpoint
from farflung.config import Training, list_settings
from farflung.decisions import decide_by_rank_0
from farflung.devices import find_device
from farflung.errors import ConfigError
from farflung.network import NetworkProfile
from farflung.planning.planner import OnPart, ignore_part, plan
from farflung.runs import SimulatedConfig
from farflung.wall import LaunchEnv
from farflung.wall.measuring import connect_ranks, probe_network

__all__ = ["AUTO_RECIPE", "choose_recipe"]

AUTO_RECIPE = "auto"
"""Name in place of a recipe, for the one that a plan chooses."""
ROUNDS = 10
"""Steps by which rank 0 measures its speed for the plan, which takes all ranks for equal."""


def choose_recipe(
    settings: Mapping[str, object],
    env: LaunchEnv | None,
    *,
    endpoint: Endpoint = Endpoint(),
    deadline_s: float = 60.0,
    on_part: OnPart = ignore_part,
) -> str:
    """Returns the recipe that a plan chooses for the network between the ranks; equal on all of them.

    Rank 0 plans, while the others wait. Replicas that one machine starts are planned without a network.

    Args:
      settings: Settings of ``farflung train``.
      env: Rank and size of this process under a launcher; ``None`` if this machine starts the replicas.
      endpoint: Settings of this process's connections.
      deadline_s: Seconds of silence after which another rank is lost.
      on_part: Callback, as in :func:`farflung.plan`.

    Raises:
      BadInput: The settings are invalid, or nothing can be planned.
      RunLost: Another rank was lost.
    """
    if settings.get("resume") is not None:
        raise ConfigError(
            "--recipe auto: plans a new run: name the recipe that a resumed run is to go on with"
        )
    if env is None or env.size == 1:
        return _plan_recipe(settings, "loopback", int(str(settings.get("workers", 2))), on_part)
    with connect_ranks(env, "plan", endpoint=endpoint, deadline_s=deadline_s) as runtime:
        measurement = runtime.drive(probe_network(runtime))
        text = ""
        if measurement is not None:
            names = [f"rank {rank}" for rank in range(env.size)]
            text = _plan_recipe(settings, measurement.build_profile("probed", names), env.size, on_part)
        coroutine = decide_by_rank_0(runtime.comm, runtime.decisions, AUTO_RECIPE, 0, lambda: text)
        return str(runtime.launch(coroutine).wait().value)


def _plan_recipe(
    settings: Mapping[str, object],
    network: str | NetworkProfile,
    workers: int,
    on_part: OnPart,
) -> str:
    """Plans on a device as fast as this process, and returns the chosen recipe."""
    names = {"workload", "data", "partition", *list_settings(Training)}
    chosen = {name: value for name, value in settings.items() if name in names}
    config = SimulatedConfig.resolve({**chosen, "workers": workers})
    on_part("measuring this machine", 0)
    device = replace(
        calibrate(config.task, config.training, rounds=ROUNDS).device,
        coding=find_device("cpu-core", forward_flops=1.0).coding,
    )
    workload = chosen.pop("workload", None)
    made = plan(workload, network, device=device, workers=workers, on_part=on_part, **chosen)  # type: ignore[arg-type]
    assert made.choice is not None
    return made.choice.recipe
