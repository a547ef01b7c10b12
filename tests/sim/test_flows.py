"""Messages that share capacities arrive at the times that arithmetic on paper gives."""

from __future__ import annotations

import json
import math
from collections.abc import Coroutine
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from farflung.comm import ExchangeChannel, framing
from farflung.comm.framing import BULK_PIECE_NBYTES, MIN_PIECE_NBYTES
from farflung.errors import ConfigError
from farflung.network import BandwidthTrace, Link, Medium, NetworkProfile, Site, SiteLink, compute_window_bps
from farflung.noise import draw_uniform
from farflung.sim import VirtualCommunicator, VirtualWorld
from farflung.tasks import Pending
from farflung.types import Payload, Runtime, Tag

pytestmark = pytest.mark.usefixtures("unframed")

Message = tuple[int, int, float, int, int]
"""From, to, when, bytes, priority."""


def arrivals(network: NetworkProfile, size: int, messages: list[Message], **settings: Any) -> list[float]:
    """Sends messages; when each arrives."""
    world = VirtualWorld(size, network=network, **settings)
    found = [0.0] * len(messages)

    async def send(runtime: Runtime, index: int) -> None:
        _, dst, at, nbytes, priority = messages[index]
        await runtime.sleep_until(at)
        assert isinstance(runtime.comm, VirtualCommunicator)
        runtime.comm.send(Payload((torch.zeros(nbytes, dtype=torch.uint8),)), dst, Tag(index), priority)

    async def receive(runtime: Runtime, index: int) -> None:
        await runtime.comm.recv(messages[index][0], Tag(index))
        found[index] = runtime.read_clock()

    async def body(runtime: Runtime) -> None:
        running: list[Pending[Any]] = []
        for index, message in enumerate(messages):
            if message[0] == runtime.comm.rank:
                running.append(runtime.launch(send(runtime, index)))
            if message[1] == runtime.comm.rank:
                running.append(runtime.launch(receive(runtime, index)))
        for one in running:
            await one

    world.run([body(runtime) for runtime in world.runtimes])
    return found


def switch(**site: Any) -> NetworkProfile:
    """One delay of half a second, and capacities in which a kilobyte takes a second."""
    return NetworkProfile("switch", (Site("all", None, Link(0.5), **site),))


UP = switch(up_bps=8e3)


def test_two_flows_share_what_their_sender_can_send() -> None:
    messages: list[Message] = [(0, 1, 0.0, 1000, 0), (0, 2, 0.0, 3000, 0)]
    assert arrivals(UP, 3, messages) == [2.5, 4.5]


def test_two_flows_share_what_their_receiver_can_receive() -> None:
    messages: list[Message] = [(0, 2, 0.0, 1000, 0), (1, 2, 1.0, 1000, 0)]
    # Alone for a second, then it is over before the other begins.
    assert arrivals(switch(down_bps=8e3), 3, messages) == [1.5, 2.5]
    messages = [(0, 2, 0.0, 2000, 0), (1, 2, 1.0, 1000, 0)]
    assert arrivals(switch(down_bps=8e3), 3, messages) == [3.5, 3.5]


# --- priorities -------------------------------------------------------------------------------------------------

PIECE = MIN_PIECE_NBYTES
PACED = NetworkProfile.create_uniform(Link(0.5, 8.0 * PIECE))
"""A piece leaves in a second."""


