"""Parameters that no loss reached: the ranks agree on which of them none has used."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from farflung.comm import ExchangeChannel, Purpose, Values, start
from farflung.engine.units import Places, Unit
from farflung.types import Runtime, State

__all__ = ["UnusedParameters"]

_NO_SIDE = torch.zeros(0, dtype=torch.float64)


class UnusedParameters:
    """Parameters of each unit that had no gradient, as all ranks know them.

    Zeros count where one rank lacks a gradient and others have one; where all lack it there is none, and the optimizer
    leaves the parameter alone. What a rank lacks seldom changes, so it is sent only then: a bit of the metadata says
    so, and all ranks send theirs in one small exchange for a whole step before they apply its results. Where nothing
    is ever missing nothing is sent.
    """

    def __init__(self) -> None:
        self._own: dict[int, Places] = {}
        """What this rank lacked when the last exchange of a unit began; no entry if nothing."""
        self._by_all: dict[int, Places] = {}
        """What all ranks lacked when they last said so."""
        self._never: dict[int, Places] = {}
        """What all ranks have lacked in every exchange of a unit so far."""
        self._current: set[int] = set()
        """Units whose buckets know both."""
        self.is_unequal = False
        """Whether some ranks have lacked gradients that others had; equal on all ranks."""

    def note(self, unit: Unit, absent: Places) -> bool:
        """Notes what this rank lacks in an exchange; returns True if that differs from the one before."""
        before = self._own.get(unit.number, ())
        self._own[unit.number] = absent
        return before != absent

    def update(self, unit: Unit) -> None:
        """Tells the buckets of a unit whose result has arrived what no rank has used, in it and ever."""
        number = unit.number
        if number in self._current:
            return
        self._current.add(number)
        unused = self._by_all.get(number, ())
        never = tuple(sorted({*self._never.get(number, unused)}.intersection(unused)))
        self._never[number] = never
        first = 0
        for bucket in unit.buckets:
            last = first + len(bucket.parameters)
            bucket.unused, bucket.never_used = (
                frozenset(
                    place - first for place in places[bisect_left(places, first) : bisect_left(places, last)]
                )
                for places in (unused, never)
            )
            first = last

    async def exchange(self, runtime: Runtime, number: int, absent: Sequence[tuple[Unit, Places]]) -> int:
        """Sends what this rank lacked in exchanges of a step to all others, as metadata that came with them asks.

        Args:
          runtime: the world.
          number: of the exchange; equal on all ranks.
          absent: what this rank lacked, for each unit that was asked for.

        Returns:
          The payload bytes sent.
        """
        lacks = [torch.zeros(sum(len(bucket.parameters) for bucket in unit.buckets)) for unit, _ in absent]
        for lack, (_, places) in zip(lacks, absent, strict=True):
            lack[list(places)] = 1.0
        side = _NO_SIDE if runtime.elastic is None else torch.ones(1, dtype=torch.float64)

        async def exchange(channel: ExchangeChannel) -> tuple[Tensor, ...]:
            return await channel.collective("direct")(channel, torch.cat(lacks), side)

        first = min(unit.number for unit, _ in absent)
        started = start(runtime, Purpose.UNUSED.at(number), first, exchange, Values(tuple, tuple))
        total, count = await started.bring()
        by_all = total == (int(count) if len(count) else runtime.comm.size)
        self.is_unequal |= bool((total.bool() & ~by_all).any())
        for (unit, _), of_unit in zip(absent, by_all.split([len(lack) for lack in lacks]), strict=True):
            self._by_all[unit.number] = tuple(of_unit.nonzero().flatten().tolist())
            self._current.discard(unit.number)
        return started.channel.sent_nbytes

    def state_dict(self) -> tuple[State, State]:
        """Returns what all ranks have agreed on, and what is this rank's own."""
        return {"now": _saved(self._by_all), "never": _saved(self._never)}, _saved(self._own)

    def load_state_dict(self, shared: State, own: State) -> None:
        """Continues from :meth:`state_dict`."""
        self._by_all, self._never = _loaded(shared["now"]), _loaded(shared["never"])
        self._own = _loaded(own)
        self._current.clear()


def _saved(places: Mapping[int, Iterable[int]]) -> State:
    return {str(number): list(each) for number, each in places.items()}


def _loaded(state: State) -> dict[int, Places]:
    return {int(number): tuple(places) for number, places in state.items()}
