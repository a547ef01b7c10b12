"""``farflung compare``: compares recipes on networks in virtual time."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from pathlib import Path

from farflung.cli.options import given, with_settings
from farflung.cli.output import OutputOptions, print_files, stdout_console
from farflung.cli.progress import ComparisonProgress
from farflung.recipes import FAMILIES
from farflung.report import score_words
from farflung.runs import COMPARED, DEVICE, SimulatedConfig, asked_to_stop
from farflung.types import Json

__all__ = ["Compare"]


@dataclass(frozen=True)
@with_settings(
    SimulatedConfig,
    without=(*FAMILIES, "recipe", "network", "seed", "encrypt", "threads", "checkpoint_every"),
)
class Compare(OutputOptions):
    """Compare recipes on networks in virtual time: time to a target, accuracy, bytes, and parts of the time.

    Each recipe trains once for each seed, with real arithmetic. If its learning does not depend on the network,
    its time on other networks is computed from that run. An interrupted comparison continues when it is started
    again with the same --out.
    """

    recipes: tuple[str, ...] = COMPARED
    """Recipes, with optional changes in brackets: synchronous(codec=topk(density=0.01), learning_rate=0.02). The
    first is the baseline."""
    networks: tuple[str, ...] = ("wifi-10mbps",)
    """Networks, by name or as TOML files."""
    seeds: tuple[int, ...] = (0,)
    """Seeds."""
    target: float | None = None
    """The score to reach; when not given, the best that every run reached."""
    evaluate_every: int | None = None
    """Steps between evaluations; a twentieth of the steps when not given."""
    out: Path | None = None
    """The folder of all runs, the table and the picture; a new one under runs/ when not given."""

    def run(self) -> int:
        from farflung.runs import compare

        settings = given(self, {*SimulatedConfig.settings(), "target"})
        out = self.out or Path("runs") / f"compare-{time.strftime('%Y%m%d-%H%M%S')}"
        with ComparisonProgress(quiet=self.quiet or self.json) as progress, asked_to_stop() as stop:
            comparison = compare(
                self.recipes,
                self.networks,
                seeds=self.seeds,
                out=out,
                show=progress,
                stop_asked=stop.is_set,
                **settings,
            )
        rows, target = comparison.rows, comparison.target
        picture = comparison.picture(out / "compare.png")
        if self.json:
            header: dict[str, Json] = {
                "simulated": True,
                "target": target,
                "device": settings.get("device", DEVICE),
            }
            print(json.dumps({**header, "rows": [row.to_json() for row in rows], "folder": str(out)}))
            return 0
        console = stdout_console()
        console.print(comparison.table(console.width))
        if any(row.time_to_target_s is None for row in rows):
            console.print(f"not every run reached {' '.join(score_words(target))}; --target sets another")
        print_files(picture=picture, runs=out / "runs")
        return 0
