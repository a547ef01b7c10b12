"""The lab's queues: exact times, told to them."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest

from farflung.faults import LinkCondition
from farflung.lab.queues import WIRE_OVER_PAYLOAD, Queues, compute_finish_s
from farflung.network import BandwidthTrace, Link, Medium, NetworkProfile, Site

FULL = 1500
FULL_S = 8 * FULL / WIRE_OVER_PAYLOAD / 1e6
"""What a full packet takes at 1 Mbit/s of payload."""


def arrivals(queues: Queues) -> list[tuple[float, int, bytes]]:
    """Everything that is on its way, as it arrives."""
    seen = []
    while (due := queues.get_next_time()) < math.inf:
        seen += [(due, dst, data) for dst, data in queues.pop_arrived(due)]
    return seen


def queues_of(site: Site, nodes: int = 3, *media: Medium, fair: bool = True) -> Queues:
    return Queues(NetworkProfile("test", (site,), media=media).with_nodes(nodes), fair=fair)


def test_a_packet_takes_the_delay_and_its_share_of_the_bandwidth() -> None:
    queues = queues_of(Site("all", None, Link(0.1, 1e6)))
    queues.enqueue(5.0, 0, 1, FULL, b"a")
    ((t, dst, data),) = arrivals(queues)
    assert t == pytest.approx(5.0 + 0.1 + FULL_S)
    assert (dst, data) == (1, b"a")


def test_what_handing_over_takes_is_made_up_for() -> None:
    queues = queues_of(Site("all", None, Link(0.1)))
    queues.lead_s = 0.04
    queues.enqueue(0.0, 0, 1, FULL, b"a")
    assert arrivals(queues)[0][0] == pytest.approx(0.06)


def test_a_way_never_gets_more_than_its_bandwidth() -> None:
    queues = queues_of(Site("all", None, Link(0.1, 1e6)))
    for number in range(10):
        queues.enqueue(0.0, 0, 1, FULL, bytes([number]))
    seen = arrivals(queues)
    assert [data for _, _, data in seen] == [bytes([number]) for number in range(10)]
    assert [t for t, _, _ in seen] == pytest.approx([0.1 + FULL_S * (n + 1) for n in range(10)])


@pytest.mark.parametrize("fair", [True, False])
def test_ways_share_what_a_node_can_send(fair: bool) -> None:
    queues = queues_of(Site("all", None, Link(0.0), up_bps=1e6), fair=fair)
    for _ in range(20):
        queues.enqueue(0.0, 0, 1, FULL, b"")
    queues.enqueue(0.0, 0, 2, FULL, b"late")
    (late,) = (t for t, dst, _ in arrivals(queues) if dst == 2)
    # The first of the 20 is being served already; then it is the other way's turn, or that of the 19.
    assert late == pytest.approx(FULL_S * (2 if fair else 21), rel=0.51)


def test_a_packet_passes_the_sender_and_the_receiver() -> None:
    queues = queues_of(Site("all", None, Link(0.0), up_bps=1e6, down_bps=2e6))
    queues.enqueue(0.0, 0, 1, FULL, b"")
    assert arrivals(queues)[0][0] == pytest.approx(1.5 * FULL_S)


def test_a_large_packet_is_passed_on_segment_by_segment() -> None:
    queues = queues_of(Site("all", None, Link(0.0), up_bps=1e6, down_bps=1e6))
    queues.enqueue(0.0, 0, 1, 10 * FULL, b"")
    queues.enqueue(0.0, 0, 1, 10 * FULL, b"")
    seen = arrivals(queues)
    assert [t for t, _, _ in seen] == pytest.approx([11 * FULL_S, 21 * FULL_S])


def test_a_relayed_medium_is_crossed_twice_and_shared_by_all() -> None:
    site = Site("air", None, Link(0.0), medium="channel")
    queues = queues_of(site, 3, Medium("channel", 1e6, relayed=True))
    queues.enqueue(0.0, 0, 1, FULL, b"")
    queues.enqueue(0.0, 2, 1, FULL, b"")
    assert [t for t, _, _ in arrivals(queues)] == pytest.approx([2 * FULL_S, 4 * FULL_S])


def test_a_full_queue_loses_what_comes() -> None:
    queues = queues_of(Site("all", None, Link(0.0, 1e6)))
    for _ in range(1000):
        queues.enqueue(0.0, 0, 1, FULL, b"")
    assert queues.num_lost + len(arrivals(queues)) == 1000
    assert 0 < queues.num_lost < 1000


def test_a_trace_begins_when_the_run_does() -> None:
    trace = BandwidthTrace((0.0, 10.0), (1e6, 2e6), 20.0, "repeat")
    queues = queues_of(Site("all", None, Link(0.0, trace)))
    queues.enqueue(100.0, 0, 1, FULL, b"")
    assert arrivals(queues)[0][0] == pytest.approx(100.0 + FULL_S)
    queues.begin_s = 200.0
    queues.enqueue(215.0, 0, 1, FULL, b"")
    assert arrivals(queues)[0][0] == pytest.approx(215.0 + FULL_S / 2)


def test_bits_cross_the_steps_of_a_trace() -> None:
    trace = BandwidthTrace((0.0, 1.0, 2.0), (1e6, 0.0, 2e6), 4.0, "hold")
    assert compute_finish_s(trace, 0.5, 1.5e6) == pytest.approx(2.5)
    assert compute_finish_s(trace, 0.5, 0.0) == 0.5


def test_jitter_keeps_the_order() -> None:
    queues = queues_of(Site("all", None, Link(0.1, jitter_s=0.1)))
    queues.begin_s = 0.0
    for number in range(100):
        queues.enqueue(0.02 * number, 0, 1, FULL, bytes([number]))
    seen = arrivals(queues)
    assert [data[0] for _, _, data in seen] == list(range(100))
    delays = [t - 0.02 * data[0] for t, _, data in seen]
    assert min(delays) > 0.0
    assert max(delays) - min(delays) > 0.05


def test_what_is_lost_takes_its_part_of_the_bandwidth() -> None:
    queues = queues_of(Site("all", None, Link(0.0, 1e6, loss=0.5)))
    for number in range(100):
        queues.enqueue(0.0, 0, 1, FULL, bytes([number]))
    assert queues.num_lost == 0, "before the run begins nothing is lost"
    assert len(arrivals(queues)) == 100
    queues.is_lossy = True  # except to be measured
    for number in range(100):
        queues.enqueue(10.0, 0, 1, FULL, bytes([number]))
    seen = arrivals(queues)
    assert len(seen) == 100 - queues.num_lost
    assert 30 < queues.num_lost < 70
    assert [t for t, _, _ in seen] == pytest.approx([10.0 + FULL_S * (data[0] + 1) for _, _, data in seen])


def test_loss_takes_its_share_from_the_beginning_on() -> None:
    queues = queues_of(Site("all", None, Link(0.0, 1e9, loss=0.1)))
    for number in range(1000):
        queues.enqueue(0.001 * number, 0, 1, FULL, b"")
    assert queues.num_lost == 0
    queues.begin_s = 0.0
    for number in range(1000):
        queues.enqueue(10 + 0.001 * number, 0, 1, FULL, b"")
    assert 60 < queues.num_lost < 140


@pytest.mark.parametrize("cut_first", [True, False], ids=["before it sets out", "on its way"])
def test_nothing_crosses_a_cut(cut_first: bool) -> None:
    queues = queues_of(Site("all", None, Link(0.1)))
    steps: list[Callable[[], None]] = [
        lambda: queues.set_condition(0, 1, LinkCondition(is_cut=True)),
        lambda: queues.enqueue(0.0, 0, 1, FULL, b""),
    ]
    for step in steps if cut_first else steps[::-1]:
        step()
    assert arrivals(queues) == []
    assert queues.num_lost == 1
    queues.set_condition(0, 1, LinkCondition())
    queues.enqueue(1.0, 0, 1, FULL, b"again")
    assert [data for _, _, data in arrivals(queues)] == [b"again"]


def test_a_way_may_get_less_bandwidth_for_a_while() -> None:
    queues = queues_of(Site("all", None, Link(0.0, 1e6)))
    queues.set_condition(0, 1, LinkCondition(bandwidth_bps=0.25e6))
    for src, dst in ((0, 1), (0, 1), (1, 0)):
        queues.enqueue(0.0, src, dst, FULL, b"")
    seen = arrivals(queues)
    assert [dst for _, dst, _ in seen] == [0, 1, 1]
    # The way's own queue passes on as the packet comes in, so the slower of the two is all that counts.
    assert [t for t, _, _ in seen] == pytest.approx([FULL_S, 5 * FULL_S, 9 * FULL_S])
    queues.set_condition(0, 1, LinkCondition())
    queues.enqueue(1.0, 0, 1, FULL, b"")
    assert [t for t, _, _ in arrivals(queues)] == pytest.approx([1.0 + FULL_S])


@pytest.mark.parametrize(("bps", "last"), [(0.125e6, 17), (0.5e6, 11), (math.inf, 9)])
def test_another_bandwidth_counts_from_the_next_packet_on(bps: float, last: int) -> None:
    queues = queues_of(Site("all", None, Link(0.0, 1e6)))
    queues.set_condition(0, 1, LinkCondition(bandwidth_bps=0.25e6))
    for _ in range(3):
        queues.enqueue(0.0, 0, 1, FULL, b"")
    assert len(list(queues.pop_arrived(6 * FULL_S))) == 1
    queues.set_condition(0, 1, LinkCondition(bandwidth_bps=bps))
    seen = [t for t, _, _ in arrivals(queues)]
    assert seen == pytest.approx([FULL_S * 9, FULL_S * last])
