"""A connection finds its rate at the times that round trips on paper give."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from farflung.errors import ConfigError
from farflung.network import Link, NetworkProfile, Site, Wiring, find_network
from farflung.network.tcp import (
    LARGEST_WINDOW_BITS,
    PACING_SHARE,
    SEGMENT_NBYTES,
    STARTUP_GAIN,
    compute_repair_s,
)
from farflung.sim.clock import VirtualClock
from farflung.sim.flows import Flows

pytestmark = pytest.mark.usefixtures("unframed")

SEGMENT_BITS = 8 * SEGMENT_NBYTES
WIDE = NetworkProfile.create_uniform(Link(0.5))
"""A round trip of a second, and no limit but the window's."""
NARROW = NetworkProfile.create_uniform(Link(0.5, 20.0 * SEGMENT_BITS))
"""The same, and twenty segments a second."""


def arrivals(network: NetworkProfile, control: Any, *messages: tuple[float, float]) -> list[float]:
    """When messages of so many segments arrive that node 0 has for node 1 at these times."""
    clock = VirtualClock()
    found: dict[int, float] = {}
    flows = Flows(clock, Wiring(replace(network, congestion=control).with_nodes(2)), seed=0)
    for number, (at, segments) in enumerate(messages):

        def send(number: int = number, segments: float = segments) -> None:
            nbytes = round(segments * SEGMENT_NBYTES)
            flows.send(0, 1, nbytes, 0, lambda t: found.__setitem__(number, t))

        clock.call_at(at, send)
    clock.run()
    return [found[number] for number in range(len(messages))]


@pytest.mark.parametrize("control", ["reno", "cubic"])
@pytest.mark.parametrize(
    ("segments", "arrives"), [(10, 0.5), (11, 1.5), (30, 1.5), (31, 2.5), (70, 2.5), (71, 3.5)]
)
def test_a_window_begins_with_ten_segments_and_doubles(control: str, segments: int, arrives: float) -> None:
    assert arrivals(WIDE, control, (0.0, segments)) == [arrives]


def test_nothing_has_to_be_found_without_a_congestion_control() -> None:
    assert arrivals(WIDE, None, (0.0, 1000)) == [0.5]


def test_messages_in_a_row_share_a_window() -> None:
    assert arrivals(WIDE, "reno", (0.0, 6), (0.0, 6), (0.25, 0), (0.25, 18)) == [0.5, 1.5, 1.5, 1.5]


def test_once_the_way_is_full_the_rest_follows() -> None:
    # Ten by 0.5; twenty more from 1 on take a round trip, so 60 go on without a pause.
    assert arrivals(NARROW, "reno", (0.0, 90)) == [pytest.approx(1.0 + 4.0 + 0.5)]
    assert arrivals(NARROW, None, (0.0, 90)) == [pytest.approx(5.0)]


def test_a_rest_halves_the_window_for_each_timeout_but_not_below_the_first() -> None:
    # By 2 s the window is 80; the timeout is a second and 0.86^3 of two.
    timeout_s = 1.0 + 2 * 0.86**3
    for rest_s, window in ((0.9 * timeout_s, 80), (1.1 * timeout_s, 40), (2.1 * timeout_s, 20), (99.0, 10)):
        begin = 2.0 + rest_s
        fits, over = (
            arrivals(WIDE, "reno", (0.0, 70), (begin, segments))[1] for segments in (window, window + 1)
        )
        assert (fits, over) == pytest.approx((begin + 0.5, begin + 1.5))


def test_a_window_that_is_not_used_does_not_grow() -> None:
    # Ten and one: 20, and no more however many single segments follow.
    messages = [(0.0, 11), *((2.0 + 1.1 * number, 1) for number in range(4)), (7.0, 21)]
    assert arrivals(WIDE, "reno", *messages)[-1] == pytest.approx(8.5)


def test_bbr_keeps_what_it_knows_over_a_rest() -> None:
    (first, again) = arrivals(NARROW, "bbr", (0.0, 90), (100.0, 20))
    assert first > 5.0
    assert again == pytest.approx(101.5)
    assert arrivals(NARROW, "reno", (0.0, 90), (100.0, 20))[1] == pytest.approx(102.0)


def test_bbr_paces_messages_that_never_fill_the_way() -> None:
    # E = n / (R + d) and d = (n - 2) / (0.99 g E): the last two leave at once.
    segments = 100
    share = (segments - 2) / (PACING_SHARE * STARTUP_GAIN * segments)
    begins = [10.0 * number for number in range(20)]
    found = arrivals(WIDE, "bbr", *((begin, segments) for begin in begins))
    assert found[-1] - begins[-1] == pytest.approx(0.5 + share / (1 - share), rel=1e-3)
    assert share / (1 - share) == pytest.approx(0.53, rel=0.05)


def test_bbr_learns_more_from_messages_in_a_row_than_from_single_ones() -> None:
    rows = [[5.0 * number + 0.4 * place for number in range(8) for place in range(count)] for count in (1, 2)]
    alone, paired = (arrivals(WIDE, "bbr", *((begin, 100) for begin in begins)) for begins in rows)
    assert paired[-2] - rows[1][-2] < alone[-1] - rows[0][-1] - 0.1


