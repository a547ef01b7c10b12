"""Faults as data: what strikes which replica or link, and when; and plans of them from TOML."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

from typing_extensions import override

from farflung.errors import ConfigError, UnknownName, Unsupported
from farflung.options import check_factor, require
from farflung.tables import open_toml

__all__ = ["FAULTS", "Fault", "FaultPlan", "load_faults"]


FAULTS: dict[str, str] = {
    "crash": "the replica ends at once, and its connections close",
    "hang": "the replica stands still with its connections open",
    "leave": "the replica announces its leave to the others and ends",
    "join": "a replica of this rank comes in; nothing where there is one",
    "slow": "all that the replica computes takes a factor longer",
    "cut": "nothing passes between the replica and its peer, or all others; what is on its way waits",
    "reset": "the connections between the replica and its peer, or all others, are closed; both ends are alive",
    "throttle": "between the replica and its peer, or each other replica, no more bandwidth each way",
    "lose": "of the packets between the replica and its peer, or all others, this share is lost",
    "restore": "what the others have done to the replica is undone; with a peer, to the connection of the two",
}
"""What can happen, by kind."""
PARAMETERS = {"slow": "factor", "throttle": "bandwidth_bps", "lose": "loss"}
"""What a kind needs, and no other kind has."""
MEMBERSHIP = ("join", "leave")
"""The kinds that change the membership."""
BETWEEN_TWO = ("cut", "reset", "throttle", "lose", "restore")
"""The kinds that may have a peer."""
PASSING = ("cut", "hang", "lose", "slow", "throttle")
"""The kinds that may last for a time."""


@dataclass(frozen=True, slots=True)
class Fault:
    """One thing that happens to one replica.

    Args:
      kind: a name in :data:`FAULTS`.
      rank: the replica that it strikes.
      at_step: once the replica has done this many steps; of a ``join``, once rank 0 has.
      at_s: at this time instead, in seconds since the first step: since it began on the first replica to begin.
      factor: of ``slow``: how many times as long computations take.
      peer: of ``cut``, ``reset``, ``throttle``, ``lose`` and ``restore``: the other end; ``None``: all others.
      group: of the same: other replicas on the side of this one, as of a partition into two parts.
      one_way: of the same, but ``reset``: only from this side to the other.
      bandwidth_bps: of ``throttle``: bits per second.
      loss: of ``lose``: share of packets, besides what the network itself loses.
      for_s: of ``cut``, ``hang``, ``lose``, ``slow`` and ``throttle``: after so many seconds it is undone by itself;
        ``None``: it lasts.

    Raises:
      UnknownName: no such kind.
      ConfigError: a value out of its range, or one that this kind does not have; begins with its name.
    """

    kind: str
    rank: int
    at_step: int | None = None
    at_s: float | None = None
    factor: float | None = None
    peer: int | None = None
    bandwidth_bps: float | None = None
    loss: float | None = None
    for_s: float | None = None
    group: tuple[int, ...] = ()
    one_way: bool = False

    def __post_init__(self) -> None:
        if self.kind not in FAULTS:
            raise UnknownName("fault", self.kind, FAULTS)
        require(self.rank >= 0, "rank", self.rank, "0 or more")
        if (self.at_step is None) == (self.at_s is None):
            raise ConfigError("at_step, at_s: give one of them")
        require((self.at_step or 0) >= 0, "at_step", self.at_step, "0 or more")
        require(
            0 <= (self.at_s or 0.0) < math.inf,
            "at_s",
            self.at_s,
            "a number of seconds, 0 or more; the first step begins at 0, and nothing goes wrong before",
        )
        for kind, name in PARAMETERS.items():
            value = getattr(self, name)
            if (value is None) == (self.kind == kind):
                raise ConfigError(f"{name} = {value}: {kind} needs one, and nothing else has one")
        if self.factor is not None:
            check_factor("factor", self.factor)
        require(
            self.bandwidth_bps is None or self.bandwidth_bps > 0,
            "bandwidth_bps",
            self.bandwidth_bps,
            "above 0, in bits per second; cut lets nothing pass",
        )
        require(
            self.loss is None or 0 <= self.loss < 1,
            "loss",
            self.loss,
            "a fraction of packets, at least 0 and below 1",
        )
        for name, kinds, capability in (
            ("peer", BETWEEN_TWO, "have one"),
            ("group", BETWEEN_TWO, "have one"),
            ("one_way", BETWEEN_TWO, "have one"),
            ("for_s", PASSING, "last for a time"),
        ):
            if getattr(self, name) not in (None, (), False) and self.kind not in kinds:
                raise ConfigError(f"{name} = {getattr(self, name)}: only {', '.join(kinds)} {capability}")
        require(self.peer is None or 0 <= self.peer != self.rank, "peer", self.peer, "another rank")
        if self.one_way and self.kind == "reset":
            raise ConfigError("one_way: a connection is closed at both ends")
        is_disjoint = all(rank >= 0 and rank not in (self.rank, self.peer) for rank in self.group)
        require(is_disjoint, "group", list(self.group), "other ranks than rank and peer")
        require(
            self.for_s is None or 0 < self.for_s < math.inf,
            "for_s",
            self.for_s,
            "a number of seconds above 0; leave it out and it lasts",
        )

    def ways(self, size: int) -> Iterator[tuple[int, int]]:
        """The ways of messages that it concerns among so many replicas, as pairs of sender and receiver."""
        side = (self.rank, *self.group)
        for rank in side:
            for peer in range(size) if self.peer is None else (self.peer,):
                if peer not in side:
                    yield from ((rank, peer),) if self.one_way else ((rank, peer), (peer, rank))

    @override
    def __str__(self) -> str:
        """For messages.

        >>> str(Fault("cut", 2, at_step=10, peer=0, for_s=3))
        'cut of rank 2 from rank 0 at step 10 for 3 s'
        """
        scope = f" from rank {self.peer}" if self.peer is not None else ""
        scope = "".join(f" and {rank}" for rank in self.group) + (" one way" if self.one_way else "") + scope
        when = f"step {self.at_step}" if self.at_s is None else f"{self.at_s:g} s"
        duration = "" if self.for_s is None else f" for {self.for_s:g} s"
        return f"{self.kind} of rank {self.rank}{scope} at {when}{duration}"


@dataclass(frozen=True, slots=True)
class FaultPlan:
    """All that goes wrong in a run. Methods give a plan with one thing more.

    >>> plan = FaultPlan().slow(1, factor=3, at_s=10).crash(2, at_step=100)
    >>> [str(fault) for fault in plan.faults]
    ['slow of rank 1 at 10 s', 'crash of rank 2 at step 100']

    Args:
      faults: in any order; those of one moment happen in this one.
    """

    faults: tuple[Fault, ...] = ()

    def crash(self, rank: int, *, at_step: int | None = None, at_s: float | None = None) -> FaultPlan:
        """The replica ends at once, and its connections close."""
        return self._with(Fault("crash", rank, at_step, at_s))

    def hang(
        self, rank: int, *, at_step: int | None = None, at_s: float | None = None, for_s: float | None = None
    ) -> FaultPlan:
        """The replica stands still with its connections open."""
        return self._with(Fault("hang", rank, at_step, at_s, for_s=for_s))

    def leave(self, rank: int, *, at_step: int | None = None, at_s: float | None = None) -> FaultPlan:
        """The replica announces its leave to the others and ends."""
        return self._with(Fault("leave", rank, at_step, at_s))

    def join(self, rank: int, *, at_step: int | None = None, at_s: float | None = None) -> FaultPlan:
        """A replica of this rank comes in."""
        return self._with(Fault("join", rank, at_step, at_s))

    def slow(
        self,
        rank: int,
        *,
        factor: float,
        at_step: int | None = None,
        at_s: float | None = None,
        for_s: float | None = None,
    ) -> FaultPlan:
        """All that the replica computes takes ``factor`` times as long."""
        return self._with(Fault("slow", rank, at_step, at_s, factor, for_s=for_s))

    def cut(
        self,
        rank: int,
        peer: int | None = None,
        *,
        at_step: int | None = None,
        at_s: float | None = None,
        for_s: float | None = None,
        group: tuple[int, ...] = (),
        one_way: bool = False,
    ) -> FaultPlan:
        """Nothing passes between the replica and its peer, or all others; a partition where it has a group."""
        return self._with(
            Fault("cut", rank, at_step, at_s, peer=peer, for_s=for_s, group=group, one_way=one_way)
        )

    def reset(
        self,
        rank: int,
        peer: int | None = None,
        *,
        at_step: int | None = None,
        at_s: float | None = None,
        group: tuple[int, ...] = (),
    ) -> FaultPlan:
        """The connections between the replica and its peer, or all others, are closed."""
        return self._with(Fault("reset", rank, at_step, at_s, peer=peer, group=group))

    def throttle(
        self,
        rank: int,
        peer: int | None = None,
        *,
        bandwidth_bps: float,
        at_step: int | None = None,
        at_s: float | None = None,
        for_s: float | None = None,
    ) -> FaultPlan:
        """Between the replica and its peer, or each other replica, no more bandwidth each way."""
        return self._with(
            Fault("throttle", rank, at_step, at_s, peer=peer, bandwidth_bps=bandwidth_bps, for_s=for_s)
        )

    def lose(
        self,
        rank: int,
        peer: int | None = None,
        *,
        loss: float,
        at_step: int | None = None,
        at_s: float | None = None,
        for_s: float | None = None,
    ) -> FaultPlan:
        """Of the packets between the replica and its peer, or all others, this share is lost."""
        return self._with(Fault("lose", rank, at_step, at_s, peer=peer, loss=loss, for_s=for_s))

    def restore(
        self, rank: int, peer: int | None = None, *, at_step: int | None = None, at_s: float | None = None
    ) -> FaultPlan:
        """Undoes what was done to the replica; with a peer, to the connection of the two alone."""
        return self._with(Fault("restore", rank, at_step, at_s, peer=peer))

    def check(self, size: int, carried: Collection[str], world: str) -> None:
        """Whether a world of ``size`` replicas can carry it.

        Args:
          size: number of replicas.
          carried: the kinds that the world can carry.
          world: what it is called, for messages.

        Raises:
          Unsupported: a kind that it cannot carry.
          ConfigError: a rank that there is not.
        """
        for fault in self.faults:
            if fault.kind not in carried:
                raise Unsupported(f"{fault}: {world} carries {', '.join(sorted(carried))} alone")
            for rank in (fault.rank, fault.peer, *fault.group):
                if rank is not None and rank >= size:
                    raise ConfigError(f"{fault}: there are ranks 0 to {size - 1} alone")

    @property
    def absent(self) -> frozenset[int]:
        """The ranks that are not there at the start: what happens to them first is that they come in.

        >>> sorted(FaultPlan().join(2, at_s=1.0).leave(3, at_s=1.0).join(3, at_s=2.0).absent)
        [2]

        Raises:
          ConfigError: a rank comes at a step and goes at a time, or the other way round.
        """
        moves: dict[int, list[Fault]] = {}
        for fault in self.faults:
            if fault.kind in (*MEMBERSHIP, "crash"):
                moves.setdefault(fault.rank, []).append(fault)
        absent = set[int]()
        for rank, rank_faults in moves.items():
            if any(fault.kind == "join" for fault in rank_faults):
                if len({fault.at_s is None for fault in rank_faults}) > 1:
                    raise ConfigError(
                        f"rank {rank} comes and goes at steps and at times: give at_s for all of it, or at_step"
                    )
                first = min(rank_faults, key=lambda fault: (fault.at_step or 0, fault.at_s or 0.0))
                if first.kind == "join":
                    absent.add(rank)
        return frozenset(absent)

    def _with(self, fault: Fault) -> FaultPlan:
        return FaultPlan((*self.faults, fault))


def load_faults(path: Path) -> FaultPlan:
    """Reads a plan; the format is at the top of this module.

    Raises:
      ConfigError: the file is absent or no TOML, or something in it is wrong; one line with file and key.
    """
    top = open_toml(path)
    faults = tuple(table.build(Fault) for table in top.tables("fault"))
    return top.make(lambda: FaultPlan(faults))
