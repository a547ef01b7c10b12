"""``farflung train``: trains on workers of this machine, or joins a run that torchrun has started."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from typing_extensions import override

from farflung.cli.options import RunOptions, finish, with_settings
from farflung.runs import RunConfig
from farflung.types import Json

__all__ = ["Train"]


@dataclass(frozen=True)
@with_settings(RunConfig)
class Train(RunOptions):
    """Train a model on several workers of this machine.

    Under torchrun the workers are torchrun's and this command joins them, on one machine or several:
    torchrun --nproc-per-node 4 -m farflung train ...
    Under srun and mpirun it does the same.
    """

    elsewhere: ClassVar[frozenset[str]] = frozenset({"network", "device", "faults", "count_evaluation"})

    interface: str | None = None
    """Under torchrun on several machines: the address, or the name of the network interface, at which the others
    reach this one; when not given, the one on the way to the master address."""
    port: str | None = None
    """Under torchrun: the port at which this replica listens, or a range such as 7000-7100 of which each replica here
    takes one, for firewalls; when not given, any that is free."""
    advertise: str | None = None
    """Under torchrun on several machines: HOST or HOST:PORT by which the others reach this one, where that is another
    address than the one it listens at: behind port forwarding, in a container. none where nobody can connect to this
    one, as behind a home router: it connects to the others, and one that can be reached relays between two that
    cannot."""
    keys: Path | None = None
    """Under torchrun on several machines: the folder made by farflung keys, with this machine's secret key and the
    public keys of all; when not given, keys are made for the run and exchanged through torchrun's store, so whoever
    reaches that store can take part."""

    network: str | None = None
    """Pace the messages as this network would: a name (see farflung list networks) or a TOML file. The workers are on
    one machine, and need no root; farflung lab has real sockets on shaped links. Of the command line alone."""
    device: str = "cpu"
    """Train on this device of torch's: cpu; cuda, one for each replica of this machine; or cuda:0, which all of them
    share. Of the command line alone."""
    pace: str | None = None
    """Compute no faster than this device: a name (see farflung list devices) or a TOML file. Replicas idle until its
    time has passed; steps for which this machine is too slow are counted."""
    data_stays: bool | None = None
    """Refuse to train by a recipe that sends samples to other replicas, or has them computed there."""

    @override
    def start(self, filed: Mapping[str, Json]) -> int:
        """Makes the run; ``filed`` are its settings from a file."""
        from farflung.cli.progress import Progress
        from farflung.runs import prepare_training, ready_to_train
        from farflung.runtime import Seat

        run = prepare_training(filed, self.given(), **self.where)
        seat = Seat.taken()
        leads = seat is None or seat.rank == 0
        ready = ready_to_train(
            run,
            interface=self.interface,
            port=self.port,
            advertise=self.advertise,
            keys=self.keys,
            network=self.network,
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
