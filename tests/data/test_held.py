"""What a live stream holds: each sample by its id until it goes, whatever came together and whatever goes first."""

from __future__ import annotations

from functools import partial

import torch
from hypothesis import given
from hypothesis import strategies as st

from farflung.data.streams.held import Held
from farflung.types import Batch

LANES, STRIDE = 2, 8


def cut(rows: torch.Tensor, begin: int, end: int) -> Batch:
    return Batch(rows[begin:end].clone(), -rows[begin:end])


@given(st.lists(st.tuples(st.integers(0, LANES - 1), st.integers(1, 6)), max_size=8), st.data())
def test_samples_are_found_by_id_until_they_go(came: list[tuple[int, int]], data: st.DataObject) -> None:
    held, there = Held(STRIDE), list[int]()
    following = dict.fromkeys(range(LANES), 0)
    for lane, count in came:
        ids = [STRIDE * position + lane for position in range(following[lane], following[lane] + count)]
        following[lane] += count
        held.put(lane, ids, partial(cut, torch.tensor(ids)), [one + 1 for one in ids])
        there += ids
    while there:
        wanted = data.draw(st.lists(st.sampled_from(there), min_size=1))
        found = held.rows(torch.tensor(wanted))
        assert found.inputs.tolist() == wanted
        assert found.targets.tolist() == [-one for one in wanted]
        gone = data.draw(st.sampled_from([wanted, there[: len(wanted)]]))
        held.forget(torch.tensor(gone))
        held.forget(torch.tensor(gone))
        there = [one for one in there if one not in gone]
        assert held.nbytes == sum(one + 1 for one in there)
        for lane in range(LANES):
            assert held.oldest(lane) == min((one for one in there if one % STRIDE == lane), default=None)
