"""Parameters that no loss reached: which of them no replica has used."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from farflung.comm import ExchangeChannel, Purpose, Values, start
from farflung.replica.slots import buckets_of
from farflung.types import Bucket, Part, Runtime, State

__all__ = ["Places", "PlacesByBucket", "Unused", "joined_places", "places_in"]

Places = tuple[int, ...]
"""Parameters of a part, or of a bucket, counted in its order; ascending."""
PlacesByBucket = Mapping[int, frozenset[int]]
"""Parameters in buckets, by the index of the bucket."""
_NO_SIDE = torch.zeros(0, dtype=torch.float64)


class Unused:
    """What replicas agree about the parameters of each part that had no gradient.

    Zeros count where one replica lacks a gradient and others have one; where all lack it there is none, and the
    optimizer leaves the parameter alone. What a replica lacks seldom changes, so it is told only then: its vote asks
    for it, and all tell in one small exchange for a whole step before they merge. Where nothing is ever missing nothing
    is sent.

    Args:
      parts: by number.
    """

    def __init__(self, parts: Mapping[int, Part]) -> None:
        self._parts = parts
        self._own: dict[int, Places] = {}
        """What this replica lacked when the last exchange of a part began; nothing where there is no entry."""
        self._by_all: dict[int, Places] = {}
        """What all lacked when they last told."""
        self._never: dict[int, Places] = {}
        """What all have lacked in every exchange of a part that was merged."""
        self._in_buckets: dict[int, tuple[PlacesByBucket, PlacesByBucket]] = {}
        """Both in the buckets of a part, until all tell again."""

    def changes(self, number: int, absent: Places) -> bool:
        """An exchange of a part begins: whether this replica lacks other gradients than at the last one."""
        before = self._own.get(number, ())
        self._own[number] = absent
        return before != absent

    def merged(self, number: int) -> tuple[PlacesByBucket, PlacesByBucket]:
        """An exchange of a part is merged.

        Returns:
          What no replica had a gradient for in it, and what none has ever had one for.
        """
        if number not in self._in_buckets:
            unused = self._by_all.get(number, ())
            never = tuple(sorted({*self._never.get(number, unused)}.intersection(unused)))
            self._never[number] = never
            buckets = buckets_of(self._parts[number])
            self._in_buckets[number] = places_in(buckets, unused), places_in(buckets, never)
        return self._in_buckets[number]

    async def tell(self, runtime: Runtime, step: int, absent: Mapping[int, Places]) -> int:
        """All tell what they lacked in exchanges of a step, since votes that came with them have asked.

        Args:
          runtime: the world.
          step: of the exchanges.
          absent: what this replica lacked, by the numbers of the parts that were asked for.

        Returns:
          The payload bytes that were sent.
        """
        lacks = [torch.zeros(sum(len(b.spec.parts) for b in buckets_of(self._parts[n]))) for n in absent]
        for lack, places in zip(lacks, absent.values(), strict=True):
            lack[list(places)] = 1.0
        side = _NO_SIDE if runtime.elastic is None else torch.ones(1, dtype=torch.float64)

        async def exchange(channel: ExchangeChannel) -> tuple[Tensor, ...]:
            return await channel.collective("direct")(channel, torch.cat(lacks), side)

        started = start(runtime, Purpose.UNUSED.at(step), min(absent), exchange, Values(tuple, tuple))
        total, count = await started.bring()
        by_all = total == (int(count) if len(count) else runtime.comm.size)
        for number, of_part in zip(absent, by_all.split([len(lack) for lack in lacks]), strict=True):
            self._by_all[number] = tuple(of_part.nonzero().flatten().tolist())
            self._in_buckets.pop(number, None)
        return started.channel.sent_nbytes

    def state_dict(self) -> tuple[State, State]:
        """What all have agreed about, and what is this replica's own."""
        return {"now": _kept(self._by_all), "never": _kept(self._never)}, _kept(self._own)

    def load_state_dict(self, shared: State, own: State) -> None:
        self._by_all, self._never = _loaded(shared["now"]), _loaded(shared["never"])
        self._own = _loaded(own)
        self._in_buckets = {}


def joined_places(found: Iterable[tuple[Bucket, Places]]) -> Places:
    """Places in the buckets of a part as places in the part."""
    joined: list[int] = []
    first = 0
    for bucket, places in found:
        joined += (first + place for place in places) if first else places
        first += len(bucket.spec.parts)
    return tuple(joined)


def places_in(buckets: Iterable[Bucket], places: Places) -> PlacesByBucket:
    """Places in a part as places in each of its buckets, by their indices; without buckets that have none."""
    found: dict[int, frozenset[int]] = {}
    first = 0
    for bucket in buckets if places else ():
        last = first + len(bucket.spec.parts)
        if here := places[bisect_left(places, first) : bisect_left(places, last)]:
            found[bucket.index] = frozenset(place - first for place in here)
        first = last
    return found


def _kept(found: Mapping[int, Sequence[int]]) -> State:
    return {str(number): list(places) for number, places in found.items()}


def _loaded(state: State) -> dict[int, Places]:
    return {int(number): tuple(places) for number, places in state.items()}