def test_bbr_pauses_ten_seconds_after_its_shortest_round_trip_unless_it_idles() -> None:
    busy, idle = ([gap_s * number for number in range(round(13 / gap_s))] for gap_s in (0.5, 3.0))
    late = [
        [begin for begin, arrival in zip(begins, found, strict=True) if arrival - begin > 1.6 and begin > 4.0]
        for begins in (busy, idle)
        for found in [arrivals(WIDE, "bbr", *((begin, 20) for begin in begins))]
    ]
    # Measured in the four round trips before the first message; a pause takes two round trips.
    assert not late[1]
    assert 5.0 <= late[0][0] <= late[0][-1] <= late[0][0] + 2.0 <= 13.0


def test_no_more_is_on_its_way_than_the_send_buffer_holds() -> None:
    segments = 3 * LARGEST_WINDOW_BITS / SEGMENT_BITS
    # 10, 20, ... 2560, then 2896 and what is left: ten round trips. The window is what it was a little later.
    assert arrivals(WIDE, "cubic", (0.0, segments), (11.2, segments)) == pytest.approx([10.5, 11.2 + 2.5])


def test_a_stalled_flow_leaves_its_share_to_others() -> None:
    network = NetworkProfile(
        "switch", (Site("all", 3, Link(0.5), up_bps=20.0 * SEGMENT_BITS),), congestion="reno"
    )
    clock, found = VirtualClock(), dict[int, float]()
    flows = Flows(clock, Wiring(network), seed=0)
    for dst in (1, 2):
        flows.send(0, dst, 15 * SEGMENT_NBYTES, 0, lambda t, dst=dst: found.__setitem__(dst, t))  # type: ignore[misc]
    clock.run()
    # Ten of each fill the way for a second, five of each follow.
    assert found == pytest.approx({1: 2.0, 2: 2.0})


def test_a_named_network_may_have_a_congestion_control() -> None:
    profile = find_network("four-regions(congestion=bbr)")
    assert profile == replace(find_network("four-regions"), name=profile.name, congestion="bbr")
    with pytest.raises(
        ConfigError, match="four-regions: congestion = 'vegas': must be one of bbr, cubic, reno"
    ):
        find_network("four-regions(congestion=vegas)")


@pytest.mark.parametrize(
    ("drawn", "last", "late_s"),
    [
        ((0.0, 0.0), False, 0.6),  # the very last packet; what follows tells of it
        ((0.0, 0.0), True, 0.8),  # nothing does, before a timeout
        ((0.0, 0.95), False, 1.2),  # lost once more
        ((0.0, 0.95), True, 2.4),  # and a timeout twice as long
        ((0.45, 0.0), True, 0.1),  # five packets are behind it, a tenth of a second each
        ((0.55, 0.0), True, 0.0),  # seven are: it is there before the last one
        ((0.99, 0.0), True, 0.0),  # ten packets without a loss
    ],
)
def test_a_lost_packet_holds_up_what_is_behind_it(
    drawn: tuple[float, float], last: bool, late_s: float
) -> None:
    found = compute_repair_s(10 * SEGMENT_BITS, 1.0, 0.6, 0.1, drawn, is_last=last)
    assert found == pytest.approx(late_s)


def test_the_next_message_shows_that_the_end_of_the_last_one_is_lost() -> None:
    lossy = NetworkProfile.create_uniform(Link(0.5, loss=0.19))
    begins = [20.0 * number for number in range(40)]
    found = arrivals(lossy, "bbr", *((begin, 1) for begin in begins))
    lost = next(number for number, begin in enumerate(begins) if found[number] > begin + 0.5)
    messages = [(begin, 1) for begin in begins[: lost + 1]]
    assert arrivals(lossy, "bbr", *messages)[lost] == pytest.approx(begins[lost] + 0.5 + 1.2)
    followed = arrivals(lossy, "bbr", *messages, (begins[lost] + 0.1, 1))
    assert followed[lost] == pytest.approx(begins[lost] + 0.1 + 1.5)


def test_as_many_messages_are_held_up_as_lose_a_packet() -> None:
    draws = [(number + 0.5) / 1000 for number in range(1000)]
    late = [
        compute_repair_s(20 * SEGMENT_BITS, 0.0, 1.0, 0.02, (one, 0.0), is_last=False) > 0 for one in draws
    ]
    assert sum(late) / len(late) == pytest.approx(1 - 0.98**20, abs=1e-3)


def test_nothing_is_held_up_where_nothing_is_lost() -> None:
    assert compute_repair_s(SEGMENT_BITS, 1.0, 1.0, 0.0, (0.0, 0.0), is_last=True) == 0.0
    lossless = arrivals(NARROW, "bbr", (0.0, 40), (10.0, 40))
    lossy = NetworkProfile.create_uniform(Link(0.5, 20.0 * SEGMENT_BITS, loss=0.1))
    delayed = arrivals(lossy, "bbr", (0.0, 40), (10.0, 40))
    assert all(late > early for early, late in zip(lossless, delayed, strict=True))
