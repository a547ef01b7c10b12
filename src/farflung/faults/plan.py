"""Plans of faults, as data and from TOML: kind, target and time of each."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

from typing_extensions import override

from farflung.errors import ConfigError, UnknownName, Unsupported
from farflung.options import check_factor, require
from farflung.tables import load_table

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
"""Descriptions of the faults by kind."""
KIND_PARAMETERS = {"slow": "factor", "throttle": "bandwidth_bps", "lose": "loss"}
"""Parameter that a kind requires; no other kind has it."""
MEMBERSHIP_KINDS = ("join", "leave")
"""Kinds that change the membership."""
LINK_KINDS = ("cut", "reset", "throttle", "lose", "restore")
"""Kinds that may have a peer."""
TEMPORARY_KINDS = ("cut", "hang", "lose", "slow", "throttle")
"""Kinds that may last for a time."""


@dataclass(frozen=True, slots=True)
class Fault:
    """Fault of one replica or of its links.

    Args:
      kind: Name in :data:`FAULTS`.
      rank: Affected replica.
      at_step: Number of steps after which it is injected, counted by the replica; by rank 0 for a ``join``.
      at_s: Time of the injection instead, in seconds since the first replica began its first step.
      factor: For ``slow``: factor of the time of computations.
      peer: For ``cut``, ``reset``, ``throttle``, ``lose`` and ``restore``: the other end; None for all others.
      group: For the same kinds: other replicas on the side of this one, as in a partition into two parts.
      one_way: For the same kinds but ``reset``: if True, only from this side to the other.
      bandwidth_bps: For ``throttle``: bits per second.
      loss: For ``lose``: share of packets, besides the losses of the network itself.
      for_s: For ``cut``, ``hang``, ``lose``, ``slow`` and ``throttle``: seconds after which it is reverted; None if it
        lasts.

    Raises:
      UnknownName: There is no such kind.
      ConfigError: A value is out of range, or the kind does not have it; begins with its name.
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
        for kind, name in KIND_PARAMETERS.items():
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
            ("peer", LINK_KINDS, "have one"),
            ("group", LINK_KINDS, "have one"),
            ("one_way", LINK_KINDS, "have one"),
            ("for_s", TEMPORARY_KINDS, "last for a time"),
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

    def iter_links(self, size: int) -> Iterator[tuple[int, int]]:
        """Yields the affected links of ``size`` replicas: (sender, receiver), both directions unless ``one_way``."""
        side = (self.rank, *self.group)
        for rank in side:
            for peer in range(size) if self.peer is None else (self.peer,):
                if peer not in side:
                    yield from ((rank, peer),) if self.one_way else ((rank, peer), (peer, rank))

    @override
    def __str__(self) -> str:
        """Returns a description for messages.

        >>> str(Fault("cut", 2, at_step=10, peer=0, for_s=3))
        'cut of rank 2 from rank 0 at step 10 for 3 s'
        """
        scope = f" from rank {self.peer}" if self.peer is not None else ""
        scope = "".join(f" and {rank}" for rank in self.group) + (" one way" if self.one_way else "") + scope
        moment = f"step {self.at_step}" if self.at_s is None else f"{self.at_s:g} s"
        duration = "" if self.for_s is None else f" for {self.for_s:g} s"
        return f"{self.kind} of rank {self.rank}{scope} at {moment}{duration}"


@dataclass(frozen=True, slots=True)
class FaultPlan:
    """Faults of a run. Each method returns a plan with one more fault.

    >>> plan = FaultPlan().slow(1, factor=3, at_s=10).crash(2, at_step=100)
    >>> [str(fault) for fault in plan.faults]
    ['slow of rank 1 at 10 s', 'crash of rank 2 at step 100']

    Args:
      faults: Faults in any order; those of one moment are injected in this order.
    """

    faults: tuple[Fault, ...] = ()

    def crash(self, rank: int, *, at_step: int | None = None, at_s: float | None = None) -> FaultPlan:
        """Adds a fault: the replica ends immediately, and its connections close."""
        return self._with(Fault("crash", rank, at_step, at_s))

    def hang(
        self, rank: int, *, at_step: int | None = None, at_s: float | None = None, for_s: float | None = None
    ) -> FaultPlan:
        """Adds a fault: the replica is suspended with its connections open."""
        return self._with(Fault("hang", rank, at_step, at_s, for_s=for_s))

    def leave(self, rank: int, *, at_step: int | None = None, at_s: float | None = None) -> FaultPlan:
        """Adds a fault: the replica announces its leave to the others and ends."""
        return self._with(Fault("leave", rank, at_step, at_s))

    def join(self, rank: int, *, at_step: int | None = None, at_s: float | None = None) -> FaultPlan:
        """Adds a fault: a replica of this rank joins."""
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
        """Adds a fault: computations of the replica take ``factor`` times as long."""
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
        """Adds a fault: no message passes between the replica or its group and its peer, or all others."""
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
        """Adds a fault: the connections between the replica and its peer, or all others, close."""
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
        """Adds a fault: bandwidth is limited in both directions to its peer, or to each other replica."""
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
        """Adds a fault: a share of the packets between the replica and its peer, or all others, is lost."""
        return self._with(Fault("lose", rank, at_step, at_s, peer=peer, loss=loss, for_s=for_s))

    def restore(
        self, rank: int, peer: int | None = None, *, at_step: int | None = None, at_s: float | None = None
    ) -> FaultPlan:
        """Adds a fault: all faults of the replica are reverted, or of its connection to a peer."""
        return self._with(Fault("restore", rank, at_step, at_s, peer=peer))

    def check(self, size: int, supported_kinds: Collection[str], world: str) -> None:
        """Checks that a world of ``size`` replicas supports the plan.

        Args:
          size: Number of replicas.
          supported_kinds: Kinds that the world supports.
          world: Name of the world for messages.

        Raises:
          Unsupported: The world does not support a kind.
          ConfigError: A rank does not exist.
        """
        for fault in self.faults:
            if fault.kind not in supported_kinds:
                raise Unsupported(f"{fault}: {world} supports only {', '.join(sorted(supported_kinds))}")
            for rank in (fault.rank, fault.peer, *fault.group):
                if rank is not None and rank >= size:
                    raise ConfigError(f"{fault}: there are only ranks 0 to {size - 1}")

    @property
    def joining_ranks(self) -> frozenset[int]:
        """Ranks that are absent at the start, since their first fault is a join.

        >>> sorted(FaultPlan().join(2, at_s=1.0).leave(3, at_s=1.0).join(3, at_s=2.0).joining_ranks)
        [2]

        Raises:
          ConfigError: A rank joins at a step and leaves at a time, or the other way round.
        """
        moves: dict[int, list[Fault]] = {}
        for fault in self.faults:
            if fault.kind in (*MEMBERSHIP_KINDS, "crash"):
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
    """Loads a plan from TOML.

    Raises:
      ConfigError: The file is absent, no TOML, or has a wrong value; one line with file and key.
    """
    top = load_table(path)
    faults = tuple(table.build(Fault) for table in top.read_tables("fault"))
    return top.build_with(lambda: FaultPlan(faults))
