"""``farflung probe``: measures the network between machines, for simulations and plans."""

from __future__ import annotations

import platform
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import torch
import tyro

from farflung.cli.calibrate import Calibrate
from farflung.cli.options import ENDPOINT, build_endpoint, with_options
from farflung.cli.output import create_stderr_console, print_json, print_table
from farflung.comm import ExchangeChannel, Purpose
from farflung.errors import ConfigError
from farflung.files import path_exists, write_text
from farflung.network import format_profile
from farflung.types import Communicator, Payload
from farflung.wall import LaunchEnv
from farflung.wall.measuring import NetworkMeasurement, connect_ranks, probe_network

__all__ = ["Probe"]


@dataclass(frozen=True)
@with_options(ENDPOINT)
class Probe:
    """Measure the network between machines; write its profile with --out.

    Start one process on each machine, by torchrun, srun or mpirun:
    torchrun --nnodes 3 --nproc-per-node 1 ... -m farflung probe --out net.toml
    Each link is measured alone, then those of each machine at once, then all at once, which shows what they share.
    """

    out: Path | None = None
    """Write the profile to this file, on rank 0; print it when not given."""
    name: str = "probed"
    """Name of the network."""
    workload: str | None = None
    """Also calibrate this workload on each machine, as farflung calibrate does without codecs; each writes
    device-RANK.toml beside --out."""
    deadline: float = 60.0
    """Seconds of silence after which another process is lost."""
    json: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Print the measurement as JSON."""

    def run(self) -> int:
        env = LaunchEnv.read()
        if env is None or env.size < 2:
            raise ConfigError(
                "probe measures between processes on several machines: start one on each, by torchrun --nnodes 2 "
                "--nproc-per-node 1 --master-addr HOST ... -m farflung probe"
            )
        if self.out is not None and path_exists(self.out):
            raise ConfigError(f"--out {self.out}: the file exists; choose another name or remove it")
        if self.out is not None and not self.out.parent.is_dir():
            raise ConfigError(f"--out {self.out}: there is no folder {self.out.parent}")
        if self.workload is not None and self.out is None:
            raise ConfigError("--workload: devices are written beside --out: name it")
        measurement, names = self._measure(env)
        if measurement is not None:
            self._report(measurement, names)
        if self.workload is not None and self.out is not None:
            Calibrate(self.workload, codecs=(), out=self.out.with_name(f"device-{env.rank}.toml")).run()
        return 0

    def _measure(self, env: LaunchEnv) -> tuple[NetworkMeasurement | None, list[str]]:
        """Returns the measurement, on rank 0, and the names of all machines."""
        with connect_ranks(env, "probe", endpoint=build_endpoint(self), deadline_s=self.deadline) as runtime:
            if env.rank == 0:
                create_stderr_console().print(
                    f"measures the links between {env.size} processes", soft_wrap=True
                )
            measurement = runtime.drive(probe_network(runtime))
            names = runtime.launch(_gather_names(runtime.comm)).wait()
        return measurement, names

    def _report(self, measurement: NetworkMeasurement, names: list[str]) -> None:
        links = measurement.links.items()
        if self.json:
            rows = [{"from": names[src], "to": names[dst], **asdict(link)} for (src, dst), link in links]
            totals = {name: getattr(measurement, name) for name in ("up_bps", "down_bps", "total_bps")}
            print_json({"machines": names, "links": rows, **totals})
        else:
            print_table(
                ["from, to", "one way", "median", "Mbit/s", "lowest", "highest"],
                [
                    [
                        f"{names[src]}, {names[dst]}",
                        f"{1e3 * link.latency_s:.3g} ms",
                        f"{1e3 * link.median_latency_s:.3g} ms",
                        *(f"{bps / 1e6:.3g}" for bps in (link.bandwidth_bps, link.low_bps, link.high_bps)),
                    ]
                    for (src, dst), link in links
                ],
            )
        comments = [f"measured by farflung probe between {', '.join(names)}"]
        profile = measurement.build_profile(self.name, names)
        text = format_profile(profile, comments)
        if self.out is not None:
            write_text(self.out, text)
            create_stderr_console().print(f"network  {self.out}", soft_wrap=True, markup=False)
        elif not self.json:
            print(text, end="")


async def _gather_names(comm: Communicator) -> list[str]:
    """Gathers the machines' names on rank 0, each with its rank if several are equal."""
    channel = ExchangeChannel(comm, Purpose.MEASURE.build_exchange_id(1 << 20), 0)
    name = platform.node() or "machine"
    if comm.rank:
        channel.send(Payload((torch.frombuffer(bytearray(name.encode()), dtype=torch.uint8),)), 0, comm.rank)
        return []
    names = [name]
    for rank in range(1, comm.size):
        (text,) = (await channel.recv(rank, rank)).iter_tensors()
        names.append(bytes(text.numpy()).decode(errors="replace"))
    return [name if names.count(name) == 1 else f"{name} {rank}" for rank, name in enumerate(names)]
