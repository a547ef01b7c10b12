"""Timing of a fleet of devices in classes: no arithmetic, and nothing that grows with the number of devices."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

from farflung.comm import AUTO, COLLECTIVES, choose
from farflung.comm.virtual import VirtualClock
from farflung.comm.virtual.flows import Flows
from farflung.comm.virtual.groups import GroupedReduce, ReduceShape
from farflung.devices import DeviceProfile, Moment
from farflung.errors import ConfigError, UnknownName
from farflung.network import NetworkProfile
from farflung.network.bundles import Bundles, Group, groups_of
from farflung.types import Cost

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
    network, so the times are those of a simulation of every single device.

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
        raise ConfigError(f"{network.name}: nodes: how many is open; use for_nodes(count)")
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
        self._flows = Flows(self.clock, Bundles(network, groups), seed)
        self._devices, self._shape, self._groups = devices, shape, groups
        self._batch_size, self._seed = batch_size, seed
        self._exchanges: dict[int, GroupedReduce] = {}
        self._left = {step: len(groups) for step in range(steps)}
        for number in range(len(groups)):
            self._begin(number, 0)

    def _begin(self, number: int, step: int) -> None:
        if step == len(self.ends_s):
            return
        computed = self.clock.now()
        for cost in (Cost("forward", self._batch_size), Cost("backward", self._batch_size)):
            computed += self._seconds(number, step, cost, computed)
        self.clock.at(computed, lambda: self._exchange(number, step))

    def _exchange(self, number: int, step: int) -> None:
        if step not in self._exchanges:
            self._exchanges[step] = GroupedReduce(
                self._flows, self._groups, self._shape, lambda group: self._update(group, step)
            )
        self._exchanges[step].enter(number)

    def _update(self, number: int, step: int) -> None:
        end = self.clock.now()
        end += self._seconds(number, step, Cost("optimizer", 0), end)
        self.ends_s[step] = max(self.ends_s[step], end)
        self._left[step] -= 1
        if not self._left[step]:
            del self._exchanges[step]
        self.clock.at(end, lambda: self._begin(number, step + 1))

    def _seconds(self, number: int, step: int, cost: Cost, now: float) -> float:
        site = self._groups[number].site
        return self._devices[site].seconds(cost, Moment(self._seed, site, step + 1, now))
