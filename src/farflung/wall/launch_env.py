"""The environment that torchrun, Slurm's srun or mpirun gives a process: its rank, and where its peers meet."""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from farflung.comm.interface import LOOPBACK, check_host, route_to
from farflung.errors import ConfigError
from farflung.lazy import renamed
from farflung.wall.stores import reached, serving

__all__ = ["LaunchEnv", "interface_to_master"]

_MPI = {
    "Open MPI": (
        "mpirun -x MASTER_ADDR={} -x MASTER_PORT=29500",
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
    ),
    "MPI": (
        "mpiexec -genv MASTER_ADDR {} -genv MASTER_PORT 29500",
        "PMI_RANK",
        "PMI_SIZE",
        "MPI_LOCALRANKID",
        "MPI_LOCALNRANKS",
    ),
}
"""By launcher: a command that sets the master address, and its variables for rank, size, local rank and local size."""
_served: dict[int, dist.Store] = {}
"""Stores that this process serves, by port."""
_SLURM_PORTS = 15_000, 10_000
"""From which port on the jobs of Slurm meet, and on how many."""


@dataclass(frozen=True, slots=True)
class LaunchEnv:
    """The rank of this process, and where it meets its peers.

    Args:
      rank: its number.
      size: how many there are.
      local_rank: its number among those of this machine.
      local_size: how many of them are on this machine.
      meeting: a file through which all of them, on one machine, find each other; ``None``: the store at the master
        address.
      master: that address and its port, as far as they are known.
      started_by: the launcher, for messages.
      how_to_meet: how the launcher is given a master address, for messages.
    """

    rank: int
    size: int
    local_rank: int
    local_size: int
    meeting: Path | None = None
    master: tuple[str | None, str | None] = (None, None)
    started_by: str = "torchrun"
    how_to_meet: str = "set them, or start with torchrun"

    @staticmethod
    def read(environment: Mapping[str, str] = os.environ) -> LaunchEnv | None:
        """Reads the variables of torchrun, else of Slurm, else of MPI.

        Returns:
          ``None`` where the process was started alone: a single task, or a shell in a Slurm allocation outside of any
          step.

        Raises:
          ConfigError: the variables contradict each other or are no numbers.
        """
        found = environment.get
        master = found("MASTER_ADDR"), found("MASTER_PORT")
        if ("RANK" in environment) != ("WORLD_SIZE" in environment):
            there, missing = ("RANK", "WORLD_SIZE") if "RANK" in environment else ("WORLD_SIZE", "RANK")
            raise ConfigError(f"{there} is set and {missing} is not: set both, or start with torchrun")
        if "RANK" in environment:
            rank, size = _number(environment, "RANK"), _number(environment, "WORLD_SIZE")
            local_rank = _number(environment, "LOCAL_RANK", rank)
            return LaunchEnv(
                rank, size, local_rank, _number(environment, "LOCAL_WORLD_SIZE", size), master=master
            )._checked()
        if "SLURM_STEP_ID" in environment and "SLURM_PROCID" in environment:
            size = _number(environment, "SLURM_STEP_NUM_TASKS", _number(environment, "SLURM_NTASKS", 1))
            if size > 1:
                return _by_slurm(environment, size, master)._checked()
        for started_by, (how, *names) in _MPI.items():
            if names[0] in environment and names[1] in environment:
                rank, size = (_number(environment, name) for name in names[:2])
                if size > 1:
                    local_rank, local_size = (
                        _number(environment, name, usual)
                        for name, usual in zip(names[2:], (rank, size), strict=True)
                    )
                    alone = local_size == size
                    how_to_meet = how.format(LOOPBACK if alone else "HOST_OF_RANK_0")
                    return LaunchEnv(
                        rank, size, local_rank, local_size, master=master, started_by=started_by,
                        how_to_meet=how_to_meet,
                    )._checked()  # fmt: skip
        return None

    def store(self, join_s: float) -> dist.Store | None:
        """Opens the store through which the replicas find each other; ``None`` for a single replica.

        Args:
          join_s: how long the others may take to come, in seconds.

        Raises:
          ConfigError: it is not known where, or there is no such host, or it cannot be listened there.
          DeadlinePassed: the store of rank 0 was not reached.
        """
        if self.size == 1:
            return None
        if self.meeting is not None:
            return dist.FileStore(str(self.meeting), self.size)
        address, port = self._met_at()
        check_host(address, f"MASTER_ADDR {address}")
        patience = timedelta(seconds=join_s)
        agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == str(True)
        if self.rank == 0 and not agent:
            return self._kept(address, int(port), patience)

        def connect() -> dist.Store:
            socket.create_connection(
                (address, int(port)), timeout=join_s
            ).close()  # else torch prints its stack
            if agent:
                found = rendezvous("env://", self.rank, self.size, timeout=patience)
                store: dist.Store = next(iter(found))[0]
                return store
            return dist.TCPStore(address, int(port), self.size, is_master=False, timeout=patience)

        return reached(connect, f"its store at {address}:{port}", join_s)

    def _kept(self, address: str, port: int, patience: timedelta) -> dist.Store:
        """Serves the store of rank 0: on loopback at that address alone, else as torch makes it.

        The process keeps it for its later runs, since another rank may begin the next run while this one ends.
        """
        if port not in _served:
            _served[port] = self._serving(address, port, patience)
        _served[port].set_timeout(patience)
        return _served[port]

    def _serving(self, address: str, port: int, patience: timedelta) -> dist.Store:
        if address in (LOOPBACK, "localhost"):
            with suppress(OSError):
                return serving(LOOPBACK, port)
        try:
            return dist.TCPStore(
                LOOPBACK, port, self.size, is_master=True, timeout=patience, wait_for_workers=False,
                multi_tenant=True,
            )  # fmt: skip
        except RuntimeError as error:
            raise ConfigError(
                f"MASTER_PORT {port}: cannot be listened at ({str(error).splitlines()[0]}): choose another"
            ) from None

    def interface(self) -> str:
        """Finds the address of this machine on the way to the other replicas.

        Raises:
          ConfigError: it is not known where they are, or there is no way to them.
        """
        if self.size == 1 or self.meeting is not None:
            return LOOPBACK
        return route_to(self._met_at()[0])

    def _met_at(self) -> tuple[str, str]:
        address, port = self.master
        if address and port and port.isdecimal() and int(port) <= 65535:
            return address, port
        missing = [
            name for name, value in zip(("MASTER_ADDR", "MASTER_PORT"), self.master, strict=True) if not value
        ]
        raise ConfigError(
            f"{self.started_by} has started {self.size} processes, and {' and '.join(missing) or 'MASTER_PORT'} "
            f"{'do' if len(missing) > 1 else 'does'} not say where they meet: {self.how_to_meet}"
        )

    @staticmethod
    def taken(environment: Mapping[str, str] = os.environ) -> LaunchEnv | None:
        """Does what :meth:`read` does, under its name of 0.1; until 0.3."""
        renamed("Seat.taken()", "LaunchEnv.read()")
        return LaunchEnv.read(environment)

    def _checked(self) -> LaunchEnv:
        if self.rank < self.size and self.local_rank < self.local_size <= self.size:
            return self
        raise ConfigError(
            f"{self.started_by} says rank {self.rank} of {self.size}, {self.local_rank} of {self.local_size} on this "
            "machine: that cannot be"
        )


