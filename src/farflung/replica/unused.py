"""Parameters that no loss reached: which of them no replica has used."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

import torch
from torch import Tensor

from farflung.comm import ExchangeChannel, Purpose, Values, start
from farflung.types import Bucket, Runtime, State

__all__ = ["Places", "Unused", "joined_places", "places_in"]

Places = tuple[int, ...]
"""Parameters of a part, counted in its order."""
_NO_SIDE = torch.zeros(0, dtype=torch.float64)


class Unused:
    """What replicas agree about the parameters of each part that had no gradient.

    Zeros count where one replica lacks a gradient and others have one; where all lack it there is none, and the
    optimizer leaves the parameter alone. What a replica lacks seldom changes, so it is told only then: its vote asks
    for it, and all tell in one small exchange before they merge. Where nothing is ever missing nothing is sent.

    Args:
      counts: how many parameters each part has, by its number.
    """

    def __init__(self, counts: Mapping[int, int]) -> None:
        self._counts = counts
        self._own: dict[int, Places] = {}
        """What this replica lacked when the last exchange of a part began; nothing where there is no entry."""
        self._by_all: dict[int, Places] = {}
        """What all lacked when they last told."""
        self._never: dict[int, Places] = {}
        """What all have lacked in every exchange of a part that was merged."""

    def changes(self, number: int, absent: Places) -> bool:
        """An exchange of a part begins: whether this replica lacks other gradients than at the last one."""
        before = self._own.get(number, ())
        self._own[number] = absent
        return before != absent

    def merged(self, number: int) -> tuple[Places, Places]:
        """An exchange of a part is merged.

        Returns:
          What no replica had a gradient for in it, and what none has ever had one for.
        """
        unused = self._by_all.get(number, ())
        never = self._never.get(number, unused)
        self._never[number] = tuple(place for place in never if place in unused)
        return unused, self._never[number]

    async def tell(self, runtime: Runtime, step: int, number: int, absent: Places) -> int:
        """All tell what they lacked in an exchange of a part, since a vote that came with it has asked.

        Args:
          runtime: the world.
          step: of the exchange.
          number: of the part.
          absent: what this replica lacked.

        Returns:
          The payload bytes that were sent.
        """
        lack = torch.zeros(self._counts[number], dtype=torch.float32)
        lack[list(absent)] = 1.0
        side = _NO_SIDE if runtime.elastic is None else torch.ones(1, dtype=torch.float64)

        async def exchange(channel: ExchangeChannel) -> tuple[Tensor, ...]:
            return await channel.collective("direct")(channel, lack.clone(), side)

        started = start(runtime, Purpose.UNUSED.at(step), number, exchange, Values(tuple, tuple))
        total, count = await started.bring()
        by_all = total == (int(count) if len(count) else runtime.comm.size)
        self._by_all[number] = tuple(by_all.nonzero().flatten().tolist())
        return started.channel.sent_nbytes

    def state_dict(self) -> tuple[State, State]:
        """What all have agreed about, and what is this replica's own."""
        return {"now": _kept(self._by_all), "never": _kept(self._never)}, _kept(self._own)

    def load_state_dict(self, shared: State, own: State) -> None:
        self._by_all, self._never = _loaded(shared["now"]), _loaded(shared["never"])
        self._own = _loaded(own)


def joined_places(found: Iterable[tuple[Bucket, Collection[int]]]) -> Places:
    """Places in the buckets of a part as places in the part."""
    joined: list[int] = []
    first = 0
    for bucket, places in found:
        joined += (first + place for place in sorted(places))
        first += len(bucket.spec.parts)
    return tuple(joined)


def places_in(buckets: Iterable[Bucket], places: Places) -> dict[int, frozenset[int]]:
    """Places in a part as places in each of its buckets, by their indices; without buckets that have none."""
    found: dict[int, frozenset[int]] = {}
    first = 0
    for bucket in buckets if places else ():
        last = first + len(bucket.spec.parts)
        if here := frozenset(place - first for place in places if first <= place < last):
            found[bucket.index] = here
        first = last
    return found


def _kept(found: Mapping[int, Sequence[int]]) -> State:
    return {str(number): list(places) for number, places in found.items()}


def _loaded(state: State) -> dict[int, Places]:
    return {int(number): tuple(places) for number, places in state.items()}
