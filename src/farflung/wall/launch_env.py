"""Environment that torchrun, Slurm, MPI or Flux gives a process: its rank, and the meeting place of its peers."""

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

from farflung.comm.interface import check_host, find_local_address, find_loopback_address, parse_address
from farflung.errors import ConfigError
from farflung.wall.stores import get_host, retry_connect, serve_store

__all__ = ["LaunchEnv", "find_group_address"]


@dataclass(frozen=True, slots=True)
class _Launcher:
    """Variables of a launcher that names no meeting place.

    Args:
      name: Name in messages.
      rank, size, local_rank, local_size: Variables; of the last two the first that is set.
      rendezvous_hint: Command that sets the master address.
      nodes: Variable with the number of machines, for a launcher without a local size.
    """

    name: str
    rank: str
    size: str
    local_rank: tuple[str, ...]
    local_size: tuple[str, ...]
    rendezvous_hint: str
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
SITE_VARIABLE = "FARFLUNG_SITE"
"""Variable with the number of a site, the number of sites, and the address where they meet."""
_RANK_ONLY_VARIABLES = "PMIX_RANK", "PALS_RANKID", "ALPS_APP_PE"
"""Rank variables of some launchers that do not give the number of processes."""
_MANUAL_HINT = "set RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT for each process"
_served_stores: dict[int, dist.Store] = {}
"""Stores that this process serves, by port."""
_SLURM_PORTS = 15_000, 10_000
"""First port of the meetings of Slurm jobs, and number of such ports."""
_HOST = re.compile(r"(?:[^\[\],\s]|\[[^\]]*\])+")
"""Pattern of one element of a Slurm host list, with any number of ranges in brackets."""


