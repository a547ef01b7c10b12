"""Flows over time: exact ends by hand, and nothing lost or gained whatever begins when."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from farflung.errors import ConfigError
from farflung.network import BandwidthTrace, Fabric, Flow, ResourceUse
from farflung.network.link import Capacity, get_capacity


def uses(*resources: int) -> list[ResourceUse]:
    return [ResourceUse(resource) for resource in resources]


def run(capacities: list[Capacity], starts: list[tuple[float, float, list[ResourceUse]]]) -> list[float]:
    """Starts flows ``(at, bits, uses)``; when each ends."""
    fabric = Fabric(capacities)
    waiting = sorted(range(len(starts)), key=lambda k: starts[k][0])
    ends = [math.inf] * len(starts)
    numbers: dict[int, int] = {}
    while waiting or fabric.get_next_event_s() < math.inf:
        now = min(starts[waiting[0]][0] if waiting else math.inf, fabric.get_next_event_s())
        for flow in fabric.pop_ended(now):
            ends[numbers[flow.number]] = now
        while waiting and starts[waiting[0]][0] <= now:
            index = waiting.pop(0)
            _, bits, used = starts[index]
            numbers[fabric.start(bits, used).number] = index
        fabric.update_rates(now)
    return ends


# --- by hand ----------------------------------------------------------------------------------------------------


def test_alone() -> None:
    assert run([100.0], [(1.0, 250.0, uses(0))]) == [3.5]


def test_two_flows_share_a_link() -> None:
    # 50 each until the first has its 100 at 2; the second has 200 left at twice the rate.
    assert run([100.0], [(0.0, 100.0, uses(0)), (0.0, 300.0, uses(0))]) == [2.0, 4.0]


def test_a_flow_that_comes_later() -> None:
    # Alone for 1 s (100 of 300), then half each: 200 at 50 bit/s for the first, 100 for the second by 3.
    assert run([100.0], [(0.0, 300.0, uses(0)), (1.0, 100.0, uses(0))]) == [4.0, 3.0]


def test_a_flow_that_is_cut_short() -> None:
    fabric = Fabric([100.0])
    first, second = fabric.start(300.0, uses(0)), fabric.start(300.0, uses(0))
    fabric.update_rates(0.0)
    fabric.truncate(first, 1.0, 25.0)  # of 250 left
    fabric.update_rates(1.0)
    assert fabric.get_next_event_s() == 1.5
    assert fabric.pop_ended(1.5) == [first]
    fabric.update_rates(1.5)
    assert fabric.get_next_event_s() == 1.5 + 2.25
    assert fabric.pop_ended(3.75) == [second]


def test_a_trace_that_halves_the_bandwidth_in_mid_transfer() -> None:
    trace = BandwidthTrace((0.0, 2.0), (100.0, 50.0), 10.0)
    # 200 bits by 2 s, the other 100 take 2 s more.
    assert run([trace], [(0.0, 300.0, uses(0))]) == [4.0]


def test_an_outage_in_the_middle() -> None:
    trace = BandwidthTrace((0.0, 1.0, 3.0), (100.0, 0.0, 100.0), 10.0)
    assert run([trace], [(0.0, 150.0, uses(0))]) == [3.5]


def test_a_trace_that_repeats() -> None:
    trace = BandwidthTrace((0.0, 1.0), (100.0, 0.0), 2.0, "repeat")
    assert run([trace], [(0.0, 350.0, uses(0))]) == [6.5]


def test_a_trace_that_ends_early() -> None:
    trace = BandwidthTrace((0.0,), (100.0,), 2.0, name="office.toml: trace cell")
    assert run([trace], [(0.0, 199.0, uses(0))]) == [1.99]
    with pytest.raises(ConfigError, match=r"office.toml: trace cell: ends at 2 s and the run continues"):
        run([trace], [(0.0, 201.0, uses(0))])


def test_a_trace_matters_only_while_it_is_used() -> None:
    trace = BandwidthTrace((0.0,), (100.0,), 2.0)
    assert run([trace, 1.0], [(0.0, 100.0, uses(0)), (0.0, 50.0, uses(1))]) == [1.0, 50.0]


def test_elsewhere_nothing_changes_to_the_last_bit() -> None:
    """A flow's end is worked out once; what happens to others leaves it as it is."""
    others = [(0.1 * k, 33.3, uses(1, 2)) for k in range(20)]
    ends = run([0.7, 1.1, 1.3], [(0.0, 1.0, uses(0)), *others])
    assert ends[0] == 1.0 / 0.7


