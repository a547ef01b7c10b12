"""The formulas against the simulator, and the choice by them."""

from __future__ import annotations

import pytest
import torch

from farflung.comm import COLLECTIVES, ExchangeChannel, choose_collective, predict_cost_s
from farflung.errors import ConfigError, UnknownName
from farflung.network import (
    NETWORKS,
    BandwidthTrace,
    Link,
    NetworkProfile,
    Site,
    SiteLink,
    costs,
    find_network,
)
from farflung.sim import VirtualWorld
from farflung.types import Runtime

pytestmark = pytest.mark.usefixtures("unframed")

ALIKE = NetworkProfile.create_uniform(Link(0.25, 8e3))
SIDE_NBYTES = 16
COSTS = [name for name, collective in COLLECTIVES.items() if collective.cost_s is not None]


def simulated_s(profile: NetworkProfile, name: str, nbytes: int) -> float:
    """Virtual seconds of one collective that all ranks join at 0."""
    assert profile.nodes is not None
    world = VirtualWorld(profile.nodes, network=profile)

    async def body(runtime: Runtime) -> None:
        side = torch.zeros(SIDE_NBYTES // 8, dtype=torch.float64)
        channel = ExchangeChannel(runtime.comm, 1, 0)
        await channel.get_collective(name)(channel, torch.zeros(nbytes, dtype=torch.uint8), side)

    world.run([body(runtime) for runtime in world.runtimes])
    return world.clock.time()


def test_every_collective_has_a_formula() -> None:
    assert set(COSTS) == set(COLLECTIVES) - {"auto", "native"}


@pytest.mark.parametrize("name", COSTS)
@pytest.mark.parametrize(
    "link", [Link(0.25, 8e3), Link(0.25), Link(0.0, 8e3)], ids=["both", "latency", "bandwidth"]
)
def test_exact_on_links_that_are_alike(link: Link, name: str) -> None:
    for size in (1, 2, 3, 4, 8):
        profile = NetworkProfile.create_uniform(link).with_nodes(size)
        found = predict_cost_s(profile, name, 840, metadata_nbytes=SIDE_NBYTES)
        assert found == pytest.approx(simulated_s(profile, name, 840), rel=1e-12), size


@pytest.mark.parametrize("name", sorted(COSTS))
def test_exact_in_pieces(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(costs, "MAX_PIECE_NBYTES", 1 << 10)
    nbytes = 4 * 8 * costs.MAX_PIECE_NBYTES
    for latency in (0.0, 0.1, 5.0):
        profile = NetworkProfile.create_uniform(Link(latency, 8e3)).with_nodes(4)
        found = predict_cost_s(profile, name, nbytes, metadata_nbytes=SIDE_NBYTES)
        assert found == pytest.approx(simulated_s(profile, name, nbytes), rel=2e-3), (
            latency
        )  # by the side vector


@pytest.mark.parametrize(
    ("nbytes", "pieces"),
    [(0, 1), (999_999, 1), (1_000_000, 2), (40_000_000, 2), (4 << 24, 4), (1 << 30, 8)],
)
def test_pieces_are_two_unless_they_are_small_or_take_much_memory(nbytes: int, pieces: int) -> None:
    assert costs.count_pieces(nbytes) == pieces


def test_by_hand() -> None:
    profile = ALIKE.with_nodes(4)  # a kilobyte in a second
    assert predict_cost_s(profile, "direct", 4000) == 2 * (0.25 + 1.0)
    assert predict_cost_s(profile, "ring", 4000) == 6 * (0.25 + 1.0)
    assert predict_cost_s(profile, "parameter_server", 4000) == 2 * (0.25 + 4.0)
    assert predict_cost_s(profile, "multi_parameter_server", 4000) == 2 * (0.25 + 2.0)
    assert predict_cost_s(profile, "all_gather", 4000) == 0.25 + 4.0


def test_one_server_behind_one_link() -> None:
    """2 alpha + 2 p n beta: workers that are not the server push and pull over its link."""
    switch = NetworkProfile("s", (Site("all", 5, Link(0.25), up_bps=8e3, down_bps=8e3),))
    assert predict_cost_s(switch, "parameter_server", 1000) == 2 * 0.25 + 2 * 4 * 1.0
    assert predict_cost_s(switch, "ring", 1000) == pytest.approx(8 * (0.25 + 0.2))


@pytest.mark.parametrize("network", NETWORKS)
@pytest.mark.parametrize("name", COSTS)
def test_near_the_simulator_on_every_named_network(network: str, name: str) -> None:
    profile = find_network(network)
    for size in {profile.nodes or 3, profile.nodes or 5}:
        fitted = profile.with_nodes(size)
        for nbytes in (1000, 840_000):
            found = predict_cost_s(fitted, name, nbytes, metadata_nbytes=SIDE_NBYTES)
            # Jitter is left out of the formulas, and how shares follow each other.
            bound = 0.6 if any(link.jitter_s for link in fitted.iter_links()) else 0.35
            assert found == pytest.approx(simulated_s(fitted, name, nbytes), rel=bound), (size, nbytes)


def test_a_ring_over_unequal_links_adds_up_what_a_segment_passes() -> None:
    # 0 to 1: 1 s; 1 to 2: 2 s; 2 to 0: 4 s for every segment, 4 hops: the two slowest of six are passed twice.
    ways = {
        ("a", "b"): 1.0,
        ("b", "c"): 2.0,
        ("c", "a"): 4.0,
        ("b", "a"): 0.5,
        ("c", "b"): 0.5,
        ("a", "c"): 0.5,
    }
    profile = NetworkProfile(
        "triangle",
        tuple(Site(name, 1) for name in "abc"),
        tuple(SiteLink(*pair, Link(seconds)) for pair, seconds in ways.items()),
    )
    # Four hops end at a after c-a, b-c, a-b, c-a: 4 + 2 + 1 + 4 = 11; at b 1+4+2+1 = 8; at c 2+1+4+2 = 9.
    assert predict_cost_s(profile, "ring", 300) == simulated_s(profile, "ring", 300) == 11.0


def test_traces_count_by_their_mean() -> None:
    trace = BandwidthTrace((0.0, 1.0), (4e3, 12e3), 2.0, "repeat")
    assert predict_cost_s(NetworkProfile.create_uniform(Link(0.25, trace), 4), "direct", 4000) == 2.5


# --- the choice -------------------------------------------------------------------------------------------------


def test_few_hops_where_delays_count_and_a_ring_where_the_air_is_shared() -> None:
    assert choose_collective(ALIKE.with_nodes(8), 4) == "all_gather"
    # Each byte on the air once: a ring's neighbours add on the way; a server's answers go out one by one.
    island = NetworkProfile(
        "islands",
        (
            Site("a", 4, Link(1e-6, 1e9), exit_bps=1e6, entry_bps=1e6),
            Site("b", 4, Link(1e-6, 1e9), exit_bps=1e6, entry_bps=1e6),
        ),
        default=Link(1e-6),
    )
    assert choose_collective(island, 1_000_000) == "ring"
    assert choose_collective(island, 1_000_000, candidates=("parameter_server", "direct")) == "direct"


def test_the_first_wins_a_tie() -> None:
    two = ALIKE.with_nodes(2)
    assert predict_cost_s(two, "ring", 80) == pytest.approx(predict_cost_s(two, "direct", 80), rel=1e-12)
    assert choose_collective(two, 80, candidates=("ring", "direct")) == "ring"
    assert choose_collective(two, 80, candidates=("direct", "ring")) == "direct"


def test_what_is_refused() -> None:
    with pytest.raises(UnknownName, match="unknown collective 'tree'"):
        predict_cost_s(ALIKE.with_nodes(2), "tree", 1)
    with pytest.raises(ConfigError, match="uniform: the number of nodes is not set"):
        predict_cost_s(ALIKE, "ring", 1)
