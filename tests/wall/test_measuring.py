"""A network that is not known is measured: exactly in virtual time, where its links are known after all."""

from __future__ import annotations

from typing import Any

import pytest

from farflung.comm import AUTO, resolve_collective
from farflung.decisions import DecisionLog
from farflung.network import Link, NetworkProfile, Site, find_network
from farflung.network.link import compute_mean_capacity
from farflung.sim import VirtualWorld
from farflung.tasks import Pending
from farflung.types import Payload, Tag
from farflung.wall.measuring import GROWTH, MAX_NBYTES, measure_network
from farflung.wall.runtime import WallRuntime


def measured(network: NetworkProfile) -> tuple[NetworkProfile, float]:
    """What rank 0 finds, and the virtual seconds it takes."""
    assert network.nodes is not None
    world = VirtualWorld(network.nodes, network=network)
    found, *others = world.run([measure_network(runtime) for runtime in world.runtimes])
    assert found is not None
    assert others == [None] * (network.nodes - 1)
    return found, world.clock.time()


@pytest.mark.parametrize("link", [Link(0.05, 1e7), Link(0.001, 1e9), Link(0.2, 1e6)])
def test_links_of_their_own_are_found(link: Link) -> None:
    found, seconds = measured(NetworkProfile.create_uniform(link, 4))
    for src in range(4):
        for dst in set(range(4)) - {src}:
            one = found.get_link(src, dst)
            assert one.latency_s == pytest.approx(link.latency_s, rel=0.05)
            assert one.bandwidth_bps == pytest.approx(link.bandwidth_bps, rel=0.05)
    assert seconds < 11 * 2 * link.latency_s + 0.3


def test_unlike_links_are_told_apart() -> None:
    network = NetworkProfile(
        "two offices",
        (Site("a", 2, Link(0.001, 1e8)), Site("b", 2, Link(0.001, 1e8))),
        default=Link(0.1, 1e6),
    )
    found, _ = measured(network)
    for src, dst, link in ((0, 1, Link(0.001, 1e8)), (2, 3, Link(0.001, 1e8)), (0, 2, Link(0.1, 1e6))):
        assert found.get_link(src, dst).latency_s == pytest.approx(link.latency_s, rel=0.05)
        assert found.get_link(src, dst).bandwidth_bps == pytest.approx(link.bandwidth_bps, rel=0.05)


@pytest.mark.parametrize("network", ["wifi-10mbps", "four-regions", "lan-1g"])
@pytest.mark.parametrize("nbytes", [400, 40_000, 4_000_000])
def test_the_choice_is_that_of_the_profile(network: str, nbytes: int) -> None:
    profile = find_network(network).with_nodes(4)
    found, _ = measured(profile)
    wanted = resolve_collective(nbytes, 4, profile)
    assert resolve_collective(nbytes, 4, found) == wanted


def test_what_is_shared_shows_in_the_bandwidth() -> None:
    found, _ = measured(find_network("wifi-shared-100mbps").with_nodes(4))
    assert compute_mean_capacity(found.get_link(0, 1).bandwidth_bps) < 100e6 / 6


def test_few_bytes_are_sent_however_many_replicas_there_are() -> None:
    for size in (3, 24):
        world = VirtualWorld(size, Link(0.01))
        sent: list[int] = []
        carry = world.network.send

        def counted(
            src: int, dst: int, tag: Tag, payload: Payload, priority: int = 0,
            *, carry: Any = carry, sent: list[int] = sent,
        ) -> Pending[None]:  # fmt: skip
            sent.append(payload.nbytes if src == 0 else 0)
            left: Pending[None] = carry(src, dst, tag, payload, priority)
            return left

        world.network.send = counted  # type: ignore[method-assign]
        world.run([measure_network(runtime) for runtime in world.runtimes])
        assert sum(sent) < MAX_NBYTES * GROWTH / (GROWTH - 1) + 64 * size


def test_on_loopback_nothing_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = WallRuntime(0, 1, None, decisions=DecisionLog())
    try:
        monkeypatch.setattr("farflung.wall.measuring.measure_network", lambda _: pytest.fail("measured"))
        assert runtime.resolve_collective("ring", [400]) == "ring"
        assert runtime.decisions.entries == []
        assert runtime.resolve_collective(AUTO, [400]) == "all_gather"
        assert runtime.comm.auto_collectives == {400: "all_gather"}
        assert [(d.name, d.value, d.timing) for d in runtime.decisions.entries] == [
            ("collective", {"400": "all_gather"}, False)
        ]
    finally:
        runtime.close()
