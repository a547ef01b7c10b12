"""``farflung train``: trains on workers of this machine, or joins a run that torchrun has started."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar

import tyro

from farflung.cli.events import teller
from farflung.cli.join import NETWORK, Reach, work
from farflung.cli.launch import launch
from farflung.cli.options import RunOptions, finish
from farflung.cli.progress import Progress
from farflung.cli.run import EVENTS, RunConfig, RunFolder
from farflung.comm import collective_named
from farflung.comm.keys import load_keys
from farflung.data import Share
from farflung.errors import ConfigError
from farflung.network import device_profile, network_profile
from farflung.replica import place
from farflung.telemetry import Event, Sink
from farflung.timing import forward_flops
from farflung.types import Json

__all__ = ["Train"]


@dataclass(frozen=True)
class Train(RunOptions):
    """Train a model on several workers of this machine.

    Under torchrun the workers are torchrun's and this command joins them, on one machine or several:
    torchrun --nproc-per-node 4 -m farflung train ...
    """

    elsewhere: ClassVar[frozenset[str]] = frozenset({"network", "device", "faults"})

    encrypt: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Encrypt messages within this machine too, to see what it costs; those between machines always are."""
    interface: str | None = None
    """Under torchrun on several machines: the address, or the name of the network interface, at which the others
    reach this one; when not given, the one on the way to the master address."""
    keys: Path | None = None
    """Under torchrun on several machines: the folder made by farflung keys, with this machine's secret key and the
    public keys of all; when not given, keys are made for the run and exchanged through torchrun's store, so whoever
    reaches that store can take part."""

    network: str | None = None
    """Pace the messages as this network would: a name (farflung networks lists them) or a TOML file. The workers are on
    one machine, and need no root; farflung lab has real sockets on shaped links. Of the command line alone."""
    device: str = "cpu"
    """Train on this device of torch's: cpu; cuda, one for each replica of this machine; or cuda:0, which all of them
    share. Of the command line alone."""
    pace: str | None = None
    """Compute no faster than this device: a name (farflung networks lists them) or a TOML file. Replicas idle until its
    time has passed; steps for which this machine is too slow are counted."""

    def start(self, filed: Mapping[str, Json]) -> int:
        """Makes the run; ``filed`` are its settings from a file."""
        config = self.resolved(filed)
        folder = self.folder(config)
        if _under_torchrun():
            if self.network is not None:
                raise ConfigError(
                    "--network paces workers that farflung train starts itself: leave torchrun out, or use farflung lab"
                )
            return self._join(config, folder)
        if self.interface is not None or self.keys is not None:
            raise ConfigError(
                "--interface and --keys are for several machines: start this under torchrun there"
            )
        task = config.make_workload()
        place(self.device, local_size=config.workers)
        if self.pace is not None:
            device_profile(self.pace, forward_flops=forward_flops(task))
        if self.network is not None:
            network_profile(self.network).for_nodes(config.workers)
            if collective_named(config.collective).by_backend:
                raise ConfigError(
                    f"--network: the backend's own collectives (--collective {config.collective}) cannot be paced: "
                    "choose another one"
                )
        shares = config.check(task)
        if folder.resumed:
            config.check_resumable(folder, task)
        self.show(config, shares)
        with Progress(quiet=self.quiet or self.json) as progress:
            summary = launch(
                config,
                folder,
                progress,
                self.replay,
                device=self.device,
                pace=self.pace or "",
                network=self.network or "",
            )
        finish(
            config,
            folder,
            {**summary, "partition": config.split_json(shares)},
            shares,
            as_json=self.json,
        )
        return 130 if summary.get("interrupted") else 0

    def resolved(self, filed: Mapping[str, Json]) -> RunConfig:
        """The configuration: options, then the file's, then the run's that is resumed."""
        given = self.given()
        if _under_torchrun():
            size = int(os.environ["WORLD_SIZE"])
            if given.setdefault("workers", size) != size:
                raise ConfigError(f"--workers {self.workers}: torchrun has started {size}")
        return RunConfig.resolve(self.stored(), filed, given)

    def _join(self, config: RunConfig, folder: RunFolder) -> int:
        rank = int(os.environ["RANK"])
        reach = Reach(self.interface, None if self.keys is None else load_keys(self.keys))
        task = config.make_workload()
        shares: list[Share] = []
        if rank == 0:
            shares = config.check(task)
            folder.create(config, self.replay)
            self.show(config, shares)
        with Progress(quiet=self.quiet or self.json or rank != 0) as progress:
            show = _both(progress, teller(os.environ[EVENTS])) if EVENTS in os.environ else progress
            network, pace = os.environ.get(NETWORK, ""), self.pace or ""
            summary = work(config, folder, show, reach, task, device=self.device, pace=pace, network=network)
        if rank == 0:
            finish(config, folder, summary, shares, as_json=self.json)
        return 0


def _both(one: Sink, other: Sink) -> Sink:
    def tell(event: Event) -> None:
        one(event)
        other(event)

    return tell


def _under_torchrun() -> bool:
    return "WORLD_SIZE" in os.environ and "RANK" in os.environ