def interface_to_master(size: int) -> str:
    """Finds the address of this machine on the way to the master address.

    Returns:
      The address; loopback for a single replica, or where no master address is given.
    """
    if size == 1:
        return LOOPBACK
    address = os.environ.get("MASTER_ADDR")
    if not address and (env := LaunchEnv.read()) is not None:
        address = env.master[0]
    return route_to(address or LOOPBACK)


def _number(environment: Mapping[str, str], name: str, usual: int | None = None) -> int:
    text = environment.get(name)
    if text is None and usual is not None:
        return usual
    if text is None or not text.isdecimal():
        raise ConfigError(
            f"{name} is {text!r} in the environment, and no number: unset it, or start with torchrun"
        )
    return int(text)


def _by_slurm(environment: Mapping[str, str], size: int, master: tuple[str | None, str | None]) -> LaunchEnv:
    address, port = master
    nodes = environment.get("SLURM_STEP_NODELIST") or environment.get("SLURM_JOB_NODELIST", "")
    if address is None:
        alone = environment.get("SLURM_STEP_NUM_NODES", environment.get("SLURM_NNODES")) == "1"
        address = LOOPBACK if alone else _first_host(nodes)
    if port is None:
        first, count = _SLURM_PORTS
        job, step = (_number(environment, name, 0) for name in ("SLURM_JOB_ID", "SLURM_STEP_ID"))
        port = str(first + (job + step) % count)
    rank = _number(environment, "SLURM_PROCID")
    tasks = _tasks_per_node(environment.get("SLURM_STEP_TASKS_PER_NODE", ""))
    node = _number(environment, "SLURM_NODEID", 0)
    return LaunchEnv(
        rank,
        size,
        _number(environment, "SLURM_LOCALID", rank),
        tasks[node] if node < len(tasks) else size,
        master=(address, port),
        started_by="Slurm",
        how_to_meet="export them before srun: MASTER_ADDR=HOST_OF_RANK_0 MASTER_PORT=29500",
    )


def _first_host(nodes: str) -> str | None:
    """The first of a list as Slurm writes it: ``gpu[003-007,12],login`` begins with ``gpu003``."""
    found = re.match(r"([^,\[\]]+)(?:\[(\d+)[^\]]*\]([^,\[\]]*))?", nodes)
    return None if found is None else "".join(part or "" for part in found.groups())


def _tasks_per_node(text: str) -> list[int]:
    """Of each node, from what Slurm writes: ``4(x2),3`` is 4, 4 and 3."""
    counts: list[int] = []
    for count, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", text):
        counts += [int(count)] * int(times or 1)
    return counts