@dataclass(frozen=True, slots=True)
class LaunchEnv:
    """Rank of this process, and the meeting place of its peers.

    Args:
      rank: Rank of the process.
      size: Number of processes.
      local_rank: Rank among the processes of this machine.
      local_size: Number of processes of this machine.
      rendezvous_file: File through which the processes of one machine find each other; ``None``: the store at the
        master address.
      master: Master address and port, as far as they are known.
      launcher: Launcher, for messages; empty if the values were given by hand.
      rendezvous_hint: Way to give the launcher a master address, for messages.
      served: True if the launcher serves the store at the master address; otherwise rank 0 does.
      counts_sites: True if rank and size count sites, see :meth:`of_site`.
    """

    rank: int
    size: int
    local_rank: int
    local_size: int
    rendezvous_file: Path | None = None
    master: tuple[str | None, str | None] = (None, None)
    launcher: str = field(default="", compare=False)
    rendezvous_hint: str = field(default="", compare=False)
    served: bool = False
    counts_sites: bool = False

    @staticmethod
    def of_site(number: int, count: int, address: str) -> LaunchEnv:
        """Returns the environment of each process of a site, for :func:`farflung.attach` with ``site``.

        Args:
          number: Number of the site, from 0.
          count: Number of sites.
          address: ``HOST:PORT`` where the sites meet; the first process of site 0 listens there.

        Raises:
          ConfigError: The number or the address is invalid.
        """
        host, port = parse_address(address)
        return LaunchEnv(
            number, count, 0, 1, master=(host, str(port)), launcher=SITE_VARIABLE, counts_sites=True
        )._validate()

    @staticmethod
    def read_site(environment: Mapping[str, str] = os.environ) -> LaunchEnv | None:
        """Reads ``FARFLUNG_SITE``, such as ``0/3@host:29400`` for site 0 of 3; returns ``None`` if it is not set.

        Raises:
          ConfigError: It has another form.
        """
        text = environment.get(SITE_VARIABLE)
        if text is None:
            return None
        match = re.fullmatch(r"(\d+)/(\d+)@(.+)", text)
        if match is None:
            raise ConfigError(
                f"{SITE_VARIABLE} is {text!r}: must be NUMBER/COUNT@HOST:PORT, such as 0/3@host:29400"
            )
        return LaunchEnv.of_site(int(match[1]), int(match[2]), match[3])

    @staticmethod
    def read(environment: Mapping[str, str] = os.environ) -> LaunchEnv | None:
        """Reads the variables of the launcher that has started this process.

        Torchrun's ``RANK`` and ``WORLD_SIZE`` have precedence. Those of MPI and Flux follow, unless they repeat those
        of Slurm, because srun sets them too. If they differ, Slurm's are those of the step that holds mpirun's daemon.

        Returns:
          ``None`` if the process was started alone: a single task, or a shell in a Slurm allocation outside of any
          step.

        Raises:
          ConfigError: The variables contradict each other, are not numbers, or some are missing.
        """
        if "RANK" in environment or "WORLD_SIZE" in environment:
            return _read_torchrun(environment)
        slurm = _read_slurm(environment)
        candidates = [
            _read_launcher(environment, launcher)
            for launcher in _LAUNCHERS
            if launcher.rank in environment and launcher.size in environment
        ]
        slurm_rank = None if slurm is None else (slurm.rank, slurm.size)
        inner = [env for env in candidates if env.size > 1 and (env.rank, env.size) != slurm_rank]
        if len({(env.rank, env.size) for env in inner}) > 1:
            says = " and ".join(f"{env.launcher} rank {env.rank} of {env.size}" for env in inner)
            raise ConfigError(
                f"{says}: unset the variables of the one that has not started this process, or {_MANUAL_HINT}"
            )
        if not candidates and slurm is None:
            _check_incomplete(environment)
        env = inner[0] if inner else slurm
        return env._validate() if env is not None and env.size > 1 else None

    def connect_store(self, connect_timeout_s: float) -> dist.Store | None:
        """Connects to the store through which the replicas find each other; returns ``None`` for a single replica.

        Args:
          connect_timeout_s: Maximum time in seconds until the others come.

        Raises:
          ConfigError: The address is unknown or unusable, or its host does not exist.
          DeadlinePassed: The store of rank 0 was not reached.
        """
        if self.size == 1:
            return None
        if self.rendezvous_file is not None:
            return dist.FileStore(str(self.rendezvous_file), self.size)
        address, port = self._resolve_master()
        check_host(address, f"{SITE_VARIABLE if self.counts_sites else 'MASTER_ADDR'} {address}")
        patience = timedelta(seconds=connect_timeout_s)
        if self.rank == 0 and not self.served:
            return self._get_served_store(address, int(port), patience)

        def connect() -> dist.Store:
            socket.create_connection(
                (address, int(port)), timeout=connect_timeout_s
            ).close()  # otherwise torch prints its stack
            return dist.TCPStore(address, int(port), self.size, is_master=False, timeout=patience)

        return retry_connect(connect, f"its store at {address}:{port}", connect_timeout_s)

    def _get_served_store(self, address: str, port: int, patience: timedelta) -> dist.Store:
        """Returns the store of rank 0, served on loopback only if that is the address, otherwise as torch does.

        The process keeps it for later runs, since another rank may begin the next run while this one ends.
        """
        if port not in _served_stores:
            _served_stores[port] = self._serve_rank_0_store(address, port, patience)
        _served_stores[port].set_timeout(patience)
        return _served_stores[port]

    def _serve_rank_0_store(self, address: str, port: int, patience: timedelta) -> dist.Store:
        """Serves the store of rank 0: on loopback if that is the address, otherwise at all addresses."""
        loopback = find_loopback_address()
        if address in (loopback, "localhost"):
            with suppress(OSError):
                return serve_store(loopback, port)
        try:
            return dist.TCPStore(
                loopback, port, self.size, is_master=True, timeout=patience, wait_for_workers=False,
                multi_tenant=True,
            )  # fmt: skip
        except RuntimeError as error:
            hint = "" if self.launcher else ", or say served=True where a launcher serves a store there"
            raise ConfigError(
                f"MASTER_PORT {port}: cannot be listened at ({str(error).splitlines()[0]}): choose another{hint}"
            ) from None

    def find_address(self, store: dist.Store | None = None) -> str:
        """Returns this machine's address on the route to the other replicas; loopback if all are on this machine.

        Args:
          store: Store where they meet, if not at the master address.

        Returns:
          The address; loopback if all are on this machine, or the location of the others is unknown.

        Raises:
          ConfigError: Their location is missing, or there is no route to them.
        """
        if self.size == 1 or self.rendezvous_file is not None:
            return find_loopback_address()
        if store is None:
            return find_local_address(self._resolve_master()[0])
        return find_local_address(self.master[0] or get_host(store) or find_loopback_address())

    def _resolve_master(self) -> tuple[str, str]:
        address, port = self.master
        if address and port and port.isdecimal() and int(port) <= 65535:
            return address, port
        if not self.launcher:
            raise ConfigError(
                f"LaunchEnv of {self.size} ranks: it does not say where they meet: give master=(HOST, PORT) with the "
                "address of rank 0's machine, or a store"
            )
        missing = [
            name for name, value in zip(("MASTER_ADDR", "MASTER_PORT"), self.master, strict=True) if not value
        ]
        raise ConfigError(
            f"{self.launcher} has started {self.size} processes, and {' and '.join(missing) or 'MASTER_PORT'} "
            f"{'do' if len(missing) > 1 else 'does'} not say where they meet: {self.rendezvous_hint}"
        )

    def _validate(self) -> LaunchEnv:
        if self.rank < self.size and self.local_rank < self.local_size <= self.size:
            return self
        raise ConfigError(
            f"{self.launcher or 'LaunchEnv'} says rank {self.rank} of {self.size}, "
            f"{self.local_rank} of {self.local_size} on this machine: that cannot be"
        )


def find_group_address(store: dist.Store | None) -> str:
    """Returns this machine's address on the route to the host of a store; loopback without a store.

    Args:
      store: Store of the group; ``None`` for a single rank.

    Returns:
      The address on the route to the host of the store, else to ``MASTER_ADDR``; loopback if neither is known.
    """
    if store is None:
        return find_loopback_address()
    return find_local_address(get_host(store) or os.environ.get("MASTER_ADDR") or find_loopback_address())


