"""``farflung simulate``: trains in virtual time, with real arithmetic on a modelled clock."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from typing_extensions import override

from farflung.cli.options import ENDPOINT, STORAGE_OPTIONS, RunCommand, collect_options, with_settings
from farflung.runs import RunConfig, RunOptions, SimulatedConfig, watch_stop_signals

if TYPE_CHECKING:  # imports torch, which help does without
    from farflung.runs import PreparedRun

__all__ = ["Simulate"]


@dataclass(frozen=True)
@with_settings(SimulatedConfig, exclude=("encrypt", "threads"))
class Simulate(RunCommand):
    """Train in virtual time, on a modelled network and modelled devices.

    The arithmetic is real, and parameters and bytes sent are those of real workers; only the clock is modelled.
    """

    compute_on: str = "cpu"
    """Torch's device for the arithmetic: cpu; cuda, one for each replica; or cuda:0, shared by all of them.
    Times are those of --device, on any hardware."""

    config_class: ClassVar[type[RunConfig]] = SimulatedConfig
    ignored_keys: ClassVar[frozenset[str]] = frozenset(
        {*ENDPOINT, "data_stays", "pace", "threads"} - {"connections"}
    )

    @override
    def prepare(self, *layers: Mapping[str, object]) -> PreparedRun[SimulatedConfig]:
        from farflung.runs import prepare_run

        options = RunOptions(**collect_options(self, STORAGE_OPTIONS), device=self.compute_on)
        return prepare_run(SimulatedConfig, *layers, options=options)

    @override
    def start(self, run: PreparedRun[SimulatedConfig]) -> int:
        from farflung.runs import begin_simulation

        with watch_stop_signals() as stop, begin_simulation(run, should_stop=stop.is_set) as begin:
            self.execute(run, begin)
        return 130 if stop.is_set() else 0
