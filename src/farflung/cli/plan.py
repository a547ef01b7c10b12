"""``farflung plan``: which recipe reaches a target first on a network, and in what time."""

from __future__ import annotations

import re
import time
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Literal

import tyro
from rich.text import Text

from farflung.cli.options import collect_options, with_settings
from farflung.cli.output import OutputOptions, create_stdout_console, print_files, print_json
from farflung.cli.progress import Bar
from farflung.errors import ConfigError
from farflung.recipes import FAMILIES
from farflung.runs import SimulatedConfig

__all__ = ["MakePlan"]

EXCLUDED = {
    "recipe",
    "network",
    "seed",
    "encrypt",
    "threads",
    "checkpoint_every",
    "evaluate_every",
    "elastic",
    "quorum",
}
"""Settings that a plan has no option for."""
PLAN_OPTIONS = ("within", "target", "share", "budget", "seeds", "loop", "data_stays", "max_memory")
"""Options of a plan that trains pilots."""


@dataclass(frozen=True)
@with_settings(SimulatedConfig, exclude=(*FAMILIES, *EXCLUDED, "faults", "count_evaluation", "deadline"))
class MakePlan(OutputOptions):
    """Find the recipe that reaches a target first on a network.

    Times the steps of each recipe without the model's arithmetic. Trains pilots of a quarter of the steps, the fastest
    recipes first, and rules out those that fall behind synchronous SGD with 16 bits by more than --within.
    An interrupted plan continues when it is started again with the same --out.
    With the script of a loop that calls farflung.attach, runs a few of its steps on this machine, alone and as they
    are, and only times the recipes: farflung plan --networks 4g --workers 4 -- train.py --epochs 3
    """

    script: tyro.conf.Positional[tuple[str, ...]] = ()
    """Script of Python with its arguments, behind two dashes."""
    recipes: tuple[str, ...] | None = None
    """Recipes to compare, with optional changes in brackets; when not given, some twenty that have won somewhere."""
    networks: tuple[str, ...] = ("lan-1g",)
    """Networks, by name or as TOML files; with several, the one where a recipe is slowest decides."""
    within: str | None = None
    """Score that may be lost against synchronous SGD with 16 bits: 1% are points of accuracy, 0.05 is in units of the
    score. When not given, three standard errors of a score on the test set."""
    target: float | None = None
    """Score to reach, in place of --within; synchronous SGD with 16 bits is then trained whole."""
    share: float | None = None
    """Length of a pilot over that of the training; 0.25 when not given."""
    budget: float | None = None
    """Minutes of this machine's processor for the plan, which no pilot is begun to exceed. When not given, pilots have
    as many steps as the training, for each seed, and twice as many while nothing but the reference is good enough."""
    seeds: tuple[int, ...] | None = None
    """Seeds of the pilots; 0 when not given."""
    loop: Literal["train", "attach", "ddp_hook"] | None = None
    """Loop that is to train: farflung train, or your own with farflung.attach or farflung.ddp_hook; train when not
    given."""
    data_stays: bool | None = None
    """Leave out recipes that need samples of other replicas."""
    max_memory: float | None = None
    """GiB of each replica, without buffers of messages; recipes that need more are left out."""
    out: Path | None = None
    """Folder of the plan; a new one under runs/ when not given."""

    def run(self) -> int:
        from farflung.planning import plan, plan_script

        out = self.out or Path("runs") / f"plan-{time.strftime('%Y%m%d-%H%M%S')}"
        names = [
            *SimulatedConfig.list_settings(),
            *PLAN_OPTIONS,
            "recipes",
            *(["out"] if self.script else []),
        ]
        options = collect_options(self, names)
        if self.within is not None:
            options["within"] = _parse_score(self.within)
        with Bar("planning", quiet=self.quiet or self.json) as bar:
            parts = count()

            def show_part(name: str, num_left: int) -> None:
                bar.detail = name
                bar.advance(next(parts))
                bar.total = bar.num_done + num_left
                bar.print_line(name)

            if self.script:
                result = plan_script(self.script, self.networks, on_part=show_part, **options)
            else:
                result = plan(
                    options.pop("workload", None), self.networks, out=out, on_part=show_part, **options
                )
        if self.json:
            print_json({**result.to_json(), "folder": None if self.script else str(out)})
            return 0
        console = create_stdout_console()
        console.print(result.build_table())
        command = f"{result.command} --plan {out / 'plan.json'}" if result.command else ""
        for line in filter(None, (command, result.attach_line)):
            console.print(Text(line), soft_wrap=True)
        if not self.script:
            print_files(plan=out / "plan.json")
        return 0


def _parse_score(text: str) -> float:
    """Parses a score, or points of accuracy if it ends in %."""
    match = re.fullmatch(r"(\d+\.?\d*|\.\d+)(e-?\d+)?(%?)", text)
    if match is None:
        raise ConfigError(f"--within {text}: write it as 1% or 0.05")
    return float(text.rstrip("%")) / (100 if match[3] else 1)
