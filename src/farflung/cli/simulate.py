"""``farflung simulate``: trains in virtual time, with the real arithmetic on a modelled clock."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import ClassVar

from typing_extensions import override

from farflung.cli.options import ENDPOINT, KEPT, RunCommand, finish, given, with_settings
from farflung.runs import RunConfig, RunOptions, SimulatedConfig, asked_to_stop
from farflung.telemetry import Event, Sink
from farflung.types import Json

__all__ = ["Simulate"]


@dataclass(frozen=True)
@with_settings(SimulatedConfig, without=("encrypt", "threads"))
class Simulate(RunCommand):
    """Train in virtual time: as farflung train would, on a network and devices that need not be there.

    The arithmetic is real, and parameters and bytes sent are those of real workers; only the clock is modelled.
    """

    compute_on: str = "cpu"
    """Torch's device for the arithmetic: cpu; cuda, one for each replica; or cuda:0, which all of them share. Times are
    those of --device, whatever computes."""

    kind: ClassVar[type[RunConfig]] = SimulatedConfig
    elsewhere: ClassVar[frozenset[str]] = frozenset({*ENDPOINT, "data_stays", "pace", "threads"})

    @override
    def start(self, filed: Mapping[str, Json]) -> int:
        """Makes the run; ``filed`` are its settings from a file."""
        from farflung.cli.progress import Progress
        from farflung.runs import prepared, simulate_prepared

        options = RunOptions(**given(self, KEPT), device=self.compute_on)
        run = prepared(SimulatedConfig, filed, self.given(), options=options)
        progress = Progress(quiet=bool(self.quiet or self.json), simulated=True)
        with asked_to_stop() as stop, ExitStack() as stack:
            opened: list[Sink] = []

            def tell(event: Event) -> None:
                if not opened:  # only now nothing is refused any more
                    self.show(run)
                    opened.append(stack.enter_context(progress))
                opened[0](event)

            ended = simulate_prepared(run, tell, stop_asked=stop.is_set)
        finish(ended, as_json=bool(self.json))
        return 130 if stop.is_set() else 0
