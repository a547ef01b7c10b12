"""Parameters without a gradient; the ranks agree on those that no rank has used."""

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
    """Parameters of each unit without a gradient, as known to all ranks.

    If only some ranks lack a gradient, they contribute zeros. If all ranks lack it, there is none, and the optimizer
    skips the parameter. The set of a rank seldom changes and is sent only then. A bit of the metadata announces it, and
    all ranks send their sets in one small exchange for the whole step before they apply its results. Otherwise nothing
    is sent.
    """

    def __init__(self) -> None:
        self._own: dict[int, Places] = {}
        """Places without a gradient on this rank when the last exchange of a unit began; no entry if empty."""
        self._by_all: dict[int, Places] = {}
        """Places without a gradient on all ranks, as last agreed."""
        self._never: dict[int, Places] = {}
        """Places without a gradient on all ranks in every exchange of a unit so far."""
        self._current: set[int] = set()
        """Units whose buckets are up to date."""
        self.is_unequal = False
        """True if some ranks have lacked gradients that others had; equal on all ranks."""

    def note(self, unit: Unit, absent: Places) -> bool:
        """Records this rank's places without a gradient in an exchange; returns True if they have changed."""
        previous = self._own.get(unit.number, ())
        self._own[unit.number] = absent
        return previous != absent

    def update(self, unit: Unit) -> None:
        """Updates the buckets of a unit whose result has arrived with the places that no rank has used."""
        number = unit.number
        if number in self._current:
            return
        self._current.add(number)
        unused = self._by_all.get(number, ())
        unreached = tuple(sorted({*self._never.get(number, unused)}.intersection(unused)))
        self._never[number] = unreached
        first = 0
        for bucket in unit.buckets:
            last = first + len(bucket.parameters)
            bucket.unused, bucket.never_used = (
                frozenset(
                    place - first for place in places[bisect_left(places, first) : bisect_left(places, last)]
                )
                for places in (unused, unreached)
            )
            first = last

    async def exchange(self, runtime: Runtime, number: int, absent: Sequence[tuple[Unit, Places]]) -> int:
        """Sends this rank's places without a gradient in a step to all others, as requested by their metadata.

        Args:
          runtime: Runtime of this replica.
          number: Number of the exchange; equal on all ranks.
          zero_places: Places without a gradient of this rank, for each requested unit.

        Returns:
          Number of payload bytes sent.
        """
        masks = [torch.zeros(sum(len(bucket.parameters) for bucket in unit.buckets)) for unit, _ in absent]
        for mask, (_, places) in zip(masks, absent, strict=True):
            mask[list(places)] = 1.0
        metadata = _NO_SIDE if runtime.elastic is None else torch.ones(1, dtype=torch.float64)

        async def exchange(channel: ExchangeChannel) -> tuple[Tensor, ...]:
            return await channel.collective("direct")(channel, torch.cat(masks), metadata)

        first = min(unit.number for unit, _ in absent)
        handle = start(runtime, Purpose.UNUSED.at(number), first, exchange, Values(tuple, tuple))
        total, count = await handle.bring()
        is_common = total == (int(count) if len(count) else runtime.comm.size)
        self.is_unequal |= bool((total.bool() & ~is_common).any())
        for (unit, _), unit_mask in zip(absent, is_common.split([len(mask) for mask in masks]), strict=True):
            self._by_all[unit.number] = tuple(unit_mask.nonzero().flatten().tolist())
            self._current.discard(unit.number)
        return handle.channel.sent_nbytes

    def state_dict(self) -> tuple[State, State]:
        """Returns the shared and the local half."""
        return {"now": _saved(self._by_all), "never": _saved(self._never)}, _saved(self._own)

    def load_state_dict(self, shared: State, own: State) -> None:
        """Restores :meth:`state_dict`."""
        self._by_all, self._never = _loaded(shared["now"]), _loaded(shared["never"])
        self._own = _loaded(own)
        self._current.clear()


def _saved(places: Mapping[int, Iterable[int]]) -> State:
    return {str(number): list(unit_places) for number, unit_places in places.items()}


def _loaded(state: State) -> dict[int, Places]:
    return {int(number): tuple(places) for number, places in state.items()}
