"""Samples of a live stream between their arrival and their use, in the blocks in which they came."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from operator import attrgetter

import torch

from farflung.data.streams.messages import Cut
from farflung.types import Batch, SampleIds

__all__ = ["Held"]


@dataclass(slots=True)
class _Block:
    """Samples that came together; it is held until all of them are gone."""

    ids: list[int]
    cut: Cut
    nbytes: Sequence[int]
    there: bytearray
    """A one for each that is not gone."""
    last: int

    def take_out(self, begin: int, end: int) -> int:
        """Some samples go; the bytes of those that were there."""
        here = self.there[begin:end]
        self.there[begin:end] = bytes(end - begin)
        if all(here):
            return sum(self.nbytes[begin:end])
        return sum(nbytes for nbytes, one in zip(self.nbytes[begin:end], here, strict=True) if one)


class Held:
    """Samples by id.

    What a step takes mostly came together and follows one another, and is one piece then that is copied.

    Args:
      stride: the remainder of an id divided by this says its lane; ids of a lane ascend.
    """

    def __init__(self, stride: int) -> None:
        self._stride = stride
        self._lanes: dict[int, list[_Block]] = {}
        self.nbytes = 0
        """Of all that is held, as stored."""

    def put(self, lane: int, ids: list[int], cut: Cut, nbytes: Sequence[int]) -> None:
        """Samples of a lane come; behind all that it holds."""
        block = _Block(ids, cut, nbytes, bytearray(b"\1" * len(ids)), ids[-1])
        self._lanes.setdefault(lane, []).append(block)
        self.nbytes += sum(nbytes)

    def oldest(self, lane: int) -> int | None:
        """The first id of a lane that is held, if any."""
        blocks = self._lanes.get(lane)
        return blocks[0].ids[blocks[0].there.index(1)] if blocks else None

    def rows(self, ids: SampleIds) -> Batch:
        """Copies of samples that are held."""
        pieces = [block.cut(begin, end) for block, begin, end in self._pieces(ids.tolist())]
        if len(pieces) == 1:
            return pieces[0]
        return Batch(torch.cat([one.inputs for one in pieces]), torch.cat([one.targets for one in pieces]))

    def forget(self, ids: SampleIds) -> None:
        """Samples go; those that are not held are gone already."""
        for block, begin, end in self._pieces(ids.tolist()):
            self.nbytes -= block.take_out(begin, end)
            if 1 not in block.there:
                self._lanes[block.last % self._stride].remove(block)

    def _pieces(self, wanted: list[int]) -> Iterator[tuple[_Block, int, int]]:
        """Where samples are: a block, and from where to where in it they follow one another."""
        at = 0
        while at < len(wanted):
            blocks = self._lanes.get(wanted[at] % self._stride, [])
            found = bisect_left(blocks, wanted[at], key=attrgetter("last"))
            ids = blocks[found].ids if found < len(blocks) else []
            begin = bisect_left(ids, wanted[at])
            if begin == len(ids) or ids[begin] != wanted[at]:
                at += 1
                continue
            end = begin + min(len(ids) - begin, len(wanted) - at)
            if ids[begin:end] != wanted[at : at + end - begin]:
                end = begin + 1
                while ids[end : end + 1] == wanted[at + end - begin : at + end - begin + 1] != []:
                    end += 1
            yield blocks[found], begin, end
            at += end - begin
