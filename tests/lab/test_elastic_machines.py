"""An elastic run on two machines: a death on one is certified to the other, and a third replica joins by an address."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch.distributed as dist

from farflung.telemetry import Event, read_events
from tests.forks import of_torchrun
from tests.lab.netns import Machine, two_machines

LIMIT_S = 90.0

pytestmark = [pytest.mark.lab, pytest.mark.thorough, pytest.mark.timeout(3 * LIMIT_S)]


@pytest.fixture
def machines() -> Iterator[tuple[Machine, Machine]]:
    with two_machines() as made:
        yield made


def until(found: Callable[[], list[Event]]) -> list[Event]:
    """Waits for events of a replica's telemetry."""
    late = time.monotonic() + LIMIT_S
    while time.monotonic() < late:
        if events := found():
            return events
        time.sleep(0.05)
    raise AssertionError("it never happened")


def of(home: Path, rank: int, kind: str) -> list[Event]:
    file = home / "run" / "telemetry" / f"rank-{rank}.jsonl"
    return [event for event in (read_events(file) if file.exists() else []) if event["event"] == kind]


def test_the_junior_goes_on_where_the_death_of_the_senior_is_certified_from_another_machine(
    machines: tuple[Machine, Machine], tmp_path: Path
) -> None:
    homes = [tmp_path / name for name in ("a", "b", "c")]
    for home in homes:
        home.mkdir()
    first = machines[0]
    store = first.inside(lambda: dist.TCPStore(first.address, 0, is_master=True, wait_for_workers=False))
    train = [
        *(
            "train",
            "--workload",
            "synthetic/quadratic",
            "--steps",
            "100000",
            "--elastic",
            "1:3",
            "--out",
            "run",
        ),
        *("--evaluate-every", "1000", "--checkpoint-every", "100000", "--json"),
    ]
    replicas = [
        machines[rank].start(
            *("worker", "--", sys.executable, "-m", "farflung", *train),
            log=homes[rank] / "log",
            environment=of_torchrun(rank, 2, first.address, store.port, machines=2),
            cwd=homes[rank],
        )
        for rank in (0, 1)
    ]
    until(lambda: of(homes[1], 1, "step"))
    access = json.loads((homes[1] / "run" / "run.key").read_text())
    assert access["encrypted"]
    (homes[2] / "wrong.key").write_text(json.dumps({**access, "key": "00" * 32}))
    address = access["addresses"][1]  # rank 1's; rank 0 gives the rank
    wrong = first.start(
        "join", address, "--key", "wrong.key", log=homes[2] / "wrong", environment={}, cwd=homes[2]
    )
    assert wrong.wait(LIMIT_S) == 2
    (said,) = (homes[2] / "wrong").read_text().splitlines()
    assert "no run answers there that this key belongs to" in said
    joiner = first.start(
        *("join", address, "--key", str(homes[1] / "run" / "run.key"), "--out", "run", "--json"),
        log=homes[2] / "log",
        environment={},
        cwd=homes[2],
    )
    until(lambda: of(homes[2], 2, "step"))
    for rank in (2, 0):  # nothing certifies the first of them; the other two are a majority
        (hello,) = of(homes[rank], rank, "hello")
        os.kill(int(str(hello["pid"])), signal.SIGKILL)
        until(lambda rank=rank: [one for one in of(homes[1], 1, "view") if one["lost"] == [rank]])  # type: ignore[misc]
    assert (joiner.wait(LIMIT_S), replicas[0].wait(LIMIT_S)) == (-signal.SIGKILL, 128 + signal.SIGKILL)
    step = int(str(of(homes[1], 1, "step")[-1]["step"]))
    until(lambda: [one for one in of(homes[1], 1, "step")[-1:] if int(str(one["step"])) > step + 10])
    (hello,) = of(homes[1], 1, "hello")
    os.kill(int(str(hello["pid"])), signal.SIGINT)
    assert replicas[1].wait(LIMIT_S) == 0, (homes[1] / "log").read_text()
    views = [(event["members"], event["lost"], event["joined"]) for event in of(homes[1], 1, "view")]
    assert views == [([0, 1, 2], [], [2]), ([0, 1], [2], []), ([1], [0], [])]
