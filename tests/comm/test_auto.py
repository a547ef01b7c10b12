"""``auto`` is settled once, by the model, and is then that collective on every rank."""

from __future__ import annotations

from collections.abc import Coroutine
from typing import Any

import pytest
import torch
from torch import Tensor

from farflung.codecs import Truncate16
from farflung.comm import (
    AUTO,
    COLLECTIVES,
    Coding,
    Collective,
    ExchangeChannel,
    choose_collective,
    resolve_collective,
)
from farflung.comm.collectives import direct
from farflung.decisions import DecisionLog
from farflung.errors import ConfigError, UnknownName
from farflung.network import Link, NetworkProfile, Site, SiteLink, find_network
from farflung.sim import VirtualWorld
from farflung.tasks import Pending
from farflung.types import Decision, Runtime, Seeds
from tests.helpers import same_bits

SIZE = 8
IN_RANK_ORDER = sorted(name for name, collective in COLLECTIVES.items() if collective.is_rank_ordered)


def took(
    network: NetworkProfile, name: str, nbytes: int, coding: Coding | None = None, known: int | None = None
) -> tuple[float, list[Tensor]]:
    world = VirtualWorld(network.nodes or SIZE, network=network)
    world.resolve_collective(name, [known or nbytes])

    def body(runtime: Runtime) -> Coroutine[Pending[Any], None, Any]:
        tensor = torch.rand(nbytes // 4, generator=torch.Generator().manual_seed(runtime.comm.rank))
        side = torch.ones(6, dtype=torch.float64)
        channel = ExchangeChannel(runtime.comm, 1, 0)
        return channel.get_collective(name)(channel, tensor, side, coding=coding)  # type: ignore[return-value]

    results = world.run([body(runtime) for runtime in world.runtimes])
    return world.clock.time(), [total for total, _ in results]


def test_all_that_it_may_be_give_the_same_bits() -> None:
    assert IN_RANK_ORDER == ["all_gather", "direct", "multi_parameter_server", "parameter_server"]
    profile = find_network("four-regions").with_nodes(5)
    sums = [took(profile, name, 4_000)[1] for name in IN_RANK_ORDER]
    assert all(same_bits(each[rank], sums[0][0]) for each in sums for rank in range(5))
    assert not same_bits(took(profile, "ring", 4_000)[1][0], sums[0][0])


@pytest.mark.parametrize(
    ("network", "nbytes", "chosen"),
    [
        ("four-regions", 4_000_000, "direct"),
        ("wifi-shared-100mbps", 40_000, "parameter_server"),
        ("four-regions", 4_000, "all_gather"),
        ("edge-5gbps", 400_000, "direct"),
    ],
)
def test_it_is_the_one_that_is_chosen(network: str, nbytes: int, chosen: str) -> None:
    profile = find_network(network).with_nodes(SIZE)
    assert resolve_collective(nbytes, SIZE, profile) == chosen
    seconds, sums = took(profile, AUTO, nbytes)
    wanted_s, wanted = took(profile, chosen, nbytes)
    assert seconds == wanted_s
    assert all(same_bits(a, b) for a, b in zip(sums, wanted, strict=True))
    # The simulator finds no other faster that adds in the same order.
    for other in IN_RANK_ORDER:
        assert seconds <= took(profile, other, nbytes)[0]


def test_each_size_of_tensor_has_its_own() -> None:
    world = VirtualWorld(4, network=find_network("four-regions"))
    assert world.resolve_collective(AUTO, [4_000, 4_000_000, 4_000]) == "direct, all_gather"
    assert {runtime.comm.auto_collectives[4_000] for runtime in world.runtimes} == {"all_gather"}
    assert {runtime.comm.auto_collectives[4_000_000] for runtime in world.runtimes} == {"direct"}


@pytest.mark.parametrize(
    ("size", "nbytes", "chosen"),
    [
        (1, 40_000_000, "all_gather"),
        (2, 40_000_000, "all_gather"),
        (4, 4_000, "all_gather"),
        (4, 40_000, "all_gather"),
        (4, 48_000, "direct"),
        (64, 1_000, "all_gather"),
        (64, 1_200, "direct"),
    ],
)
def test_where_the_network_is_not_known_it_hangs_on_the_traffic(size: int, nbytes: int, chosen: str) -> None:
    assert resolve_collective(nbytes, size, None) == chosen


@pytest.mark.parametrize(
    ("nbytes", "latency_s", "chosen"),
    [(999_996, 0.0, "all_gather"), (1_000_000, 0.0, "direct"), (1_000_000, 0.001, "all_gather")],
)
def test_between_two_direct_saves_copies_of_large_tensors_where_a_delay_more_costs_nothing(
    nbytes: int, latency_s: float, chosen: str
) -> None:
    assert resolve_collective(nbytes, 2, NetworkProfile.create_uniform(Link(latency_s), 2)) == chosen


def test_a_measured_network_leaves_out_servers_whose_links_seem_free() -> None:
    """Rates of all links at once: rank 0's flows had the rest of the medium, once the others had been measured."""
    fast, slow = Link(0.001, 10e6), Link(0.001, 1e6)
    names = [f"rank {rank}" for rank in range(4)]
    links = [
        SiteLink(src, dst, fast if names[0] in (src, dst) else slow)
        for src in names
        for dst in names
        if src != dst
    ]
    profile = NetworkProfile("measured", tuple(Site(name, 1) for name in names), tuple(links))
    assert resolve_collective(300_000, 4, profile) == "parameter_server"
    assert resolve_collective(300_000, 4, profile, is_measured=True) == "direct"
    assert resolve_collective(100, 4, profile, is_measured=True) == "all_gather"


def test_any_other_name_stands_for_itself() -> None:
    world = VirtualWorld(4, network=find_network("wifi-shared-100mbps"))
    for name in COLLECTIVES.keys() - {AUTO}:
        assert world.resolve_collective(name, [40_000]) == name
    with pytest.raises(UnknownName, match="unknown collective 'star'"):
        world.resolve_collective("star", [40_000])
    with pytest.raises(ConfigError, match="3 are to run"):
        resolve_collective(40_000, 3, find_network("wifi-shared-100mbps").with_nodes(4))


def test_for_sizes_that_were_not_known_it_goes_by_the_size() -> None:
    profile = find_network("wifi-shared-100mbps").with_nodes(4)
    wanted = took(profile, "all_gather", 40_000)[0]
    assert took(profile, AUTO, 40_000, known=4_000)[0] == wanted != took(profile, AUTO, 40_000)[0]


def test_a_codec_travels_as_direct() -> None:
    profile = find_network("wifi-shared-100mbps").with_nodes(4)
    coding = Coding(Truncate16(), Seeds(0, 0), step=0)
    assert took(profile, AUTO, 40_000, coding)[0] == took(profile, "direct", 40_000, coding)[0]
    assert took(profile, AUTO, 40_000, coding)[0] != took(profile, "parameter_server", 40_000, coding)[0]


# --- the decision -----------------------------------------------------------------------------------------------


def test_it_is_recorded_once_and_is_no_decision_by_time() -> None:
    log = DecisionLog()
    world = VirtualWorld(4, network=find_network("wifi-shared-100mbps"), decisions=log)
    world.resolve_collective("ring", [40_000])
    assert log.entries == []
    world.resolve_collective(AUTO, [40_000], step=3)
    assert log.entries == [Decision("collective", 3, {"40000": "parameter_server"}, timing=False)]


@pytest.mark.parametrize(
    ("replayed", "fresh", "chosen"),
    [
        ([Decision("collective", 0, {"40000": "direct"}, timing=False)], False, "direct"),
        ([Decision("collective", 0, {"40000": "direct"}, timing=False)], True, "parameter_server"),
        ([], False, "parameter_server"),  # the run that is replayed had named its collective
    ],
)
def test_a_replay_takes_the_same(replayed: list[Decision], fresh: bool, chosen: str) -> None:
    log = DecisionLog(replay=replayed)
    world = VirtualWorld(4, network=find_network("wifi-shared-100mbps"), decisions=log)
    assert world.resolve_collective(AUTO, [40_000], ignores_replay=fresh) == chosen
    assert log.entries == [Decision("collective", 0, {"40000": chosen}, timing=False)]


# --- one of one's own -------------------------------------------------------------------------------------------


def test_a_collective_of_ones_own_is_one_entry(monkeypatch: pytest.MonkeyPatch) -> None:
    mine = Collective(direct, cost_s=lambda profile, nbytes, side_nbytes: 1e-9, is_rank_ordered=True)
    monkeypatch.setitem(COLLECTIVES, "mine", mine)
    profile = find_network("four-regions").with_nodes(4)
    assert choose_collective(profile, 4_000_000) == "mine"
    assert resolve_collective(4_000_000, 4, profile) == "mine"
    assert took(profile, AUTO, 4_000_000)[0] == took(profile, "direct", 4_000_000)[0]
