"""Who a process is, by what started it; where the replicas meet, and that nobody else can come there."""

from __future__ import annotations

import re
import signal
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from farflung import attach
from farflung.comm import Endpoint
from farflung.comm.interface import LOOPBACK
from farflung.errors import ConfigError, DeadlinePassed
from farflung.runs import prepare_training
from farflung.wall import LaunchEnv, find_group_address
from farflung.wall.stores import serve_store
from tests.forks import farflung
from tests.helpers import PATIENCE_S, in_threads, joined, parted
from tests.listening import listening

TORCHRUN = {
    "RANK": "3",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "10.0.0.1",
}
SLURM = {
    "SLURM_JOB_ID": "1234567",
    "SLURM_STEP_ID": "2",
    "SLURM_PROCID": "6",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "2",
    "SLURM_NTASKS": "9",
    "SLURM_STEP_NUM_TASKS": "7",
    "SLURM_STEP_NUM_NODES": "3",
    "SLURM_STEP_TASKS_PER_NODE": "3(x1),2(x2)",
    "SLURM_STEP_NODELIST": "gpu[003-004,7],login",
    "SLURM_LAUNCH_NODE_IPADDR": "10.0.0.99",
}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "5",
    "OMPI_COMM_WORLD_SIZE": "6",
    "OMPI_COMM_WORLD_LOCAL_RANK": "2",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "3",
}
MPICH = {"PMI_RANK": "1", "PMI_SIZE": "2"}
PALS = {**MPICH, "PMI_LOCAL_RANK": "0", "PMI_LOCAL_SIZE": "1", "PALS_RANKID": "1"}
MVAPICH2 = {
    "MV2_COMM_WORLD_RANK": "5",
    "MV2_COMM_WORLD_SIZE": "6",
    "MV2_COMM_WORLD_LOCAL_RANK": "2",
    "MV2_COMM_WORLD_LOCAL_SIZE": "3",
    "PMI_ID": "5",
}
FLUX = {
    "FLUX_TASK_RANK": "6",
    "FLUX_JOB_SIZE": "7",
    "FLUX_TASK_LOCAL_ID": "2",
    "FLUX_JOB_NNODES": "2",
    "PMI_RANK": "6",
    "PMI_SIZE": "7",
}
DAEMON = {**SLURM, "SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "3", "SLURM_STEP_TASKS_PER_NODE": "1(x3)"}
"""What a process inherits from the daemon that mpirun has started with srun on each node but its own."""
PLACE = {"MASTER_ADDR": "head", "MASTER_PORT": "29501"}


def read(environment: Mapping[str, str]) -> tuple[Any, ...] | None:
    found = LaunchEnv.read(environment)
    return (
        None if found is None else (found.rank, found.size, found.local_rank, found.local_size, *found.master)
    )


@pytest.mark.parametrize(
    ("environment", "found"),
    [
        ({}, None),
        (PLACE, None),
        (TORCHRUN, (3, 8, 1, 2, "10.0.0.1", None)),
        ({"RANK": "0", "WORLD_SIZE": "1"}, (0, 1, 0, 1, None, None)),
        (SLURM, (6, 7, 1, 2, "gpu003", "19569")),
        ({**SLURM, **PLACE}, (6, 7, 1, 2, "head", "29501")),
        ({**SLURM, "SLURM_STEP_NODELIST": "a-1.b,c"}, (6, 7, 1, 2, "a-1.b", "19569")),
        ({**SLURM, "SLURM_STEP_NODELIST": "r[1-2]n"}, (6, 7, 1, 2, "r1n", "19569")),
        ({**SLURM, "SLURM_STEP_NODELIST": "r[1-2]n[01-03]"}, (6, 7, 1, 2, "r1n01", "19569")),
        ({**SLURM, "SLURM_STEP_NODELIST": "a[2,4]-b[3,5-7].x,c"}, (6, 7, 1, 2, "a2-b3.x", "19569")),
        ({**SLURM, "SLURM_STEP_NODELIST": "bgl[012x345]"}, (6, 7, 1, 2, "bgl012", "19569")),
        ({**SLURM, "PMI_RANK": "6", "PMI_SIZE": "7", "PMIX_RANK": "6"}, (6, 7, 1, 2, "gpu003", "19569")),
        ({**SLURM, "PMI_RANK": "0", "PMI_SIZE": "1"}, (6, 7, 1, 2, "gpu003", "19569")),
        ({**DAEMON, **OPEN_MPI}, (5, 6, 2, 3, None, None)),
        ({**DAEMON, **PLACE, **MPICH}, (1, 2, 1, 2, "head", "29501")),
        ({**DAEMON, "PMI_RANK": "1", "PMI_SIZE": "3", **OPEN_MPI}, (5, 6, 2, 3, None, None)),
        ({**SLURM, "SLURM_STEP_NUM_NODES": "1"}, (6, 7, 1, 2, "127.0.0.1", "19569")),
        ({**SLURM, **TORCHRUN}, (3, 8, 1, 2, "10.0.0.1", None)),
        ({**SLURM, **OPEN_MPI}, (5, 6, 2, 3, None, None)),
        ({**SLURM, "SLURM_STEP_NUM_TASKS": "1"}, None),
        ({name: value for name, value in SLURM.items() if name != "SLURM_STEP_ID"}, None),
        (OPEN_MPI, (5, 6, 2, 3, None, None)),
        ({**OPEN_MPI, **PLACE}, (5, 6, 2, 3, "head", "29501")),
        ({**OPEN_MPI, "OMPI_COMM_WORLD_SIZE": "1"}, None),
        (MPICH, (1, 2, 1, 2, None, None)),
        (PALS, (1, 2, 0, 1, None, None)),
        (MVAPICH2, (5, 6, 2, 3, None, None)),
        ({**FLUX, **PLACE}, (6, 7, 2, 4, "head", "29501")),
        ({**FLUX, "FLUX_TASK_LOCAL_ID": "5"}, (6, 7, 5, 6, None, None)),
        ({**OPEN_MPI, "PMIX_RANK": "5"}, (5, 6, 2, 3, None, None)),
        ({"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "1", "PMIX_RANK": "0"}, None),
        ({**SLURM, "SLURM_STEP_NUM_TASKS": "1", "PMIX_RANK": "0"}, None),
    ],
)  # fmt: skip
def test_who_a_process_is(environment: dict[str, str], found: tuple[Any, ...] | None) -> None:
    assert read(environment) == found


def test_which_site_a_process_is_of() -> None:
    """A site's launcher counts the processes of the site alone."""
    assert LaunchEnv.read_site(TORCHRUN) is None
    read = LaunchEnv.read_site({**TORCHRUN, "FARFLUNG_SITE": "1/3@[::1]:29400"})
    assert read == LaunchEnv.of_site(1, 3, "[::1]:29400")
    assert read is not None
    assert (read.rank, read.size, read.master, read.counts_sites) == (1, 3, ("::1", "29400"), True)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("1/3", "FARFLUNG_SITE is '1/3': must be NUMBER/COUNT@HOST:PORT, such as 0/3@host:29400"),
        ("1/3@host", "host: must be HOST:PORT"),
        ("3/3@host:1", "FARFLUNG_SITE says rank 3 of 3"),
    ],
)
def test_a_site_that_cannot_be(text: str, says: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(says)):
        LaunchEnv.read_site({"FARFLUNG_SITE": text})


@pytest.mark.parametrize(
    ("environment", "says"),
    [
        ({"WORLD_SIZE": "2"}, "WORLD_SIZE is set and RANK is not: set both"),
        ({"RANK": "0"}, "RANK is set and WORLD_SIZE is not: set both"),
        ({**TORCHRUN, "RANK": "x"}, "RANK is 'x' in the environment, and no number"),
        ({**SLURM, "SLURM_PROCID": "7"}, "Slurm says rank 7 of 7, 1 of 2 on this machine: that cannot be"),
        (
            {**OPEN_MPI, **MPICH},
            "Open MPI rank 5 of 6 and MPI rank 1 of 2: unset the variables of the one that has not started this "
            "process, or set RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT for each process",
        ),
        (
            {"PMIX_RANK": "1"},
            "PMIX_RANK is set, and nothing says how many processes there are: set RANK, WORLD_SIZE, MASTER_ADDR and "
            "MASTER_PORT for each process",
        ),
        ({"PALS_RANKID": "1"}, "PALS_RANKID is set, and nothing says how many"),
        ({"PMI_RANK": "1", "PMIX_RANK": "1"}, "PMI_RANK is set and PMI_SIZE is not: set RANK, WORLD_SIZE"),
        ({"FLUX_JOB_SIZE": "4"}, "FLUX_JOB_SIZE is set and FLUX_TASK_RANK is not"),
    ],
)
def test_what_cannot_be_is_refused(environment: dict[str, str], says: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(says)):
        LaunchEnv.read(environment)


@pytest.mark.parametrize(
    ("environment", "says"),
    [
        (
            OPEN_MPI,
            "Open MPI has started 6 processes, and MASTER_ADDR and MASTER_PORT do not say where they meet: "
            "mpirun -x MASTER_ADDR=HOST_OF_RANK_0 -x MASTER_PORT=29500",
        ),
        (
            {**OPEN_MPI, "OMPI_COMM_WORLD_LOCAL_SIZE": "6", "MASTER_ADDR": "127.0.0.1"},
            "and MASTER_PORT does not say where they meet: mpirun -x MASTER_ADDR=127.0.0.1 -x MASTER_PORT=29500",
        ),
        (MPICH, "mpiexec -genv MASTER_ADDR 127.0.0.1 -genv MASTER_PORT 29500"),
        (MVAPICH2, "mpirun_rsh ... MASTER_ADDR=HOST_OF_RANK_0 MASTER_PORT=29500 COMMAND"),
        (FLUX, "flux run --env=MASTER_ADDR=HOST_OF_RANK_0 --env=MASTER_PORT=29500"),
        (TORCHRUN, "torchrun has started 8 processes, and MASTER_PORT does not say where they meet"),
    ],
)
def test_who_does_not_know_where_to_meet_is_told(
    environment: dict[str, str], says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    model = nn.Linear(2, 2)
    with pytest.raises(ConfigError, match=re.escape(says)):
        attach(model, torch.optim.SGD(model.parameters(), lr=0.1))


def test_a_launch_environment_by_hand_asks_for_what_it_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")  # half of torchrun's, which is not asked
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(
        ConfigError, match=r"LaunchEnv of 3 ranks: .* give master=\(HOST, PORT\) .*, or a store"
    ):
        attach(model, optimizer, launch_env=LaunchEnv(0, 3, 0, 3))
    with pytest.raises(ConfigError, match="WORLD_SIZE is set and RANK is not"):
        attach(model, optimizer)
    attach(model, optimizer, launch_env=LaunchEnv(0, 1, 0, 1)).finish()


@pytest.mark.parametrize(
    ("env", "found"),
    [
        (LaunchEnv(0, 1, 0, 1), "127.0.0.1"),
        (LaunchEnv(0, 2, 0, 1), "127.0.0.2"),
        (LaunchEnv(0, 2, 0, 1, master=("127.0.0.3", "1")), "127.0.0.3"),
        (LaunchEnv(0, 2, 0, 2, Path("meeting"), master=("127.0.0.3", "1")), "127.0.0.1"),
    ],
)
def test_the_way_to_the_others_is_that_to_their_store(
    env: LaunchEnv, found: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("farflung.wall.launch_env.find_local_address", lambda host: host)
    monkeypatch.setenv("WORLD_SIZE", "2")
    store = dist.PrefixStore("a", dist.PrefixStore("b", serve_store("127.0.0.2", 0)))
    assert env.find_address(store) == found
    assert find_group_address(store) == "127.0.0.2"
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.4")
    assert find_group_address(dist.HashStore()) == "127.0.0.4"
    assert find_group_address(None) == LOOPBACK


def test_whoever_started_the_workers_has_the_say_over_their_number(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in OPEN_MPI.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match="--workers 2: Open MPI has started 6"):
        prepare_training({"workload": "synthetic/quadratic", "workers": 2})


# --- what is listened on ----------------------------------------------------------------------------------------


def test_the_store_of_one_machine_is_on_loopback() -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    ranks = [LaunchEnv(rank, 2, rank, 2, master=("127.0.0.1", str(port))) for rank in range(2)]
    before = listening()
    stores = in_threads(*(lambda one=one: one.connect_store(30.0) for one in ranks))
    one, other = stores
    assert isinstance(one, dist.Store)
    assert isinstance(other, dist.Store)
    one.set("said", "here")
    assert other.get("said") == b"here"
    assert listening() - before == {("127.0.0.1", port)}
    again = ranks[0].connect_store(30.0)  # as a second model's, or the process group's
    assert again is not None
    assert again.get("said") == b"here"


def test_a_store_that_is_not_there_is_named(capfd: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    nowhere = LaunchEnv(1, 2, 1, 2, master=("127.0.0.1", str(port)))
    with pytest.raises(
        DeadlinePassed, match=rf"rank 0: .* its store at 127.0.0.1:{port} \(Connection refused\)"
    ):
        nowhere.connect_store(0.3)
    for rank in range(2):
        with pytest.raises(ConfigError, match=r"MASTER_ADDR 999\.1\.1\.1: unknown host"):
            LaunchEnv(rank, 2, rank, 2, master=("999.1.1.1", str(port))).connect_store(30.0)
    assert capfd.readouterr() == ("", "")


def test_a_port_that_is_taken_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(ConfigError, match=f"MASTER_PORT {port}: cannot be listened at"):
            LaunchEnv(0, 2, 0, 2, master=("127.0.0.1", str(port))).connect_store(30.0)


def test_a_replica_that_waits_for_the_others_is_stopped(tmp_path: Path) -> None:
    """At the store of rank 0, which is not there, and then for the other rank in that store."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    for rank in range(2):
        place = {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        out = str(tmp_path / f"run-{rank}")
        with farflung(
            "train", "--workload", "synthetic/quadratic", "--out", out, environment=place
        ) as replica:
            while not [*tmp_path.glob(f"run-{rank}/telemetry/rank-{rank}.jsonl")]:
                assert replica.wait(0.01) is None
            replica.send_signal(signal.SIGINT)
            assert replica.wait(PATIENCE_S) == 130


def test_native_collectives_listen_where_they_are_told_alone() -> None:
    before = listening()
    runtimes = joined(2, is_native=True, endpoint=Endpoint("127.0.0.2"))
    try:
        added = listening() - before
        assert {address for address, _ in added} == {"127.0.0.2"}
        assert len(added) >= 2 * len(runtimes), "farflung's own and the backend's"
        sums = [runtime.comm.all_reduce(torch.ones(3), None) for runtime in runtimes]  # type: ignore[arg-type]
        assert [one.wait().tolist() for one in sums] == [[2.0] * 3] * 2
    finally:
        parted(runtimes)


def test_a_store_of_a_file_takes_no_port(tmp_path: Path) -> None:
    before = listening()
    store = LaunchEnv(0, 2, 0, 2, tmp_path / "meeting").connect_store(30.0)
    assert store is not None
    assert listening() == before
