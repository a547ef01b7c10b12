"""What goes wrong with devices that are processes, drawn from a seed."""

from __future__ import annotations

import random
import signal
import threading
from collections.abc import Callable
from functools import partial

from torch import Tensor

from farflung.coded.registry import BlockRegistry
from farflung.types import Json
from tests.coded_processes import ITERATIONS, Crowd, Told, rank_of

__all__ = ["DEVICES", "PARTITIONS", "Plan"]

PARTITIONS, DEVICES = 8, 12


class Plan:
    """What goes wrong in one run, drawn from a seed: when, and with whom, as far as enough is left.

    A third of the plans begins while data are encoded; the others while products are made. Devices are killed, at times
    in the midst of a product, or stopped or cut off for some products; others come, with what a lost one had or with
    nothing.

    Args:
      seed: of all that is drawn.
      crowd: the devices.
      notes: tells what happens.
      registry: of the coordinator.
      cut: makes the link of a process dead, or alive again.
    """

    def __init__(
        self,
        seed: int,
        crowd: Crowd,
        notes: Told,
        registry: BlockRegistry,
        cut: Callable[[int, bool], object],
    ) -> None:
        self.draw, self.crowd, self.notes, self.registry = random.Random(seed), crowd, notes, registry
        self._cuts = cut
        self.done: list[str] = []
        self.awaited = DEVICES
        """Devices that were started and have not come yet."""
        self._built, self._awake = 0, list[Callable[[], object]]()
        """How many blocks are made; and what ends the silence of those that are stopped or cut off."""
        self._partition: dict[int, str] = {}
        self._gone, self._cut_off = set[int](), set[int]()
        draw = self.draw
        self._encoding = draw.randrange(1, 20) if seed % 3 == 0 else 0
        self._moments = sorted(draw.sample(range(ITERATIONS - 5), draw.randint(2, 4)))
        self._timers: list[threading.Timer] = []
        self._evils = self.kill, self.cut
        notes.listener = self.hears

    def hears(self, event: str, values: dict[str, Json]) -> None:
        if event == "came":
            self._partition[int(str(values["rank"]))] = str(values["partition"])
            self.awaited -= 1
        if event == "built":
            self._built += 1
            if self._built == self._encoding:
                self.draw.choice(self._evils)("rows")

    def at(self, iterate: int, weights: Tensor | None = None) -> None:
        del weights
        for wake in self._awake:
            wake()
        self._awake.clear()
        if iterate in self._moments:
            self.draw.choice((*self._evils, self.stop))("rows", "columns")
            if self.draw.random() < 0.6:
                self.join()

    def victims(self, *kinds: str) -> list[int]:
        """As many devices as may be lost at once, up to three; nobody where that is none."""
        away = self._gone | self._cut_off
        there = [rank for rank in self.registry.devices if rank not in away]
        self.draw.shuffle(there)
        found: list[int] = []
        for rank in there:
            lost = {*away, *found, rank}
            if all(rank_of(self.registry, kind, lost) == PARTITIONS for kind in kinds):
                found.append(rank)
            if len(found) == 3:
                break
        return found[: self.draw.randint(1, 3)]

    def kill(self, *kinds: str) -> None:
        for rank in self.victims(*kinds):
            self._gone.add(rank)
            self.done.append(f"kill {rank}")
            timer = threading.Timer(
                self.draw.choice((0, 0.005, 0.02)), self.crowd.signal, (rank, signal.SIGKILL)
            )
            self._timers.append(timer)
            timer.start()

    def stop(self, *kinds: str) -> None:
        for rank in self.victims(*kinds):
            self.done.append(f"stop {rank}")
            self._awake.append(partial(self.crowd.signal, rank, signal.SIGCONT))
            self.crowd.signal(rank, signal.SIGSTOP)

    def cut(self, *kinds: str) -> None:
        """For a time that may be that of several products: the others go on without those that are cut off."""
        for rank in self.victims(*kinds):
            self.done.append(f"cut {rank}")
            pid = self.crowd.pid(rank)
            self._cut_off.add(rank)
            self._cuts(pid, True)
            timer = threading.Timer(self.draw.uniform(0.5, 3), self._cuts, (pid, False))
            self._timers.append(timer)
            timer.start()

    def join(self) -> None:
        names = [self._partition.pop(rank, "") for rank in self._gone]
        lost = sorted(name for name in names if name)
        name = self.draw.choice([*lost, ""])
        self.done.append(f"join with {name or 'nothing'}")
        self.awaited += 1
        self.crowd.join(int(name.removeprefix("part ")) if name else None)

    def end(self) -> None:
        for timer in self._timers:
            timer.join()
        self.at(-1)
