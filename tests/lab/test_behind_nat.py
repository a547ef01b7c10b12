"""Two machines behind address translation, with no way in, train with a third that relays between them."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest
import torch.distributed as dist

from farflung.comm import RELAYED_KIND
from farflung.state_trees import load_tree
from farflung.telemetry import read_events
from tests.forks import of_torchrun, ran
from tests.helpers import PATIENCE_S, same_tree
from tests.lab.netns import Home, Machine, ip, public_and_homes

STEPS = 12
LIMIT_S = 150.0

pytestmark = [pytest.mark.lab, pytest.mark.thorough, pytest.mark.timeout(2 * LIMIT_S)]


@pytest.fixture
def machines(nft: None) -> Iterator[tuple[Machine, Home, Home]]:
    with public_and_homes() as made:
        yield made


def test_nobody_gets_in_and_they_get_out(machines: tuple[Machine, Home, Home]) -> None:
    public, *homes = machines
    with closing(public.inside(lambda: socket.create_server((public.address, 0)))) as met:
        there = (public.address, met.getsockname()[1])
        for home in homes:
            with closing(home.inside(lambda home=home: socket.create_server((home.address, 0)))) as listening:  # type: ignore[misc]
                port = listening.getsockname()[1]
                # Even from who sends to the address inside by way of the router.
                ip("-n", public.name, "route", "replace", home.address, "via", home.router)
                for address in (home.router, home.address):
                    with pytest.raises(ConnectionRefusedError):
                        public.inside(
                            lambda address=address, port=port: socket.create_connection(
                                (address, port), PATIENCE_S
                            )  # type: ignore[misc]
                        )
                ip("-n", public.name, "route", "delete", home.address)
                with closing(home.inside(lambda: socket.create_connection(there, PATIENCE_S))):
                    accepted, (seen_as, _) = met.accept()
                    accepted.close()
                    assert seen_as == home.router


def test_homes_train_through_a_relay_as_on_one_machine(
    machines: tuple[Machine, Home, Home], tmp_path_factory: pytest.TempPathFactory
) -> None:
    public, *_ = machines
    what = [
        *("train", "--workload", "fashion-mnist/mlp", "--data", "packaged", "--steps", str(STEPS)),
        *("--batch-size", "8", "--evaluate-every", "0", "--collective", "direct", "--out", "run", "--json"),
    ]
    store = public.inside(lambda: dist.TCPStore(public.address, 0, is_master=True, wait_for_workers=False))
    folders = [tmp_path_factory.mktemp(name) for name in ("public", "a", "b")]
    with public.eavesdropper() as heard:
        replicas = [
            machine.start(
                *(*what, *(["--advertise", "none"] if isinstance(machine, Home) else [])),
                log=folders[rank] / "log",
                environment=of_torchrun(rank, 3, public.address, store.port, machines=3),
                cwd=folders[rank],
            )
            for rank, machine in enumerate(machines)
        ]
        codes = [replica.wait(LIMIT_S) for replica in replicas]
    assert codes == [0] * 3, "\n".join((folder / "log").read_text() for folder in folders)
    assert bytes.fromhex("002b00020304") in heard, "TLS 1.3 was agreed on"
    assert b'"settings"' not in heard, "a greeting can be read"

    ends: list[dict[str, list[int]]] = []
    for rank, folder in enumerate(folders):
        events = list(read_events(folder / "run" / "telemetry" / f"rank-{rank}.jsonl"))
        assert not [event for event in events if event["event"] == "refused"]
        end: dict[str, Any] = next(event for event in events if event["event"] == "end")
        ends.append(end["bytes_sent_to"])
    here, a, b = ends
    nobody, to_a, to_b = here[RELAYED_KIND]
    assert nobody == 0
    assert to_a >= b["gradients"][1] > 0
    assert to_b >= a["gradients"][2] > 0
    assert RELAYED_KIND not in a.keys() | b.keys()

    alone = tmp_path_factory.mktemp("alone") / "run"
    ran(*what[:-3], "--out", str(alone), "--workers", "3", "--json")
    shared = f"checkpoints/step-{STEPS:08d}/shared.safetensors"
    expected = load_tree(alone / shared)
    assert expected["step"] == STEPS
    for folder in folders:
        assert same_tree(load_tree(folder / "run" / shared), expected)
