"""``farflung simulate``: trains in virtual time, with real arithmetic on a modelled clock."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from typing_extensions import override

from farflung.cli.options import ENDPOINT, KEPT, RunCommand, given, with_settings
from farflung.runs import RunConfig, RunOptions, SimulatedConfig, asked_to_stop

if TYPE_CHECKING:  # imports torch, which help does without
    from farflung.runs import Prepared

__all__ = ["Simulate"]


@dataclass(frozen=True)
@with_settings(SimulatedConfig, without=("encrypt", "threads"))
class Simulate(RunCommand):
    """Train in virtual time: like farflung train, on a modelled network and modelled devices.

    The arithmetic is real, and parameters and bytes sent are those of real workers; only the clock is modelled.
    """

    compute_on: str = "cpu"
    """Torch's device for the arithmetic: cpu; cuda, one for each replica; or cuda:0, shared by all of them.
    Times are those of --device, on any hardware."""

    kind: ClassVar[type[RunConfig]] = SimulatedConfig
    elsewhere: ClassVar[frozenset[str]] = frozenset({*ENDPOINT, "data_stays", "pace", "threads"})

    @override
    def prepare(self, *layers: Mapping[str, object]) -> Prepared[SimulatedConfig]:
        from farflung.runs import prepared

        options = RunOptions(**given(self, KEPT), device=self.compute_on)
        return prepared(SimulatedConfig, *layers, options=options)

    @override
    def start(self, run: Prepared[SimulatedConfig]) -> int:
        from farflung.runs import ready_to_simulate

        with asked_to_stop() as stop, ready_to_simulate(run, stop_asked=stop.is_set) as begin:
            self.make(run, begin)
        return 130 if stop.is_set() else 0
