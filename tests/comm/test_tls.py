"""Encrypted connections: what is on the wire, who gets in, who is bound to which rank, and what nobody may slow."""

from __future__ import annotations

import dataclasses
import socket
import struct
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from farflung.comm import Endpoint, ExchangeChannel, Peer
from farflung.comm.keys import Keys, compute_fingerprint, load_keys, make_keys
from farflung.errors import ConfigError, DeadlinePassed, PeerLost, ProtocolError
from farflung.types import Payload
from farflung.wall import WallRuntime
from tests.helpers import PATIENCE_S, Group, impostor, in_threads, joined, parted, tag
from tests.proxy import Detour

SIZE = 3


# --- whole replicas ---------------------------------------------------------------------------------------------


class Run:
    """Encrypted replicas that sum one tensor after another."""

    def __init__(self, store: dist.Store | None = None, **options: Any) -> None:
        self.runtimes = joined(SIZE, store, **{"endpoint": Endpoint(encrypt=True), **options})
        self.comms = [runtime.comm for runtime in self.runtimes]
        self._number = 0

    def all_reduce(self) -> None:
        self._number += 1
        number = self._number

        async def one(runtime: WallRuntime) -> torch.Tensor:
            channel = ExchangeChannel(runtime.comm, number, 0)
            tensor = torch.full((3000,), float(number + runtime.comm.rank))
            return (
                await channel.get_collective("direct")(channel, tensor, torch.zeros(1, dtype=torch.float64))
            )[0]

        for pending in [runtime.launch(one(runtime)) for runtime in self.runtimes]:
            assert torch.equal(pending.wait(), torch.full((3000,), 3.0 * number + 3))


@pytest.fixture
def run() -> Iterator[Callable[..., Run]]:
    made: list[Run] = []

    def make(*args: Any, **options: Any) -> Run:
        made.append(Run(*args, **options))
        return made[-1]

    yield make
    for one in made:
        parted(one.runtimes)


@pytest.fixture
def detour() -> Iterator[Callable[..., Detour]]:
    made: list[Detour] = []

    def make(*ranks: int) -> Detour:
        made.append(Detour(*ranks))
        return made[-1]

    yield make
    for one in made:
        one.close()


@pytest.mark.parametrize("encrypt", [True, False])
def test_what_passes_cannot_be_read(
    encrypt: bool, run: Callable[..., Run], detour: Callable[..., Detour]
) -> None:
    store = detour(0, 1)
    members = run(store, endpoint=Endpoint(encrypt=encrypt))
    members.all_reduce()
    for proxy in store.proxies.values():
        for sent in (struct.pack("<f", 6.0) * 16, b"settings"):
            assert (sent not in proxy.passed) is encrypt
    assert [comm.session.transport.refusals.num_messages for comm in members.comms] == [0, 0, 0]


def test_replicas_prove_themselves_with_keys_of_their_own(run: Callable[..., Run]) -> None:
    members = run()
    assert len({comm.session.transport.local_peer.key for comm in members.comms}) == SIZE
    members.all_reduce()


def test_the_folder_of_keys_takes_the_place_of_the_stores(tmp_path: Path, run: Callable[..., Run]) -> None:
    make_keys(tmp_path / "a", "alpha")
    keys = load_keys(tmp_path / "a")
    members = run(endpoint=Endpoint(keys=tmp_path / "a"))
    members.all_reduce()
    assert {comm.session.transport.local_peer.key for comm in members.comms} == {keys.public}


def test_a_key_that_is_not_in_the_folder_is_named(tmp_path: Path) -> None:
    for name in ("alpha", "beta"):
        make_keys(tmp_path / name, name)
    alpha, beta = (load_keys(tmp_path / name) for name in ("alpha", "beta"))
    store = dist.HashStore()
    results = in_threads(
        *(
            lambda rank=rank, name=name: WallRuntime(rank, 2, store, endpoint=Endpoint(keys=tmp_path / name))
            for rank, name in enumerate(("alpha", "beta"))
        )
    )
    for rank, error in enumerate(results):
        assert isinstance(error, ConfigError)
        assert f"rank {1 - rank} at tcp://127.0.0.1:" in str(error)
        assert compute_fingerprint((beta, alpha)[rank].public) in str(error)