def test_an_urgent_message_follows_the_pieces_that_were_handed_over() -> None:
    messages: list[Message] = [
        (0, 1, 0.0, 5 * PIECE, 0),
        (0, 1, 0.0, PIECE, 0),
        (0, 1, 1.5, PIECE, -1),
        (0, 1, 2.0, PIECE // 2, -2),
        (0, 1, 1.75, 0, 3),
        (1, 0, 1.0, PIECE, 0),
    ]
    # At 1.5 the second piece is leaving and the third is unsent; then come both urgent ones, and what they overtook.
    assert arrivals(PACED, 2, messages) == [7.0, 8.0, 5.0, 4.0, 8.0, 2.5]


def test_the_end_of_a_message_is_not_torn_off() -> None:
    messages: list[Message] = [(0, 1, 0.0, 2 * PIECE, 0), (0, 1, 0.25, PIECE, -1), (0, 1, 0.5, PIECE, -1)]
    assert arrivals(PACED, 2, messages) == [2.5, 3.5, 4.5]


def test_a_message_is_not_overtaken_by_one_that_takes_longer_than_its_remainder() -> None:
    messages: list[Message] = [(0, 1, 0.0, 6 * PIECE, 2), (0, 1, 1.5, 5 * PIECE, 1)]
    # At 1.5 four and a half pieces are left of the first, fewer than the second has.
    assert arrivals(PACED, 2, messages) == [6.5, 11.5]
    # A short third one interrupts the first, which then follows the second.
    assert arrivals(PACED, 2, [*messages, (0, 1, 2.5, PIECE, 0)]) == [12.5, 10.5, 5.5]


def test_a_priority_concerns_one_receiver() -> None:
    up = switch(up_bps=8.0 * PIECE)
    assert arrivals(up, 3, [(0, 1, 0.0, PIECE, 1), (0, 2, 0.0, PIECE, -1)]) == [2.5, 2.5]


def test_a_control_message_behind_4_mb_at_10_mbit() -> None:
    """In the lab, over one socket with TCP_NOTSENT_LOWAT, it took 36 to 50 ms with BBR; 76 to 79 at the beginning.

    The first waits for larger pieces.
    """
    network = NetworkProfile.create_uniform(Link(0.02, 10e6))
    messages: list[Message] = [(0, 1, 0.0, 4_000_000, 0), (0, 1, 0.5, 100, -1), (0, 1, 1.0, 100, -1)]
    bulk, first, second = arrivals(network, 2, messages)
    for control, sent_s, piece in ((first, 0.5, BULK_PIECE_NBYTES), (second, 1.0, PIECE)):
        assert 0.02 + piece * 8e-7 <= control - sent_s <= 0.02 + 2 * piece * 8e-7 + 1e-3
    assert bulk == pytest.approx(3.2 + 0.02 + 200 * 8e-7)
    messages = [(0, 1, 0.0, 4_000_000, 0), (0, 1, 0.0005, 100, -1)]
    with mock.patch.object(framing, "BULK_PIECE_NBYTES", 0):  # as while the rate is not known
        _, control = arrivals(replace(network, congestion="cubic"), 2, messages)
    assert control == pytest.approx(0.076, abs=0.002)


queued = st.lists(
    st.tuples(st.just(0), st.just(1), st.sampled_from([0.0, 0.5, 1.0, 2.25]) | st.floats(0.0, 4.0),
              st.sampled_from([0, 100, PIECE]) | st.integers(1, 5 * PIECE), st.integers(-2, 2)),
    min_size=1, max_size=10,
)  # fmt: skip


@given(queued, st.sampled_from([1, 2, 3]))
@settings(deadline=None)
def test_no_message_waits_for_more_than_two_pieces_of_less_urgent_ones(
    messages: list[Message], count: int
) -> None:
    """And all bits leave, with no pause in between: the last is there when one queue for all would be empty."""
    found = arrivals(replace(PACED, tcp_connections=count), 2, messages)
    free = 0.0
    for _, _, at, nbytes, _ in sorted(messages, key=lambda message: message[2]):
        free = max(free, at) + nbytes / PIECE
    assert max(found) == pytest.approx(free + 0.5)
    for (_, _, at, _, priority), arrival in zip(messages, found, strict=True):
        as_urgent = math.fsum(nbytes for *_, nbytes, other in messages if other <= priority)
        assert arrival - 0.5 - at <= 2 * count + as_urgent / PIECE + 1e-9


@given(queued)
@settings(max_examples=30, deadline=None)
def test_messages_of_one_priority_keep_their_order(messages: list[Message]) -> None:
    found = arrivals(replace(PACED, congestion="cubic"), 2, messages)
    for (_, _, at, _, priority), arrival in zip(messages, found, strict=True):
        for (_, _, other_at, _, other), other_arrival in zip(messages, found, strict=True):
            assert not (other == priority and at < other_at and arrival > other_arrival)


# --- several connections ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 3, 4, 8])
def test_connections_add_up_until_the_link_is_full(count: int) -> None:
    link = Link(0.05, 5e6, loss=0.01)
    network = replace(NetworkProfile.create_uniform(link), tcp_connections=count)
    one_bps = compute_window_bps(None, 0.01, 0.1)
    rate = min(count * one_bps, 0.99 * 5e6)
    found = arrivals(network, 2, [(0, 1, 0.0, 10**6, 0)])
    assert found == pytest.approx([0.05 + 8e6 / rate])
    assert (rate == 0.99 * 5e6) == (count >= 4)


def test_as_many_connections_for_each_pair_share_as_one_does() -> None:
    messages: list[Message] = [(0, 1, 0.0, 1000, 0), (0, 2, 0.0, 3000, 0)]
    assert arrivals(replace(UP, tcp_connections=4), 3, messages) == [2.5, 4.5]


def test_a_pair_of_more_connections_gets_more_of_what_they_share() -> None:
    ways = (
        SiteLink("a", "b", Link(0.1)),
        SiteLink("b", "a", Link(0.1)),
        SiteLink("a", "c", Link(0.1, loss=0.01)),
        SiteLink("c", "a", Link(0.1)),
    )
    network = NetworkProfile(
        "star", (Site("a", 1, up_bps=1e6), Site("b", 1), Site("c", 1)), ways, default=Link(0.1),
        tcp_connections="auto",
    )  # fmt: skip
    assert [network.count_connections(0, site) for site in (1, 2)] == [1, 2]
    # One third and two thirds of 1 Mbit/s; the lossy one has room for 2 x 0.56 Mbit/s of its own.
    assert arrivals(network, 3, [(0, 1, 0.0, 12_500, 0), (0, 2, 0.0, 25_000, 0)]) == pytest.approx([0.4, 0.4])


def test_messages_to_one_receiver_follow_each_other() -> None:
    assert arrivals(UP, 2, [(0, 1, 0.0, 1000, 0), (0, 1, 0.0, 1000, 0), (0, 1, 0.0, 0, 0)]) == [1.5, 2.5, 2.5]


def test_a_trace_that_halves_the_bandwidth_in_mid_transfer() -> None:
    network = switch(up_bps=BandwidthTrace((0.0, 2.0), (8e3, 4e3), 60.0))
    assert arrivals(network, 2, [(0, 1, 0.0, 3000, 0)]) == [4.5]
    link = NetworkProfile.create_uniform(Link(0.5, BandwidthTrace((0.0, 2.0), (8e3, 4e3), 60.0)))
    assert arrivals(link, 2, [(0, 1, 0.0, 3000, 0), (1, 0, 2.0, 1000, 0)]) == [4.5, 4.5]


def test_a_trace_that_ends_early_ends_the_run() -> None:
    network = switch(up_bps=BandwidthTrace((0.0,), (8e3,), 2.0, name="net.toml: trace phone"))
    with pytest.raises(ConfigError, match=r"net\.toml: trace phone: ends at 2 s"):
        arrivals(network, 2, [(0, 1, 0.0, 3000, 0)])


def test_a_medium_is_shared_in_both_directions_and_crossed_twice() -> None:
    air = NetworkProfile("air", (Site("all", None, Link(0.5), medium="m"),), media=(Medium("m", 16e3),))
    messages: list[Message] = [(0, 1, 0.0, 1000, 0), (1, 0, 0.0, 1000, 0)]
    assert arrivals(air, 2, messages) == [1.5, 1.5]
    relayed = NetworkProfile("air", air.sites, media=(Medium("m", 16e3, relayed=True),))
    assert arrivals(relayed, 2, messages) == [2.5, 2.5]
    # Into the cable it goes once.
    mixed = NetworkProfile(
        "mixed", (Site("air", 1, medium="m"), Site("cable", 1)), media=relayed.media, default=Link(0.5)
    )
    assert arrivals(mixed, 2, messages) == [1.5, 1.5]


def test_a_site_shares_its_way_out() -> None:
    network = NetworkProfile(
        "office",
        (Site("office", 2, Link(0.0), exit_bps=8e3, entry_bps=4e3), Site("home", 2, Link(0.0))),
        default=Link(0.5),
    )
    inside_out_in: list[Message] = [
        (0, 1, 0.0, 9999, 0),
        (0, 2, 0.0, 1000, 0),
        (1, 3, 0.0, 1000, 0),
        (2, 0, 0.0, 1000, 0),
    ]
    assert arrivals(network, 4, inside_out_in) == [0.0, 2.5, 2.5, 2.5]


def test_a_shared_connection() -> None:
    ways = (SiteLink("a", "b", Link(0.5, 8e3), shared=True), SiteLink("b", "a", Link(0.5, 8e3)))
    network = NetworkProfile("x", (Site("a", 2, Link(0.0)), Site("b", 2, Link(0.0))), ways)
    messages: list[Message] = [
        (0, 2, 0.0, 1000, 0),
        (1, 3, 0.0, 1000, 0),
        (2, 0, 0.0, 1000, 0),
        (3, 1, 0.0, 1000, 0),
    ]
    assert arrivals(network, 4, messages) == [2.5, 2.5, 1.5, 1.5]


def test_jitter_is_drawn_per_message_and_keeps_the_order() -> None:
    network = NetworkProfile.create_uniform(Link(1.0, jitter_s=0.75))
    messages: list[Message] = [(0, 1, 0.001 * k, 10, 0) for k in range(20)]
    found = arrivals(network, 2, messages, seed=5)
    drawn = [0.001 * k + 1.0 + 0.75 * (2 * draw_uniform(5, 0, 1, k) - 1) for k in range(20)]
    assert found == pytest.approx([max(drawn[: k + 1]) for k in range(20)], rel=1e-12)
    assert found == arrivals(network, 2, messages, seed=5)
    assert found != arrivals(network, 2, messages, seed=6)


def test_a_lost_packet_holds_up_the_end_of_its_message() -> None:
    """A message of one packet comes again after two round trips, and one for each further loss."""
    loss, count = 0.19, 60
    network = replace(NetworkProfile.create_uniform(Link(0.5, loss=loss)), congestion="bbr")
    found = arrivals(network, 2, [(0, 1, 100.0 * k, 1000, 0) for k in range(count)], seed=5)
    late_s = []
    for k in range(count):
        is_lost, again = (
            draw_uniform(5, 0, 1, k, 1) < loss,
            math.floor(math.log(1 - draw_uniform(5, 0, 1, k, 2), loss)),
        )
        late_s.append(2.0 + again if is_lost else 0.0)
    assert [at - 100.0 * k - 0.5 for k, at in enumerate(found)] == pytest.approx(late_s)
    assert {0.0, 2.0, 3.0} <= set(late_s)


# --- collectives ------------------------------------------------------------------------------------------------


def collective_s(network: NetworkProfile, size: int, name: str, numel: int, **settings: Any) -> float:
    world = VirtualWorld(size, network=network, **settings)

    def body(runtime: Runtime) -> Coroutine[Pending[Any], None, Any]:
        channel = ExchangeChannel(runtime.comm, 1, 0)
        return channel.get_collective(name)(channel, torch.zeros(numel, dtype=torch.uint8), torch.zeros(0))  # type: ignore[return-value]

    world.run([body(runtime) for runtime in world.runtimes])
    return world.clock.time()


def test_a_ring_over_unequal_links() -> None:
    """Segments of a kilobyte; links of 1, 2 and 4 kbyte/s and of 0.5, 0.25 and 0 s."""
    ways = {("a", "b"): (0.5, 8e3), ("b", "c"): (0.25, 16e3), ("c", "a"): (0.0, 32e3)}
    back = [SiteLink(dst, src, Link(9.0)) for src, dst in ways]
    network = NetworkProfile(
        "triangle",
        tuple(Site(name, 1) for name in "abc"),
        (*(SiteLink(*pair, Link(*link)) for pair, link in ways.items()), *back),
    )
    # Hops take 1.5 from a, 0.75 from b, 0.25 from c. When each rank has received its k-th:
    #   a: 0.25  1.00  2.50  3.50      (c's k-1st and 0.25)
    #   b: 1.50  2.50  3.50  4.50      (a's link is busy a second for each)
    #   c: 0.75  2.25  3.25  4.25      (b's k-1st and 0.75)
    assert collective_s(network, 3, "ring", 3000) == 4.5


def test_direct_on_a_switch_by_hand() -> None:
    # Three shards of a kilobyte at a third of the rate each, twice.
    assert collective_s(UP, 4, "direct", 4000) == 2 * (3.0 + 0.5)
    assert collective_s(UP, 4, "ring", 4000) == 6 * (1.0 + 0.5)


def test_a_profile_of_another_number_of_nodes_is_refused() -> None:
    with pytest.raises(ConfigError, match="describes 3 nodes, and 2 are to run"):
        VirtualWorld(2, UP.with_nodes(3))


def test_a_run_is_the_same_again_to_the_last_bit() -> None:
    network = NetworkProfile("j", (Site("all", None, Link(0.05, jitter_s=0.04), up_bps=1e6, down_bps=7e5),))
    messages: list[Message] = [(k % 5, (k * 3 + 1 + k % 5) % 5, 0.01 * k, 100 * k, k % 3) for k in range(60)]
    messages = [message for message in messages if message[0] != message[1]]
    first = arrivals(network, 5, messages, seed=3)
    assert json.dumps(first) == json.dumps(arrivals(network, 5, messages, seed=3))
