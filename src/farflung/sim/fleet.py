"""Timing of a fleet of devices in classes: no arithmetic, and nothing that grows with the number of devices."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias

from farflung.comm import AUTO, COLLECTIVES, choose
from farflung.devices import DeviceProfile, Moment
from farflung.errors import ConfigError, UnknownName
from farflung.network import NetworkProfile
from farflung.network.wiring import Bundles, Group, groups_of
from farflung.sim.clock import VirtualClock
from farflung.sim.flows import Flows
from farflung.sim.groups import Devices as GroupDevices
from farflung.sim.groups import GroupedReduce, ReduceShape
from farflung.sim.lane import Lane
from farflung.types import CodingCost, Cost

__all__ = ["FleetTimes", "time_fleet"]

Devices: TypeAlias = DeviceProfile | Sequence[DeviceProfile]


@dataclass(frozen=True, slots=True)
class FleetTimes:
    """What a timing of a fleet found.

    Args:
      ends_s: when the last device was through with each step, in virtual seconds.
      classes: groups of devices that were told apart.
      devices: how many there are.
    """

    ends_s: tuple[float, ...]
    classes: int
    devices: int

    @property
    def step_s(self) -> float:
        """Seconds a step takes, on average."""
        return self.ends_s[-1] / len(self.ends_s)


def time_fleet(
    network: NetworkProfile,
    devices: Devices,
    *,
    numel: int,
    batch_size: int,
    steps: int,
    collective: str = "parameter_server",
    element_nbytes: int = 4,
    side_nbytes: int = 48,
    seed: int = 0,
) -> FleetTimes:
    """Times synchronous training in one bucket, with one flow for each pair of classes.

    A class is a site of the network: its devices begin together, compute alike, are slow together, and see the same
    network, so the times are those of a simulation of every single device. Where devices have coding rates, adding and
    scaling are exact too. Of what messages and copies take each class has that of the last of its devices, roughly.

    Args:
      network: sites are classes.
      devices: one profile, or one for each site.
      numel: parameters of the model.
      batch_size: of each device.
      steps: how many.
      collective: one in which owners add; ``auto``: the fastest of these.
      element_nbytes: of one parameter.
      side_nbytes: of what rides along: the weights' sum, and what a replica tells the others.
      seed: of stragglers.

    Raises:
      UnknownName: no such collective.
      ConfigError: another number of device profiles than sites, or a network with jitter.
    """
    if network.nodes is None:
        raise ConfigError(f"{network.name}: the number of nodes is not set; use for_nodes(count)")
    nbytes = numel * element_nbytes
    by_owners = {name: one.owners for name, one in COLLECTIVES.items() if one.owners is not None}
    if collective == AUTO:
        collective = choose(network, nbytes, among=list(by_owners), side_nbytes=side_nbytes)
    if collective not in by_owners:
        raise UnknownName("collective for classes", collective, by_owners)
    if any(link.jitter_s for link in network.all_links()):
        raise ConfigError(f"{network.name}: jitter_s: devices whose messages jitter are not alike")
    profiles = [devices] * len(network.sites) if isinstance(devices, DeviceProfile) else devices
    if len(profiles) != len(network.sites):
        raise ConfigError(
            f"{len(profiles)} device profiles for {len(network.sites)} sites: give one, or one for each"
        )
    shape = ReduceShape(
        by_owners[collective](network.nodes), network.nodes, numel, element_nbytes, side_nbytes
    )
    groups = groups_of(network, shape.owners, shape.cuts)
    fleet = _Fleet(network, profiles, shape, groups, batch_size, steps, seed)
    fleet.clock.run()
    return FleetTimes(tuple(fleet.ends_s), len(groups), network.nodes)


class _Fleet:
    """The groups, each at its own step."""

    def __init__(
        self,
        network: NetworkProfile,
        devices: Sequence[DeviceProfile],
        shape: ReduceShape,
        groups: Sequence[Group],
        batch_size: int,
        steps: int,
        seed: int,
    ) -> None:
        self.clock = VirtualClock()
        self.ends_s = [0.0] * steps
        self._flows = Flows(self.clock, Bundles(network, groups), seed, sealed=True)
        self._devices, self._shape, self._groups = devices, shape, groups
        self._batch_size, self._seed = batch_size, seed
        self._network = network
        self._steps = [0] * len(groups)
        """Forward passes that each group has begun."""
        self._lanes = [self._lane(number) for number in range(len(groups))]
        self._exchanges: dict[int, GroupedReduce] = {}
        self._left = {step: len(groups) for step in range(steps)}
        for number in range(len(groups)):
            self._begin(number, 0)

    def _begin(self, number: int, step: int) -> None:
        if step == len(self.ends_s):
            return
        self._steps[number] = step + 1
        backward = Cost("backward", self._batch_size)
        exchange = partial(self._exchange, number, step)
        self._compute(
            number, Cost("forward", self._batch_size), partial(self._compute, number, backward, exchange)
        )

    def _exchange(self, number: int, step: int) -> None:
        if step not in self._exchanges:
            self._exchanges[step] = GroupedReduce(
                self._flows, self._groups, self._shape, lambda group: self._scale(group, step), self._charged
            )
        self._exchanges[step].enter(number)

    @property
    def _charged(self) -> GroupDevices | None:
        return GroupDevices(self.clock, self._lanes, self._latency_s) if any(self._lanes) else None

    def _latency_s(self, src: int, dst: int) -> float:
        one, other = self._groups[src].site, self._groups[dst].site
        return self._network.connection(one, other).link.latency_s

    def _scale(self, number: int, step: int) -> None:
        """A device divides by the sum of weights."""
        lane = self._lanes[number]
        if lane is None:
            self._update(number, step)
            return
        if self._shape.size > 1:
            lane.charge(CodingCost("scale", "", self._shape.numel))
        lane.through().on_done(lambda _: self._update(number, step))

    def _update(self, number: int, step: int) -> None:
        self._compute(number, Cost("optimizer", 0), partial(self._end, number, step))

    def _end(self, number: int, step: int) -> None:
        self.ends_s[step] = self.clock.now()
        self._left[step] -= 1
        if not self._left[step]:
            del self._exchanges[step]
        self._begin(number, step + 1)

    def _compute(self, number: int, cost: Cost, through: Callable[[], None]) -> None:
        """A device's part of a step, in virtual seconds."""
        device, lane = self._devices[self._groups[number].site], self._lanes[number]
        seconds = device.seconds(cost, self._moment(number))
        if lane is None or device.codes_beside:
            self.clock.at(self.clock.now() + seconds, through)
        else:
            lane.beside(seconds, through)

    def _lane(self, number: int) -> Lane | None:
        device = self._devices[self._groups[number].site]
        if device.coding is None:
            return None
        clock = self.clock
        return Lane(
            device.coding,
            encrypted=True,
            slowdown=lambda: device.slowdown_at(self._moment(number)),
            now=clock.now,
            at=clock.at,
        )

    def _moment(self, number: int) -> Moment:
        return Moment(self._seed, self._groups[number].site, self._steps[number], self.clock.now())