def test_a_replica_that_does_not_encrypt_is_named() -> None:
    store = dist.HashStore()
    results = in_threads(
        *(
            lambda rank=rank: WallRuntime(rank, 2, store, endpoint=Endpoint(encrypt=rank == 1))
            for rank in range(2)
        )
    )
    for error in results:
        assert isinstance(error, ConfigError)
        assert "rank 0 listens only on its own machine (tcp://127.0.0.1:" in str(error)
        assert "rank 1 encrypts" in str(error)
        assert "set MASTER_ADDR (--master-addr) to an address of rank 0's machine that all" in str(error)
        assert "a name that /etc/hosts maps to 127.0.1.1 there" in str(error)


def test_a_connection_that_is_cut_is_a_lost_member_at_once(
    run: Callable[..., Run], detour: Callable[..., Detour]
) -> None:
    store = detour(0)
    members = run(store)
    members.all_reduce()
    waiting = members.runtimes[0].launch(_receive(members.runtimes[0]))
    store.proxies[0].cut()
    # Nothing but the loss itself can end it before its deadline.
    with pytest.raises(PeerLost, match="its connection was closed from its end") as lost:
        waiting.wait()
    assert lost.value.rank in {1, 2}
    assert members.runtimes[0].read_clock() < PATIENCE_S


async def _receive(runtime: WallRuntime) -> Payload:
    return await runtime.comm.recv(1, tag(99))


# --- what the store may say -------------------------------------------------------------------------------------

ELSEWHERE = "192.0.2.1"  # an address for documentation: no machine has it


def test_what_is_known_of_the_other_end_is_in_the_error() -> None:
    store = dist.HashStore()
    with socket.create_server(("127.0.0.1", 0)) as stranger:
        stranger.listen()
        address = f"tcp://127.0.0.1:{stranger.getsockname()[1]}"
        peer = Peer(0, address, bytes(16), Keys.generate().public).to_json()

        def hang_up() -> None:
            stranger.accept()[0].close()

        error, *_ = in_threads(
            lambda: WallRuntime(1, 2, store, endpoint=Endpoint(encrypt=True), connect_timeout_s=1.0),
            impostor(store, 0, 2, peer),
            hang_up,
        )
    assert isinstance(error, DeadlinePassed)
    assert f"its greeting: {address} was reached, but did not prove to be that rank" in str(error)


def test_the_store_holds_every_rank_under_its_own_name() -> None:
    store = dist.HashStore()
    peer = Peer(2, "tcp://127.0.0.1:5000", bytes(16)).to_json()
    error, _ = in_threads(lambda: WallRuntime(1, 2, store), impostor(store, 0, 2, peer))
    assert isinstance(error, ProtocolError)
    assert str(error) == "the store holds rank 2 under the name of rank 0"


def test_the_store_cannot_send_anybody_away_in_the_clear() -> None:
    store = dist.HashStore()
    peer = Peer(0, f"tcp://{ELSEWHERE}:5000", bytes(16)).to_json()
    error, _ = in_threads(lambda: WallRuntime(1, 2, store), impostor(store, 0, 2, peer))
    assert isinstance(error, ProtocolError)
    assert f"sends rank 1 to tcp://{ELSEWHERE}:5000 for rank 0" in str(error)


def test_an_alert_of_who_has_not_shown_a_certificate_is_no_refusal() -> None:
    """Anybody on the way can send one; the member is waited for."""
    with closing(Group(2, keys=Keys.generate())) as members, socket.create_server(("127.0.0.1", 0)) as there:
        host, port = there.getsockname()
        peer = dataclasses.replace(members.transports[0].local_peer, address=f"tcp://{host}:{port}")
        members.views[1].members.connect([peer, members.transports[1].local_peer])
        members.transports[1].poll(0.0)
        met, _ = there.accept()
        with met:
            met.sendall(b"\x15\x03\x03\x00\x02\x02\x28")
            handshaker = members.transports[1].handshaker
            members.until(lambda: not handshaker.connections)
        assert not members.views[1].mailbox.ended.is_done
