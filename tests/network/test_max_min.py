"""Shares are max-min fair: within the capacities, work conserving, whatever the order."""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from farflung.network import compute_max_min_rates


@dataclass(frozen=True)
class Flow:
    uses: tuple[tuple[str, int], ...]


def over(*resources: str) -> Flow:
    return Flow(tuple((resource, 1) for resource in resources))


def shares(flows: list[Flow], capacities: dict[str, float]) -> list[float]:
    return compute_max_min_rates([flow.uses for flow in flows], capacities.__getitem__)


# --- by hand ----------------------------------------------------------------------------------------------------


def test_the_parking_lot() -> None:
    """One flow over all links and one on each, Bertsekas & Gallager's example."""
    links = {f"l{k}": 1.0 for k in range(4)} | {"l2": 0.5}
    flows = [over(*links), *(over(link) for link in links)]
    assert shares(flows, links) == [0.25, 0.75, 0.75, 0.25, 0.75]


def test_one_for_many_gets_the_share_of_each() -> None:
    """One flow that stands for seven has the rate of each of them, to the last bit."""
    capacities = {"shared": 0.5}
    capacities["up"] = 0.1
    apart = [Flow((("shared", 1), (f"up{k}", 1))) for k in range(7)]
    together = Flow((("shared", 7), ("up", 1)))
    found = shares(apart, capacities | {f"up{k}": 0.1 for k in range(7)})
    assert found == shares([together], capacities) * 7


# --- properties -------------------------------------------------------------------------------------------------

RESOURCES = "abcdef"


@st.composite
def networks(draw: st.DrawFn) -> tuple[list[Flow], dict[str, float]]:
    capacities = {r: draw(st.sampled_from([0.0, 0.1, 1 / 3, 1.0, 2.7, 1e6])) for r in RESOURCES}
    use = st.lists(st.tuples(st.sampled_from(RESOURCES), st.integers(1, 3)), min_size=1, max_size=4)
    flow = st.builds(lambda uses: Flow(tuple(dict(uses).items())), use)
    return draw(st.lists(flow, max_size=12)), capacities


def used(flows: list[Flow], rates: list[float], resource: str) -> float:
    return sum(dict(flow.uses).get(resource, 0) * rate for flow, rate in zip(flows, rates, strict=True))


@given(networks())
def test_every_flow_has_a_full_resource_where_no_other_gets_more(
    network: tuple[list[Flow], dict[str, float]],
) -> None:
    """What defines max-min fairness: a bottleneck for each; work conserving follows."""
    flows, capacities = network
    rates = shares(flows, capacities)
    for resource, capacity in capacities.items():
        assert used(flows, rates, resource) <= capacity * (1 + 1e-12)
    for flow, rate in zip(flows, rates, strict=True):

        def is_bottleneck(resource: str, rate: float = rate) -> bool:
            largest = max(r for other, r in zip(flows, rates, strict=True) if resource in dict(other.uses))
            full = used(flows, rates, resource) >= capacities[resource] * (1 - 1e-9)
            return full and rate >= largest * (1 - 1e-9)

        assert any(is_bottleneck(resource) for resource, _ in flow.uses)


@given(networks(), st.integers(0, 10))
def test_the_order_of_the_flows_changes_no_bit(
    network: tuple[list[Flow], dict[str, float]], seed: int
) -> None:
    flows, capacities = network
    order = list(range(len(flows)))
    random.Random(seed).shuffle(order)
    rates = shares(flows, capacities)
    assert shares([flows[k] for k in order], capacities) == [rates[k] for k in order]


def test_no_flows() -> None:
    assert shares([], {}) == []
    with pytest.raises(KeyError):
        shares([over("nowhere")], {})
