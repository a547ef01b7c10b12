"""Uniform sampling without replacement."""

from __future__ import annotations

import torch
from torch import Tensor
from typing_extensions import override

from farflung.seeding import ShuffledPasses
from farflung.types import Draw, DrawContext, Sampler, State

__all__ = ["UniformSampler"]


_HISTORY_STEPS = 1 << 12
"""Number of steps whose positions are remembered."""


class UniformSampler(Sampler):
    r"""Sampler that makes shuffled passes over the data with one global cursor.

    Position :math:`p` of the endless sequence of passes holds sample :math:`\pi_{\lfloor p/n \rfloor}(p \bmod n)`,
    where :math:`\pi_e` is a permutation drawn from the seed and the pass. At each step rank :math:`r` of :math:`R`
    takes the positions :math:`c + rB` to :math:`c + (r+1)B`, and the cursor :math:`c` moves on by :math:`RB`. So each
    sample comes exactly once per pass, also if the number of replicas changes.

    If only part of the data has arrived (a stream with a rate), the oldest samples are taken first. Positions that
    :meth:`return_batch` returns come before those at the cursor.

    Args:
      seed: Seed, equal on all replicas.
    """

    has_shared_order = True

    def __init__(self, seed: int) -> None:
        self._passes = ShuffledPasses(seed)
        self._cursor = 0
        self._returned_ranges: list[range] = []
        self._history: dict[int, tuple[list[range], int]] = {}
        """Positions that all ranks have taken at each of the latest steps, and the batch size of a rank."""

    @override
    def draw(self, context: DrawContext) -> Draw:
        """Draws this replica's part of the step's samples."""
        if isinstance(context.pool, Tensor):
            return Draw(context.pool[: context.batch_size])
        ranges = self._take_positions(context.size * context.batch_size)
        self._history[context.step] = ranges, context.batch_size
        self._history.pop(context.step - _HISTORY_STEPS, None)
        rank_ranges = slice_ranges(ranges, context.rank * context.batch_size, context.batch_size)
        samples = [
            self._list_samples(positions.start, len(positions), context.pool) for positions in rank_ranges
        ]
        return Draw(samples[0] if len(samples) == 1 else torch.cat(samples))

    @override
    def return_batch(self, step: int, rank: int) -> None:
        ranges, count = self._history[step]
        self._returned_ranges += slice_ranges(ranges, rank * count, count)

    @override
    def get_joiner_state(self) -> State:
        return {
            str(step): [count, [[positions.start, positions.stop] for positions in ranges]]
            for step, (ranges, count) in self._history.items()
        }

    @override
    def state_dict(self) -> State:
        returned = (
            {"returned": [[span.start, span.stop] for span in self._returned_ranges]}
            if self._returned_ranges
            else {}
        )
        return {"cursor": self._cursor, **returned}

    @override
    def load_state_dict(self, state: State) -> None:
        self._cursor = int(state["cursor"])
        self._returned_ranges = [range(*ends) for ends in state.get("returned", ())]
        for step, (count, ranges) in state.get("latest", {}).items():
            self._history[int(step)] = [range(*ends) for ends in ranges], count

    def _take_positions(self, count: int) -> list[range]:
        """Takes ``count`` positions of the order, those of returned batches first, and advances the cursor."""
        ranges: list[range] = []
        while count and self._returned_ranges:
            first = self._returned_ranges.pop(0)
            ranges.append(first[:count])
            if len(first) > count:
                self._returned_ranges.insert(0, first[count:])
            count -= len(ranges[-1])
        if count:
            ranges.append(range(self._cursor, self._cursor + count))
            self._cursor += count
        return ranges

    def _list_samples(self, first: int, count: int, n: int) -> Tensor:
        parts = []
        while count > 0:
            index, begin = divmod(first, n)
            part = self._passes.get_order(index, n)[begin : begin + count]
            parts.append(part)
            first += len(part)
            count -= len(part)
        return parts[0] if len(parts) == 1 else torch.cat(parts)


def slice_ranges(ranges: list[range], first: int, count: int) -> list[range]:
    """Returns ``count`` positions of consecutive ranges, from the position ``first`` on."""
    pieces = []
    for positions in ranges:
        pieces.append(positions[first : first + count])
        count -= len(pieces[-1])
        first = max(0, first - len(positions))
    return [positions for positions in pieces if len(positions)]
