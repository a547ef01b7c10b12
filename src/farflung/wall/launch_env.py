"""The environment that torchrun, Slurm, MPI or Flux gives a process: its rank, and where its peers meet."""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

from farflung.comm.interface import check_host, loopback_address, route_to
from farflung.errors import ConfigError
from farflung.wall.stores import host_of, reached, serving

__all__ = ["LaunchEnv", "interface_to_master"]


@dataclass(frozen=True, slots=True)
class _Launcher:
    """The variables of a launcher that says nothing about where processes meet.

    Args:
      name: for messages.
      rank, size, local_rank, local_size: the variables; of the last two the first that is set.
      nodes: the variable with the number of machines, for a launcher that says no local size.
      how_to_meet: a command that sets the master address.
    """

    name: str
    rank: str
    size: str
    local_rank: tuple[str, ...]
    local_size: tuple[str, ...]
    how_to_meet: str
    nodes: str = ""


_LAUNCHERS = (
    _Launcher(
        "Open MPI",
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        ("OMPI_COMM_WORLD_LOCAL_RANK",),
        ("OMPI_COMM_WORLD_LOCAL_SIZE",),
        "mpirun -x MASTER_ADDR={} -x MASTER_PORT=29500",
    ),
    _Launcher(
        "MVAPICH2",
        "MV2_COMM_WORLD_RANK",
        "MV2_COMM_WORLD_SIZE",
        ("MV2_COMM_WORLD_LOCAL_RANK",),
        ("MV2_COMM_WORLD_LOCAL_SIZE",),
        "mpirun_rsh ... MASTER_ADDR={} MASTER_PORT=29500 COMMAND",
    ),
    _Launcher(
        "Flux",
        "FLUX_TASK_RANK",
        "FLUX_JOB_SIZE",
        ("FLUX_TASK_LOCAL_ID",),
        (),
        "flux run --env=MASTER_ADDR={} --env=MASTER_PORT=29500",
        nodes="FLUX_JOB_NNODES",
    ),
    _Launcher(  # MPICH, Intel MPI, Cray PALS
        "MPI",
        "PMI_RANK",
        "PMI_SIZE",
        ("MPI_LOCALRANKID", "PMI_LOCAL_RANK"),
        ("MPI_LOCALNRANKS", "PMI_LOCAL_SIZE"),
        "mpiexec -genv MASTER_ADDR {} -genv MASTER_PORT 29500",
    ),
)
_WITHOUT_SIZE = "PMIX_RANK", "PALS_RANKID", "ALPS_APP_PE"
"""Ranks that some launchers give without the number of processes."""
_BY_HAND = "set RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT for each process"
_served: dict[int, dist.Store] = {}
"""Stores that this process serves, by port."""
_SLURM_PORTS = 15_000, 10_000
"""From which port on the jobs of Slurm meet, and on how many."""
_HOST = re.compile(r"(?:[^\[\],\s]|\[[^\]]*\])+")
"""One element of a list of hosts as Slurm writes it, with any number of ranges in brackets."""


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
      started_by: the launcher, for messages; empty where these values were given by hand.
      how_to_meet: how the launcher is given a master address, for messages.
      served: whether the launcher serves the store at the master address; otherwise rank 0 does.
    """

    rank: int
    size: int
    local_rank: int
    local_size: int
    meeting: Path | None = None
    master: tuple[str | None, str | None] = (None, None)
    started_by: str = field(default="", compare=False)
    how_to_meet: str = field(default="", compare=False)
    served: bool = False

    @staticmethod
    def read(environment: Mapping[str, str] = os.environ) -> LaunchEnv | None:
        """Reads the variables of the launcher that has started this process.

        Torchrun's come first, ``RANK`` and ``WORLD_SIZE``. Those of MPI and Flux follow, unless they repeat what Slurm
        says: then srun has set them too. Where they differ, Slurm's are of the step that holds mpirun's daemon.

        Returns:
          ``None`` where the process was started alone: a single task, or a shell in a Slurm allocation outside of any
          step.

        Raises:
          ConfigError: the variables contradict each other, are no numbers, or some are missing.
        """
        if "RANK" in environment or "WORLD_SIZE" in environment:
            return _by_torchrun(environment)
        slurm = _by_slurm(environment)
        started = [
            _by_launcher(environment, launcher)
            for launcher in _LAUNCHERS
            if launcher.rank in environment and launcher.size in environment
        ]
        repeated = None if slurm is None else (slurm.rank, slurm.size)
        inner = [env for env in started if env.size > 1 and (env.rank, env.size) != repeated]
        if len({(env.rank, env.size) for env in inner}) > 1:
            says = " and ".join(f"{env.started_by} rank {env.rank} of {env.size}" for env in inner)
            raise ConfigError(
                f"{says}: unset the variables of the one that has not started this process, or {_BY_HAND}"
            )
        if not started and slurm is None:
            _refuse_half(environment)
        env = inner[0] if inner else slurm
        return env._checked() if env is not None and env.size > 1 else None

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
        if self.rank == 0 and not self.served:
            return self._kept(address, int(port), patience)

        def connect() -> dist.Store:
            socket.create_connection(
                (address, int(port)), timeout=join_s
            ).close()  # else torch prints its stack
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
        here = loopback_address()
        if address in (here, "localhost"):
            with suppress(OSError):
                return serving(here, port)
        try:
            return dist.TCPStore(
                here, port, self.size, is_master=True, timeout=patience, wait_for_workers=False,
                multi_tenant=True,
            )  # fmt: skip
        except RuntimeError as error:
            served = "" if self.started_by else ", or say served=True where a launcher serves a store there"
            raise ConfigError(
                f"MASTER_PORT {port}: cannot be listened at ({str(error).splitlines()[0]}): choose another{served}"
            ) from None

    def interface(self, store: dist.Store | None = None) -> str:
        """Finds the address of this machine on the way to the other replicas.

        Args:
          store: where they meet, if not at the master address.

        Returns:
          The address; loopback where all are on this machine, or nothing says where the others are.

        Raises:
          ConfigError: it is not known where they are, or there is no way to them.
        """
        if self.size == 1 or self.meeting is not None:
            return loopback_address()
        if store is None:
            return route_to(self._met_at()[0])
        return route_to(self.master[0] or host_of(store) or loopback_address())

    def _met_at(self) -> tuple[str, str]:
        address, port = self.master
        if address and port and port.isdecimal() and int(port) <= 65535:
            return address, port
        if not self.started_by:
            raise ConfigError(
                f"LaunchEnv of {self.size} ranks: it does not say where they meet: give master=(HOST, PORT) with the "
                "address of rank 0's machine, or a store"
            )
        missing = [
            name for name, value in zip(("MASTER_ADDR", "MASTER_PORT"), self.master, strict=True) if not value
        ]
        raise ConfigError(
            f"{self.started_by} has started {self.size} processes, and {' and '.join(missing) or 'MASTER_PORT'} "
            f"{'do' if len(missing) > 1 else 'does'} not say where they meet: {self.how_to_meet}"
        )

    def _checked(self) -> LaunchEnv:
        if self.rank < self.size and self.local_rank < self.local_size <= self.size:
            return self
        raise ConfigError(
            f"{self.started_by or 'LaunchEnv'} says rank {self.rank} of {self.size}, "
            f"{self.local_rank} of {self.local_size} on this machine: that cannot be"
        )


def interface_to_master(store: dist.Store | None) -> str:
    """Finds the address of this machine on the way to the ranks of a process group.

    Args:
      store: of the group; ``None`` for a single rank.

    Returns:
      The address on the way to the host of the store, else to ``MASTER_ADDR``; loopback where neither is known.
    """
    if store is None:
        return loopback_address()
    return route_to(host_of(store) or os.environ.get("MASTER_ADDR") or loopback_address())


def _number(environment: Mapping[str, str], name: str, usual: int | None = None) -> int:
    text = environment.get(name)
    if text is None and usual is not None:
        return usual
    if text is None or not text.isdecimal():
        raise ConfigError(
            f"{name} is {text!r} in the environment, and no number: unset it, or start with torchrun"
        )
    return int(text)


def _by_torchrun(environment: Mapping[str, str]) -> LaunchEnv:
    missing = [name for name in ("RANK", "WORLD_SIZE") if name not in environment]
    if missing:
        (present,) = {"RANK", "WORLD_SIZE"} - {*missing}
        raise ConfigError(f"{present} is set and {missing[0]} is not: set both, or start with torchrun")
    rank, size = _number(environment, "RANK"), _number(environment, "WORLD_SIZE")
    return LaunchEnv(
        rank,
        size,
        _number(environment, "LOCAL_RANK", rank),
        _number(environment, "LOCAL_WORLD_SIZE", size),
        master=_master(environment),
        started_by="torchrun",
        how_to_meet="set them, or start with torchrun",
        served=environment.get("TORCHELASTIC_USE_AGENT_STORE") == str(True),
    )._checked()


def _by_launcher(environment: Mapping[str, str], launcher: _Launcher) -> LaunchEnv:
    rank, size = _number(environment, launcher.rank), _number(environment, launcher.size)
    local_rank = next((name for name in launcher.local_rank if name in environment), None)
    local_size = next((name for name in launcher.local_size if name in environment), None)
    local = rank if local_rank is None else _number(environment, local_rank)
    if local_size is not None:
        here = _number(environment, local_size)
    elif launcher.nodes in environment:  # as evenly as they can be shared out
        here = max(local + 1, -(-size // max(1, _number(environment, launcher.nodes))))
    else:
        here = size
    return LaunchEnv(
        rank,
        size,
        local,
        here,
        master=_master(environment),
        started_by=launcher.name,
        how_to_meet=launcher.how_to_meet.format(loopback_address() if here == size else "HOST_OF_RANK_0"),
    )


def _refuse_half(environment: Mapping[str, str]) -> None:
    """Raises where a launcher has given this process a rank, or a size, and not the other."""
    for launcher in _LAUNCHERS:
        names = launcher.rank, launcher.size
        there = [name for name in names if name in environment]
        if there:
            (missing,) = {*names} - {*there}
            raise ConfigError(f"{there[0]} is set and {missing} is not: {_BY_HAND}")
    for name in _WITHOUT_SIZE:
        if name in environment:
            raise ConfigError(f"{name} is set, and nothing says how many processes there are: {_BY_HAND}")


def _master(environment: Mapping[str, str]) -> tuple[str | None, str | None]:
    return environment.get("MASTER_ADDR"), environment.get("MASTER_PORT")


def _by_slurm(environment: Mapping[str, str]) -> LaunchEnv | None:
    """The step of Slurm's that this process is in, if any; a batch script is in none."""
    if "SLURM_STEP_ID" not in environment or "SLURM_PROCID" not in environment:
        return None
    size = _number(environment, "SLURM_STEP_NUM_TASKS", _number(environment, "SLURM_NTASKS", 1))
    address, port = _master(environment)
    nodes = environment.get("SLURM_STEP_NODELIST") or environment.get("SLURM_JOB_NODELIST", "")
    if address is None:
        alone = environment.get("SLURM_STEP_NUM_NODES", environment.get("SLURM_NNODES")) == "1"
        address = loopback_address() if alone else _first_host(nodes)
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
    """The first of a list as Slurm writes it: ``gpu[003-007,12],login`` begins with ``gpu003``, ``r[1-2]n[01-03]`` with
    ``r1n01``.
    """
    first = _HOST.match(nodes)
    return None if first is None else re.sub(r"\[([^\],x-]*)[^\]]*\]", r"\1", first[0])


def _tasks_per_node(text: str) -> list[int]:
    """Of each node, from what Slurm writes: ``4(x2),3`` is 4, 4 and 3."""
    counts: list[int] = []
    for count, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", text):
        counts += [int(count)] * int(times or 1)
    return counts
