"""Two machines train one model as under torchrun; what passes between them cannot be read."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch.distributed as dist

from farflung.comm.keys import make_keys
from farflung.state_trees import load_tree
from tests.covering import thorough
from tests.forks import of_torchrun
from tests.helpers import same_tree
from tests.lab.netns import Machine, ip, two_machines

TLS_1_3 = bytes.fromhex("002b00020304")
"""How a server answers that this is the version."""
SERVED = "TORCHELASTIC_USE_AGENT_STORE"
"""Whether torchrun serves the store; otherwise rank 0 does."""
STEPS = 4
LIMIT_S = 150.0

pytestmark = [pytest.mark.lab, pytest.mark.timeout(2 * LIMIT_S)]


@pytest.fixture
def machines() -> Iterator[tuple[Machine, Machine]]:
    with two_machines() as made:
        yield made


@pytest.mark.parametrize(
    "with_keys", [False, *thorough(True)], ids=["keys through the store", "keys from folders"]
)
def test_two_machines_end_with_the_same_parameters(
    with_keys: bool, machines: tuple[Machine, Machine], tmp_path: Path
) -> None:
    homes = [tmp_path / "a", tmp_path / "b"]
    for home in homes:
        home.mkdir()
        if with_keys:
            make_keys(home / "keys", home.name)
    if with_keys:
        for one, other in (homes, homes[::-1]):
            public = one / "keys" / f"{one.name}.public"
            (other / "keys" / public.name).write_bytes(public.read_bytes())
    first, second = machines
    store = first.inside(lambda: dist.TCPStore(first.address, 0, is_master=True, wait_for_workers=False))
    what = ["train", "--workload", "synthetic/quadratic", "--steps", str(STEPS), "--out", "run", "--json"]
    # One finds its interface by the route to the master, the other is given its name.
    options = [["--interface", second.cable] if machine is second else [] for machine in machines]
    with second.eavesdropper() as heard:
        replicas = [
            machines[node].start(
                *(*what, *options[node], *(["--keys", "keys"] if with_keys else [])),
                log=homes[node] / f"log-{rank}",
                environment=of_torchrun(rank, 4, first.address, store.port, machines=2),
                cwd=homes[node],
            )
            for rank, node in enumerate((0, 0, 1, 1))
        ]
        codes = [replica.wait(LIMIT_S) for replica in replicas]
    said = "\n".join(log.read_text() for home in homes for log in home.glob("log-*"))
    assert codes == [0] * 4, said

    trees = [
        load_tree(home / "run" / "checkpoints" / f"step-{STEPS:08d}" / "shared.safetensors") for home in homes
    ]
    assert trees[0]["step"] == STEPS
    assert same_tree(trees[0], trees[1])
    assert {path.name for home in homes for path in (home / "run" / "telemetry").iterdir()} == {
        f"rank-{rank}.jsonl" for rank in range(4)
    }

    assert f"tcp://{first.address}:".encode() in heard, "the store's own messages can be read"
    assert TLS_1_3 in heard
    assert b'"settings"' not in heard, "a greeting can be read"


@pytest.mark.thorough
def test_machines_without_an_ipv4_address_need_no_loopback_of_it(
    machines: tuple[Machine, Machine], tmp_path: Path
) -> None:
    for number, machine in enumerate(machines, start=1):
        there = "-n", machine.name, "address"
        ip(*there, "add", f"fd00::{number}/64", "dev", machine.cable, "nodad")
        ip(*there, "del", f"{machine.address}/24", "dev", machine.cable)
        ip(*there, "del", "127.0.0.1/8", "dev", "lo")
    environments = [
        {**of_torchrun(rank, 2, "fd00::1", 29500, machines=2), SERVED: "False"} for rank in range(2)
    ]
    what = ["train", "--workload", "synthetic/quadratic", "--steps", str(STEPS), "--json"]
    replicas = [
        machine.start(
            *what,
            "--out",
            f"rank-{rank}",
            log=tmp_path / f"log-{rank}",
            environment=environment,
            cwd=tmp_path,
        )
        for rank, (machine, environment) in enumerate(zip(machines, environments, strict=True))
    ]
    alone = [*what, "--workers", "2", "--out", "alone"]
    replicas.append(machines[0].start(*alone, log=tmp_path / "log-alone", environment={}, cwd=tmp_path))
    codes = [replica.wait(LIMIT_S) for replica in replicas]
    assert codes == [0] * 3, "\n".join(log.read_text() for log in tmp_path.glob("log-*"))
