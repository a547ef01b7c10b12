"""``farflung train``: trains on workers of this machine, or joins a run that torchrun has started."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from typing_extensions import override

from farflung.cli.options import ENDPOINT, RunOptions, endpoint_of, finish, with_options, with_settings
from farflung.errors import ConfigError
from farflung.runs import RunConfig
from farflung.types import Json

__all__ = ["Train"]


@dataclass(frozen=True)
@with_settings(RunConfig)
@with_options(ENDPOINT)
class Train(RunOptions):
    """Train a model on several workers of this machine.

    Under torchrun the workers are torchrun's and this command joins them, on one machine or several:
    torchrun --nproc-per-node 4 -m farflung train ...
    Under srun and mpirun it does the same.
    """

    elsewhere: ClassVar[frozenset[str]] = frozenset({"network", "device", "faults", "count_evaluation"})

    network: str | None = None
    """Refused: farflung lab --network NAME train ... has real workers on the links of a network, and farflung simulate
    models them."""
    device: str = "cpu"
    """Train on this device of torch's: cpu; cuda, one for each replica of this machine; or cuda:0, which all of them
    share. Of the command line alone."""
    pace: str | None = None
    """Compute no faster than this device: a name (farflung networks lists them) or a TOML file. Replicas idle until its
    time has passed; steps for which this machine is too slow are counted."""
    data_stays: bool | None = None
    """Refuse to train by a recipe that sends samples to other replicas, or has them computed there."""

    @override
    def start(self, filed: Mapping[str, Json]) -> int:
        """Makes the run; ``filed`` are its settings from a file."""
        if self.network is not None:
            raise ConfigError(
                f"--network: train uses the links of this machine: use farflung lab --network {self.network} train ... "
                f"(real sockets on shaped links, needs root) or farflung simulate --network {self.network}"
            )
        from farflung.cli.progress import Progress
        from farflung.runs import prepare_training, ready_to_train
        from farflung.runtime import Seat

        run = prepare_training(filed, self.given(), **self.where)
        seat = Seat.taken()
        leads = seat is None or seat.rank == 0
        ready = ready_to_train(
            run,
            endpoint=endpoint_of(self),
            device=self.device,
            pace=self.pace,
            data_stays=bool(self.data_stays),
        )
        with ready as begin:
            self.show(run)
            with self.shown(run, Progress(quiet=bool(self.quiet or self.json) or not leads)) as events:
                ended = begin(events)
        if leads:
            finish(ended, as_json=bool(self.json))
        return 130 if ended.summary.get("interrupted") else 0
