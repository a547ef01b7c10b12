"""Devices that are real processes: the memory that they need, and how they get and lose their seats."""

from __future__ import annotations

import time
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from torch import Tensor

from farflung.coded import meeting
from farflung.coded.coordinator import Coordinator, Settings
from farflung.coded.meeting import Address, connect_device, start_coordinator
from farflung.comm import Endpoint, Peer
from farflung.comm.visits import Access
from farflung.errors import ConfigError, FarflungError
from farflung.types import Json
from tests.coded_processes import Crowd
from tests.helpers import PATIENCE_S


@pytest.mark.thorough
def test_a_device_needs_its_blocks_and_little_more(tmp_path: Path) -> None:
    """Three devices of 200 MB each: raw and coded rows, and columns."""
    few = Settings(partitions=2, devices=3, patience_s=2 * PATIENCE_S)
    with start_coordinator(Address("127.0.0.1", 0), "run") as (runtime, at):
        coordinator = Coordinator(runtime, few)
        crowd = Crowd(at, tmp_path, data=much)

        async def body() -> float:
            await coordinator.gather()
            coordinator.activate_partitions()
            total = 0.0
            for _ in range(5):
                product = await coordinator.multiply(torch.ones(coordinator.features, 2, dtype=torch.float64))
                total += float((await coordinator.multiply_transposed(product)).sum())
            await coordinator.end()
            return total

        try:
            for number in (0, 1, None):
                crowd.join(number)
            runtime.drive(body())
            left = crowd.left()
        finally:
            crowd.close()
    for one in left:
        print({name: f"{value / 2**20:.0f} MiB" for name, value in one.items() if name.endswith("nbytes")})
        assert one["blocks_nbytes"] > 190e6
        assert one["grown_nbytes"] < one["blocks_nbytes"] + (112 << 20)


def much(number: int) -> tuple[Tensor, Tensor]:
    """100 MB."""
    random = torch.Generator().manual_seed(number)
    features = torch.empty(12_500, 1000, dtype=torch.float64).uniform_(generator=random)
    return features, torch.ones(12_500, dtype=torch.float64)


def test_what_asks_without_a_seat_or_the_key_is_refused_alone() -> None:
    with start_coordinator(Address("127.0.0.1", 0), "run") as (_, at):
        access = Access(meeting._KEY, False, ())
        assert access.ask(str(at), {"peer": Peer(7, None, b"token").to_json()}, PATIENCE_S) == {}
        refused: list[tuple[dict[str, Json], str]] = [
            ({"peer": "nothing"}, "where an address was due"),
            ({"peer": '{"rank": 1e400, "token": "00"}'}, "where an address was due"),
            ({"seat": False}, "no question"),
        ]
        for question, why in refused:
            assert why in access.ask(str(at), question, PATIENCE_S)["refused"]
        with pytest.raises(OSError, match="connection was closed"):
            Access(bytes(32), False, ()).ask(str(at), {"seat": True}, PATIENCE_S)
        with connect_device(at, patience_s=PATIENCE_S) as first:
            assert first.comm.rank == 1


def test_what_comes_with_the_rank_of_another_or_from_another_run_is_refused_alone() -> None:
    access = Access(meeting._KEY, False, ())
    with start_coordinator(Address("127.0.0.1", 0), "run") as (_, at):

        def come(me: Peer) -> list[Peer]:
            return [Peer.from_json(access.ask(str(at), {"peer": me.to_json()}, PATIENCE_S)["peer"]), me]

        with connect_device(at, patience_s=PATIENCE_S) as first:
            mine = first.session.transport.local_peer
            assert come(mine)[1] == mine, "an answer that was lost is given again"
            other = {"peer": Peer(1, None, b"another").to_json()}
            assert access.ask(str(at), other, PATIENCE_S) == {"refused": "rank 1 has come already"}
            rank = access.ask(str(at), {"seat": True}, PATIENCE_S)["rank"]
            with pytest.raises(FarflungError, match="disagree on coded run"):
                meeting._create_runtime(
                    rank, "another", Endpoint(), PATIENCE_S, members=[0, rank], announce=come
                )
            with connect_device(at, patience_s=PATIENCE_S) as second:
                assert (first.comm.rank, second.comm.rank) == (1, rank + 1)
            assert first.session.members.present_ranks == {0}


@pytest.mark.parametrize("sealed", ["coordinator", "device"])
def test_a_device_that_encrypts_where_the_coordinator_does_not_is_refused_alone(
    monkeypatch: pytest.MonkeyPatch, sealed: str
) -> None:
    """And the other way round: at once, and not after its patience."""
    monkeypatch.setattr(meeting, "_VISIT_TIMEOUT_S", 1.0)
    coordinators, devices = (Endpoint(encrypt=sealed == name) for name in ("coordinator", "device"))
    with start_coordinator(Address("127.0.0.1", 0), "run", coordinators) as (_, at):
        with (
            pytest.raises(ConfigError, match=r"refuses this device: rank . listens only on its own machine"),
            connect_device(at, devices, patience_s=PATIENCE_S),
        ):
            pytest.fail("it is in")
        with connect_device(at, coordinators, patience_s=PATIENCE_S) as fits:
            assert fits.comm.rank == 2


def test_a_coordinator_is_met_where_it_says() -> None:
    forwarded = Endpoint(advertise="127.0.0.2:7999")
    with start_coordinator(Address("127.0.0.1", 0), "run", forwarded) as (_, at):
        assert at == Address("127.0.0.2", 7999)


@pytest.mark.parametrize(
    ("advertise", "said"),
    [
        ("none", "^--advertise none: devices connect to the coordinator"),
        ("a:b:c", "^--advertise a:b:c: must be HOST or HOST:PORT"),
    ],
)
def test_a_coordinator_that_cannot_be_reached_is_refused(advertise: str, said: str) -> None:
    with (
        pytest.raises(ConfigError, match=said),
        start_coordinator(Address("127.0.0.1", 0), "run", Endpoint(advertise=advertise)),
    ):
        pass


@pytest.mark.parametrize("how", ["asks and is killed", "comes and never greets", "has left"])
def test_a_seat_that_was_taken_in_vain_is_given_again(monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    """The only one."""
    monkeypatch.setattr(meeting, "MAX_PROCESSES", 2)
    with start_coordinator(Address("127.0.0.1", 0), "run", connect_timeout_s=0.5) as (_, at):
        if how == "has left":
            with connect_device(at, patience_s=PATIENCE_S) as first:
                assert first.comm.rank == 1
        else:
            access = Access(meeting._KEY, False, ())
            assert access.ask(str(at), {"seat": True}, PATIENCE_S) == {"run": "run", "rank": 1}
            if how == "comes and never greets":
                silent = Peer(1, None, b"token")
                assert "peer" in access.ask(str(at), {"peer": silent.to_json()}, PATIENCE_S)
        until = time.monotonic() + PATIENCE_S
        while time.monotonic() < until:
            with suppress(FarflungError), connect_device(at, patience_s=PATIENCE_S) as second:
                assert second.comm.rank == 1
                return
        pytest.fail("the seat is not given again")


def test_a_device_is_told_that_no_seat_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meeting, "MAX_PROCESSES", 2)
    said = "all 1 seats of the run are taken: try again when a device has left"
    with (
        start_coordinator(Address("127.0.0.1", 0), "run") as (_, at),
        connect_device(at, patience_s=PATIENCE_S),
        pytest.raises(ConfigError, match=said),
        connect_device(at, patience_s=PATIENCE_S),
    ):
        pytest.fail("there is a seat")
