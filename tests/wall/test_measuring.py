"""A network that is not known is measured: exactly in virtual time, where its links are known after all."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from farflung.comm import AUTO, resolve_collective
from farflung.decisions import DecisionLog
from farflung.network import Link, Medium, NetworkProfile, Site, find_network, format_profile, load_profile
from farflung.network.link import compute_mean_capacity
from farflung.network.tcp import CongestionControl
from farflung.sim import VirtualWorld
from farflung.tasks import Pending
from farflung.types import Payload, Tag
from farflung.wall.measuring import GROWTH, MAX_NBYTES, NetworkMeasurement, measure_network, probe_network
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


# --- probed link by link --------------------------------------------------------------------------------------------


def probed(network: NetworkProfile) -> tuple[NetworkMeasurement, float]:
    """What a probe finds, and the virtual seconds it takes."""
    assert network.nodes is not None
    world = VirtualWorld(network.nodes, network=network)
    found, *others = world.run([probe_network(runtime) for runtime in world.runtimes])
    assert found is not None
    assert others == [None] * (network.nodes - 1)
    return found, world.clock.time()


@pytest.mark.parametrize("size", [2, 3, 8])
def test_each_link_is_probed_alone(size: int) -> None:
    link = Link(0.03, 1e7)
    found, seconds = probed(NetworkProfile.create_uniform(link, size))
    assert [*found.links] == [(src, dst) for src in range(size) for dst in range(size) if src != dst]
    for one in found.links.values():
        assert one.latency_s == pytest.approx(link.latency_s, rel=0.01)
        assert one.bandwidth_bps == pytest.approx(link.bandwidth_bps, rel=0.01)
        assert one.low_bps <= one.bandwidth_bps <= one.high_bps
    profile = found.build_profile("probed", [f"machine {rank}" for rank in range(size)])
    assert not profile.media
    assert {(site.up_bps, site.down_bps) for site in profile.sites} == {(float("inf"), float("inf"))}
    assert seconds < 60


@pytest.mark.parametrize("congestion", ["cubic", "bbr"])
@pytest.mark.parametrize("link", [Link(0.05, 5e7), Link(0.139, 1.3e7)])
def test_a_slow_start_does_not_count(link: Link, congestion: CongestionControl) -> None:
    network = dataclasses.replace(NetworkProfile.create_uniform(link, 2), congestion=congestion)
    found, _ = probed(network)
    assert found.links[0, 1].bandwidth_bps == pytest.approx(link.bandwidth_bps, rel=0.03)


def test_stream_is_bounded_where_the_kernel_takes_all_of_it_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    world = VirtualWorld(4, network=find_network("4g").with_nodes(4))
    send = world.network.send

    def send_at_once(*args: Any, **options: Any) -> Pending[None]:
        send(*args, **options)
        sent = Pending[None]()
        sent.set_result(None)
        return sent

    monkeypatch.setattr(world.network, "send", send_at_once)
    found, *_ = world.run([probe_network(runtime) for runtime in world.runtimes])
    assert found is not None
    assert found.links[0, 1].bandwidth_bps == pytest.approx(6.3e6, rel=0.1)
    assert world.clock.time() < 80, "in place of 760"


def test_an_uplink_that_links_share_is_told_from_the_links() -> None:
    sites = tuple(Site(f"home {number}", 1, up_bps=5e6, down_bps=4e7) for number in range(4))
    found, _ = probed(NetworkProfile("homes", sites, default=Link(0.01)))
    profile = found.build_profile("probed", [site.name for site in sites])
    assert [site.up_bps for site in profile.sites] == pytest.approx([5e6] * 4, rel=0.02)
    assert {site.down_bps for site in profile.sites} == {float("inf")}
    assert not profile.media


def test_a_medium_that_all_share_is_found() -> None:
    sites = tuple(Site(f"laptop {number}", 1, medium="air") for number in range(4))
    network = NetworkProfile("air", sites, media=(Medium("air", 2e7),), default=Link(0.002))
    found, _ = probed(network)
    (medium,) = found.build_profile("probed", [site.name for site in sites]).media
    assert medium.bandwidth_bps == pytest.approx(2e7, rel=0.02)


def test_what_was_probed_is_read_again(tmp_path: Path) -> None:
    sites = tuple(Site(f"laptop {number}", 1, up_bps=5e6, medium="air") for number in range(3))
    found, _ = probed(NetworkProfile("air", sites, media=(Medium("air", 2e6),), default=Link(0.002)))
    profile = found.build_profile("my network", [site.name for site in sites])
    (path := tmp_path / "mine.toml").write_text(format_profile(profile, ["measured at home"]))
    read = load_profile(path)
    assert (read.name, [site.name for site in read.sites]) == ("my network", [site.name for site in sites])
    assert [site.medium for site in read.sites] == ["shared by all"] * 3
    assert read.media[0].bandwidth_bps == pytest.approx(profile.media[0].bandwidth_bps, rel=1e-3)
    for ours, theirs in zip(read.site_links, profile.site_links, strict=True):
        assert (ours.src, ours.dst) == (theirs.src, theirs.dst)
        assert ours.link.latency_s == pytest.approx(theirs.link.latency_s, rel=1e-3)
