"""Parameters without a gradient; the ranks agree on those that no rank has used."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from farflung.comm import ExchangeChannel, Purpose, ResultCodec, start_exchange
from farflung.engine.units import Places, UnitState
from farflung.types import Runtime, State

__all__ = ["UnusedParameters"]

_NO_METADATA = torch.zeros(0, dtype=torch.float64)


class UnusedParameters:
    """Parameters of each unit without a gradient, as known to all ranks.

    If only some ranks lack a gradient, they contribute zeros. If all ranks lack it, there is none, and the optimizer
    skips the parameter. The set of a rank seldom changes and is sent only then. A bit of the metadata announces it, and
    all ranks send their sets in one small exchange for the whole step before they apply its results. Otherwise nothing
    is sent.
    """

    def __init__(self) -> None:
        self._local: dict[int, Places] = {}
        """Places without a gradient on this rank when the last exchange of a unit began; no entry if empty."""
        self._common: dict[int, Places] = {}
        """Places without a gradient on all ranks, as last agreed."""
        self._unreached: dict[int, Places] = {}
        """Places without a gradient on all ranks in every exchange of a unit so far."""
        self._updated_units: set[int] = set()
        """Units whose buckets are up to date."""
        self.is_unequal = False
        """True if some ranks have lacked gradients that others had; equal on all ranks."""

    def did_change(self, unit: UnitState, zero_places: Places) -> bool:
        """Records this rank's places without a gradient in an exchange; returns True if they have changed."""
        previous = self._local.get(unit.number, ())
        self._local[unit.number] = zero_places
        return previous != zero_places

    def update(self, unit: UnitState) -> None:
        """Updates the buckets of a unit whose result has arrived with the places that no rank has used."""
        number = unit.number
        if number in self._updated_units:
            return
        self._updated_units.add(number)
        unused = self._common.get(number, ())
        unreached = tuple(sorted({*self._unreached.get(number, unused)}.intersection(unused)))
        self._unreached[number] = unreached
        first = 0
        for bucket in unit.buckets:
            last = first + len(bucket.parameters)
            bucket.unused_places, bucket.unreached_places = (
                frozenset(
                    place - first for place in places[bisect_left(places, first) : bisect_left(places, last)]
                )
                for places in (unused, unreached)
            )
            first = last

    async def exchange_zero_places(
        self, runtime: Runtime, number: int, zero_places: Sequence[tuple[UnitState, Places]]
    ) -> int:
        """Records the parameters that no rank has used, by an exchange; returns the payload bytes sent.

        Args:
          runtime: Runtime of this replica.
          number: Number of the exchange; equal on all ranks.
          zero_places: Places without a gradient of this rank, for each requested unit.

        Returns:
          Number of payload bytes sent.
        """
        masks = [
            torch.zeros(sum(len(bucket.parameters) for bucket in unit.buckets)) for unit, _ in zero_places
        ]
        for mask, (_, places) in zip(masks, zero_places, strict=True):
            mask[list(places)] = 1.0
        metadata = _NO_METADATA if runtime.elastic is None else torch.ones(1, dtype=torch.float64)

        async def exchange(channel: ExchangeChannel) -> tuple[Tensor, ...]:
            return await channel.get_collective("direct")(channel, torch.cat(masks), metadata)

        first = min(unit.number for unit, _ in zero_places)
        handle = start_exchange(
            runtime, Purpose.UNUSED.build_exchange_id(number), first, exchange, ResultCodec(tuple, tuple)
        )
        total, count = await handle.wait()
        is_common = total == (int(count) if len(count) else runtime.comm.size)
        self.is_unequal |= bool((total.bool() & ~is_common).any())
        for (unit, _), unit_mask in zip(
            zero_places, is_common.split([len(mask) for mask in masks]), strict=True
        ):
            self._common[unit.number] = tuple(unit_mask.nonzero().flatten().tolist())
            self._updated_units.discard(unit.number)
        return handle.channel.sent_nbytes

    def state_dict(self) -> tuple[State, State]:
        """Returns the shared and the local half."""
        return {
            "common": _pack_places(self._common),
            "unreached": _pack_places(self._unreached),
        }, _pack_places(self._local)

    def load_state_dict(self, shared: State, local: State) -> None:
        """Restores :meth:`state_dict`."""
        self._common, self._unreached = _unpack_places(shared["common"]), _unpack_places(shared["unreached"])
        self._local = _unpack_places(local)
        self._updated_units.clear()


def _pack_places(places: Mapping[int, Iterable[int]]) -> State:
    return {str(number): list(unit_places) for number, unit_places in places.items()}


def _unpack_places(state: State) -> dict[int, Places]:
    return {int(number): tuple(places) for number, places in state.items()}
