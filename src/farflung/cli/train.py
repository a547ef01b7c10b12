"""``farflung train``: trains on workers of this machine, or joins a run of torchrun."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from typing_extensions import override

from farflung.cli.options import (
    ENDPOINT,
    RunCommand,
    build_endpoint,
    collect_options,
    with_options,
)
from farflung.cli.output import create_stderr_console
from farflung.config import list_settings
from farflung.errors import ConfigError
from farflung.runs import RunConfig, RunOptions

if TYPE_CHECKING:  # imports torch, which help does without
    from farflung.runs import PreparedRun
    from farflung.telemetry import Event
    from farflung.wall import LaunchEnv

__all__ = ["Train", "announce_rank"]

OPTIONS = list_settings(RunOptions)
"""Options of a run that are not settings."""


@dataclass(frozen=True)
@with_options({**RunConfig.list_settings(), **OPTIONS, **ENDPOINT})
class Train(RunCommand):
    """Train on several workers of this machine, or under torchrun.

    Under torchrun the workers are torchrun's and this command joins them, on one machine or several:
    torchrun --nproc-per-node 4 -m farflung train ...
    Under srun and mpirun it does the same.
    """

    ignored_keys: ClassVar[frozenset[str]] = frozenset(
        {"network", "connections", "device", "faults", "count_evaluation"}
    )
    """Keys that are ignored; ``connections`` in a file is of a modelled network, and for real ones an option."""

    plan: Path | None = None
    """File plan.json of farflung plan: compare times of steps and loss with it every 50 steps, and say when the run
    leaves the plan's interval."""
    network: str | None = None
    """Not here: use farflung simulate (modelled links) or farflung lab (real ones)."""

    @override
    def prepare(self, *layers: Mapping[str, object]) -> PreparedRun[RunConfig]:
        if self.network is not None:
            raise ConfigError(
                f"--network: train uses the links of this machine: use farflung lab --network {self.network} train ... "
                f"(real sockets on shaped links, needs root) or farflung simulate --network {self.network}"
            )
        from farflung.recipes.recipe import list_component_settings
        from farflung.runs import prepare_training

        settings = {name: value for layer in layers for name, value in layer.items()}
        if settings.get("recipe") == "auto":
            for name in list_component_settings():
                if name in settings:
                    raise ConfigError(
                        f"--{name.replace('_', '-')}: --recipe auto chooses it: leave that out, or name the recipe"
                    )
            layers = (*layers[:-1], {**layers[-1], "recipe": self._plan_recipe(settings)})
        options = RunOptions(**collect_options(self, OPTIONS), endpoint=build_endpoint(self))
        return prepare_training(*layers, options=options)

    def _plan_recipe(self, settings: Mapping[str, object]) -> str:
        """Measures the network, plans, and returns the recipe."""
        from farflung.cli.progress import Bar
        from farflung.planning import choose_recipe
        from farflung.wall import LaunchEnv

        env = LaunchEnv.read()
        is_lead = env is None or env.rank == 0
        with Bar("planning", quiet=bool(self.quiet or self.json) or not is_lead) as bar:
            recipe = choose_recipe(
                {**settings, **collect_options(self, ("resume",))},
                env,
                endpoint=build_endpoint(self),
                deadline_s=float(str(settings.get("deadline", 60.0))),
                on_part=lambda name, _: bar.print_line(name),
            )
            bar.print_line(f"trains with {recipe}", force=True)
        return recipe

    @override
    def start(self, run: PreparedRun[RunConfig]) -> int:
        from farflung.runs import begin_training
        from farflung.wall import LaunchEnv

        env, wrap = LaunchEnv.read(), None
        if self.plan is not None:
            from farflung.planning import PlanWatch

            wrap = PlanWatch(self.plan, run.config, run.files.path).wrap
        with begin_training(run) as begin:
            if env is None or env.rank == 0:
                result = self.execute(run, begin if wrap is None else lambda sink: begin(wrap(sink)))
            else:
                result = begin(partial(announce_rank, env, quiet=bool(self.quiet or self.json)))
        return 130 if result.summary.get("interrupted") else 0


def announce_rank(env: LaunchEnv, event: Event, *, quiet: bool) -> None:
    """Prints that this rank has joined, once for each machine."""
    if not quiet and event["event"] == "begin" and event["rank"] == env.rank and env.local_rank == 0:
        create_stderr_console().print(
            f"rank {env.rank} of {env.size} has joined; progress is shown on rank 0"
        )