def _read_number(environment: Mapping[str, str], name: str, default: int | None = None) -> int:
    text = environment.get(name)
    if text is None and default is not None:
        return default
    if text is None or not text.isdecimal():
        raise ConfigError(
            f"{name} is {text!r} in the environment, and no number: unset it, or start with torchrun"
        )
    return int(text)


def _read_torchrun(environment: Mapping[str, str]) -> LaunchEnv:
    missing = [name for name in ("RANK", "WORLD_SIZE") if name not in environment]
    if missing:
        (present,) = {"RANK", "WORLD_SIZE"} - {*missing}
        raise ConfigError(f"{present} is set and {missing[0]} is not: set both, or start with torchrun")
    rank, size = _read_number(environment, "RANK"), _read_number(environment, "WORLD_SIZE")
    return LaunchEnv(
        rank,
        size,
        _read_number(environment, "LOCAL_RANK", rank),
        _read_number(environment, "LOCAL_WORLD_SIZE", size),
        master=_read_master(environment),
        launcher="torchrun",
        rendezvous_hint="set them, or start with torchrun",
        served=environment.get("TORCHELASTIC_USE_AGENT_STORE") == str(True),
    )._validate()


def _read_launcher(environment: Mapping[str, str], launcher: _Launcher) -> LaunchEnv:
    rank, size = _read_number(environment, launcher.rank), _read_number(environment, launcher.size)
    local_rank = next((name for name in launcher.local_rank if name in environment), None)
    local_size = next((name for name in launcher.local_size if name in environment), None)
    local = rank if local_rank is None else _read_number(environment, local_rank)
    if local_size is not None:
        on_machine = _read_number(environment, local_size)
    elif launcher.nodes in environment:  # as even as possible
        on_machine = max(local + 1, -(-size // max(1, _read_number(environment, launcher.nodes))))
    else:
        on_machine = size
    return LaunchEnv(
        rank,
        size,
        local,
        on_machine,
        master=_read_master(environment),
        launcher=launcher.name,
        rendezvous_hint=launcher.rendezvous_hint.format(
            find_loopback_address() if on_machine == size else "HOST_OF_RANK_0"
        ),
    )


def _check_incomplete(environment: Mapping[str, str]) -> None:
    """Raises if a launcher has given this process a rank without a size, or a size without a rank."""
    for launcher in _LAUNCHERS:
        names = launcher.rank, launcher.size
        present = [name for name in names if name in environment]
        if present:
            (missing,) = {*names} - {*present}
            raise ConfigError(f"{present[0]} is set and {missing} is not: {_MANUAL_HINT}")
    for name in _RANK_ONLY_VARIABLES:
        if name in environment:
            raise ConfigError(f"{name} is set, and nothing says how many processes there are: {_MANUAL_HINT}")


def _read_master(environment: Mapping[str, str]) -> tuple[str | None, str | None]:
    return environment.get("MASTER_ADDR"), environment.get("MASTER_PORT")


def _read_slurm(environment: Mapping[str, str]) -> LaunchEnv | None:
    """Reads the Slurm step of this process, if any; a batch script is in none."""
    if "SLURM_STEP_ID" not in environment or "SLURM_PROCID" not in environment:
        return None
    size = _read_number(environment, "SLURM_STEP_NUM_TASKS", _read_number(environment, "SLURM_NTASKS", 1))
    address, port = _read_master(environment)
    nodes = environment.get("SLURM_STEP_NODELIST") or environment.get("SLURM_JOB_NODELIST", "")
    if address is None:
        is_single_node = environment.get("SLURM_STEP_NUM_NODES", environment.get("SLURM_NNODES")) == "1"
        address = find_loopback_address() if is_single_node else _parse_first_host(nodes)
    if port is None:
        first, count = _SLURM_PORTS
        job, step = (_read_number(environment, name, 0) for name in ("SLURM_JOB_ID", "SLURM_STEP_ID"))
        port = str(first + (job + step) % count)
    rank = _read_number(environment, "SLURM_PROCID")
    tasks = _parse_tasks_per_node(environment.get("SLURM_STEP_TASKS_PER_NODE", ""))
    node = _read_number(environment, "SLURM_NODEID", 0)
    return LaunchEnv(
        rank,
        size,
        _read_number(environment, "SLURM_LOCALID", rank),
        tasks[node] if node < len(tasks) else size,
        master=(address, port),
        launcher="Slurm",
        rendezvous_hint="export them before srun: MASTER_ADDR=HOST_OF_RANK_0 MASTER_PORT=29500",
    )


def _parse_first_host(nodes: str) -> str | None:
    """Parses the first host of a Slurm list: ``gpu[003-007,12],login`` begins with ``gpu003``, ``r[1-2]n[01-03]`` with
    ``r1n01``.
    """
    first = _HOST.match(nodes)
    return None if first is None else re.sub(r"\[([^\],x-]*)[^\]]*\]", r"\1", first[0])


def _parse_tasks_per_node(text: str) -> list[int]:
    """Parses the task counts of nodes as Slurm writes them: ``4(x2),3`` is 4, 4 and 3."""
    counts: list[int] = []
    for count, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", text):
        counts += [int(count)] * int(times or 1)
    return counts