# --- properties -------------------------------------------------------------------------------------------------


@st.composite
def traffic(draw: st.DrawFn) -> tuple[list[Capacity], list[tuple[float, float, list[ResourceUse]]]]:
    count = draw(st.integers(1, 4))
    constant = st.sampled_from([1.0, 3.3, 10.0])
    traces = st.builds(
        lambda values, step: BandwidthTrace(
            tuple(k * step for k in range(len(values))), tuple(values), len(values) * step, "repeat"
        ),
        st.lists(st.sampled_from([0.5, 2.0, 7.7]), min_size=1, max_size=4),
        st.sampled_from([0.25, 1.0, 3.1]),
    )
    capacities: list[Capacity] = draw(st.lists(constant | traces, min_size=count, max_size=count))
    use = st.lists(st.integers(0, count - 1), min_size=1, max_size=count, unique=True)
    flow = st.tuples(
        st.sampled_from([0.0, 0.5, 1.0, 4.0]),
        st.sampled_from([0.1, 1.0, 12.5, 40.0]),
        use.map(lambda found: uses(*found)),
    )
    return capacities, draw(st.lists(flow, min_size=1, max_size=8))


class Watched(Fabric):
    """Adds up what every flow and every resource has carried, from the rates alone."""

    def __init__(self, capacities: list[Capacity]) -> None:
        super().__init__(capacities)
        self.carried: dict[int, float] = {}
        self.flows: dict[int, Flow] = {}
        self.since = 0.0

    def pass_time(self, now: float) -> None:
        for capacity, resource in zip(self._capacities, range(len(self._capacities)), strict=True):
            rate = sum(f.rate_bps for f in self.flows.values() if resource in dict(f.uses))
            middle = (self.since + now) / 2
            between = self.since < middle < now  # there is no time between neighbouring numbers
            assert not between or rate <= get_capacity(capacity, middle) * (1 + 1e-9)
        for flow in self.flows.values():
            self.carried[flow.number] = self.carried.get(flow.number, 0.0) + flow.rate_bps * (
                now - self.since
            )
        self.since = now


@given(traffic())
@settings(deadline=None)
def test_every_flow_gets_its_bits_and_no_capacity_is_exceeded(made: Any) -> None:
    capacities, starts = made
    fabric = Watched(list(capacities))
    waiting = sorted(starts, key=lambda start: start[0])
    wanted: dict[int, float] = {}
    while waiting or fabric.get_next_event_s() < math.inf:
        now = min(waiting[0][0] if waiting else math.inf, fabric.get_next_event_s())
        fabric.pass_time(now)
        for flow in fabric.pop_ended(now):
            assert fabric.carried[flow.number] == pytest.approx(wanted[flow.number], rel=1e-9)
            del fabric.flows[flow.number]
        while waiting and waiting[0][0] <= now:
            _, bits, used = waiting.pop(0)
            flow = fabric.start(bits, used)
            fabric.flows[flow.number], wanted[flow.number] = flow, bits
        fabric.update_rates(now)
    assert not fabric.flows


@given(traffic())
@settings(deadline=None)
def test_a_busy_link_is_never_idle_in_part(made: Any) -> None:
    """Work conserving: where all flows cross one constant link and nothing else, it is busy until all have ended."""
    _, starts = made
    starts = [(0.0, bits, uses(0)) for _, bits, _ in starts]
    ends = run([2.5], starts)
    assert max(ends) == pytest.approx(sum(bits for _, bits, _ in starts) / 2.5, rel=1e-12)
