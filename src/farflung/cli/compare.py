"""``farflung compare``: compares recipes on networks in virtual time."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

from farflung.cli.options import collect_options, with_settings
from farflung.cli.output import OutputOptions, create_stdout_console, print_files, print_json
from farflung.cli.progress import ComparisonProgress
from farflung.recipes import FAMILIES
from farflung.report import format_score
from farflung.runs import DEFAULT_COMPARED, DEFAULT_DEVICE, SimulatedConfig, watch_stop_signals
from farflung.types import Json

__all__ = ["Compare"]


@dataclass(frozen=True)
@with_settings(
    SimulatedConfig,
    exclude=(*FAMILIES, "recipe", "network", "seed", "encrypt", "threads", "checkpoint_every"),
)
class Compare(OutputOptions):
    """Compare recipes on networks, in virtual time.

    Shows the time to a target score, the final score, bytes sent, and the parts of the time. Each recipe trains
    once for each seed, with real arithmetic. If its learning does not depend on the network, its time on other
    networks is computed from that run. An interrupted comparison continues when it is started again with the same
    --out.
    """

    recipes: tuple[str, ...] = DEFAULT_COMPARED
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

        settings = collect_options(self, {*SimulatedConfig.list_settings(), "target"})
        out = self.out or Path("runs") / f"compare-{time.strftime('%Y%m%d-%H%M%S')}"
        with ComparisonProgress(quiet=self.quiet or self.json) as progress, watch_stop_signals() as stop:
            comparison = compare(
                self.recipes,
                self.networks,
                seeds=self.seeds,
                out=out,
                sink=progress,
                should_stop=stop.is_set,
                **settings,
            )
        rows, target = comparison.rows, comparison.target
        picture = comparison.draw_picture(out / "compare.png")
        if self.json:
            header: dict[str, Json] = {
                "simulated": True,
                "target": target,
                "device": settings.get("device", DEFAULT_DEVICE),
            }
            print_json({**header, "rows": [row.to_json() for row in rows], "folder": str(out)})
            return 0
        console = create_stdout_console()
        console.print(comparison.build_table(console.width))
        if any(row.time_to_target_s is None for row in rows):
            console.print(f"not every run reached {' '.join(format_score(target))}; --target sets another")
        print_files(picture=picture, runs=out / "runs")
        return 0
