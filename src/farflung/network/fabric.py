"""Fabric: flows that share capacities over time, as a pure calculation that a clock drives."""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable

from farflung.network.link import BandwidthTrace, Capacity, get_capacity
from farflung.network.max_min import compute_max_min_rates
from farflung.network.wiring import ResourceUse

__all__ = ["Fabric", "Flow"]


class Flow:
    """Flow of bits at the rate of its share."""

    __slots__ = ("_start_s", "end_s", "number", "rate_bps", "remaining_bits", "uses")

    def __init__(self, number: int, bits: float, uses: tuple[tuple[int, int], ...]) -> None:
        self.number = number
        self.remaining_bits = bits
        self.uses = uses
        self.rate_bps = 0.0
        self.end_s = math.inf
        self._start_s = 0.0

    def change_rate(self, time_s: float, rate_bps: float) -> None:
        """Changes the rate from now on; at an equal rate the end does not change by a bit."""
        if rate_bps != self.rate_bps:
            left_bits = self.remaining_bits - self.rate_bps * (time_s - self._start_s)
            self._start_s = time_s
            self.remaining_bits = left_bits if left_bits > 0.0 else 0.0
            self.rate_bps = rate_bps
            self.end_s = time_s + self.remaining_bits / rate_bps if rate_bps else math.inf

    def compute_remaining_bits(self, time_s: float) -> float:
        """Computes the bits that have not passed."""
        return max(0.0, self.remaining_bits - self.rate_bps * (time_s - self._start_s))

    def truncate(self, time_s: float, remaining_bits: float) -> None:
        """Limits the bits that pass from now on."""
        self._start_s, self.remaining_bits = time_s, remaining_bits
        self.end_s = time_s + remaining_bits / self.rate_bps if self.rate_bps else math.inf


class Fabric:
    """Resources of some capacity, and the flows that share them max-min fairly; see :func:`compute_max_min_rates`.

    The caller supplies the time: start flows, call :meth:`update_rates`, then :meth:`pop_ended` at
    :meth:`get_next_event_s`. A change is computed only for the flows that it can affect: those that share a
    resource with a flow that began or ended, those that share one with these, and so on.

    Args:
      capacities: Bits per second of each resource; may be appended to.
    """

    def __init__(self, capacities: list[Capacity]) -> None:
        self._capacities = capacities
        self._users: list[dict[int, Flow]] = []
        self._ends: list[tuple[float, int, Flow]] = []
        self._changed_resources: dict[int, None] = {}
        self._capacity_changes: dict[int, float] = {}
        self._num_flows = 0

    def start(self, bits: float, uses: Iterable[ResourceUse]) -> Flow:
        """Starts a flow of ``bits`` bits; it moves after :meth:`update_rates`.

        Args:
          bits: Bits to transfer.
          uses: Uses of at least one resource.
        """
        self._num_flows += 1
        flow = Flow(self._num_flows, bits, tuple((use.resource, use.times) for use in uses))
        while len(self._users) < len(self._capacities):
            self._users.append({})
        for resource, _ in flow.uses:
            self._users[resource][flow.number] = flow
            self._changed_resources[resource] = None
        return flow

    def truncate(self, flow: Flow, time_s: float, remaining_bits: float) -> None:
        """Limits the bits that a flow still passes; call :meth:`update_rates` afterwards."""
        flow.truncate(time_s, remaining_bits)
        if flow.end_s < math.inf:
            heapq.heappush(self._ends, (flow.end_s, flow.number, flow))

    def add_use(self, flow: Flow, use: ResourceUse) -> None:
        """Adds a resource to a flow, from the next :meth:`update_rates` on."""
        flow.uses = (*flow.uses, (use.resource, use.times))
        while len(self._users) < len(self._capacities):
            self._users.append({})
        self._users[use.resource][flow.number] = flow
        self._changed_resources[use.resource] = None

    def set_capacity(self, resource: int, capacity: Capacity) -> None:
        """Sets the capacity of a resource, from the next :meth:`update_rates` on."""
        self._capacities[resource] = capacity
        if resource < len(self._users):
            self._changed_resources[resource] = None

    def update_rates(self, time_s: float) -> None:
        """Updates the rates after flows began or ended, or a capacity changed.

        Raises:
          ConfigError: a trace has ended.
        """
        while self._changed_resources:
            first = next(iter(self._changed_resources))
            if not self._users[first]:
                del self._changed_resources[first]
                self._watch(first, time_s)
                continue
            flows, resources = self._find_affected(first)
            for resource in resources:
                self._changed_resources.pop(resource, None)
                self._watch(resource, time_s)
            classes: dict[tuple[tuple[int, int], ...], list[Flow]] = {}
            for flow in flows:
                classes.setdefault(flow.uses, []).append(flow)
            sharers = [
                tuple((resource, times * len(equal_flows)) for resource, times in uses)
                for uses, equal_flows in classes.items()
            ]
            rates = compute_max_min_rates(
                sharers, lambda resource: get_capacity(self._capacities[resource], time_s)
            )
            for equal_flows, rate in zip(classes.values(), rates, strict=True):
                for flow in equal_flows:
                    flow.change_rate(time_s, rate)
            # The rates of the others are updated when the first of them has ended.
            first_ends_at = min(flow.end_s for flow in flows)
            if first_ends_at < math.inf:
                for flow in flows:
                    if flow.end_s == first_ends_at:
                        heapq.heappush(self._ends, (flow.end_s, flow.number, flow))

    def get_next_event_s(self) -> float:
        """Returns the time at which the next flow ends or the next capacity changes; infinity if neither will."""
        while self._ends and self._ends[0][0] != self._ends[0][2].end_s:
            heapq.heappop(self._ends)
        first = self._ends[0][0] if self._ends else math.inf
        return min(first, min(self._capacity_changes.values(), default=math.inf))

    def pop_ended(self, time_s: float) -> list[Flow]:
        """Removes and returns the flows that have ended, in the order they began; call :meth:`update_rates` then."""
        ended = []
        while self._ends and self._ends[0][0] <= time_s:
            ends_at, _, flow = heapq.heappop(self._ends)
            if ends_at == flow.end_s:
                flow.end_s = -math.inf
                ended.append(flow)
                for resource, _ in flow.uses:
                    del self._users[resource][flow.number]
                    self._changed_resources[resource] = None
        for resource, change in self._capacity_changes.items():
            if change <= time_s:
                self._changed_resources[resource] = None
        return sorted(ended, key=lambda flow: flow.number)

    def _find_affected(self, resource: int) -> tuple[list[Flow], dict[int, None]]:
        """Finds the flows and resources that a change of ``resource`` may affect."""
        flows: dict[int, Flow] = {}
        resources: dict[int, None] = {resource: None}
        open_ends = [resource]
        while open_ends:
            for number, flow in self._users[open_ends.pop()].items():
                if number not in flows:
                    flows[number] = flow
                    for used, _ in flow.uses:
                        if used not in resources:
                            resources[used] = None
                            open_ends.append(used)
        return list(flows.values()), resources

    def _watch(self, resource: int, time_s: float) -> None:
        """Records the next change of a capacity that is in use."""
        capacity = self._capacities[resource]
        if isinstance(capacity, BandwidthTrace):
            self._capacity_changes.pop(resource, None)
            if self._users[resource]:
                self._capacity_changes[resource] = capacity.get_next_change(time_s)
