"""The samples that a replica holds: by place, wherever they have come from."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from farflung.data import Holding, Subset, TensorDataset
from farflung.types import Batch, Dataset
from tests.helpers import same_bits

WHOLE = TensorDataset(
    torch.arange(40.0).reshape(20, 2),
    torch.arange(20),
    torch.arange(20) % 3,
    transform=lambda rows: rows * 2,
    augment=lambda rows: rows + 1,
)
IDS = torch.tensor([11, 3, 7, 0, 19])


def same(one: Batch, other: Batch) -> bool:
    return same_bits(one.inputs, other.inputs) and same_bits(one.targets, other.targets)


@pytest.mark.parametrize("train", [False, True])
def test_it_is_a_subset_where_nothing_has_moved(train: bool) -> None:
    held: Dataset = Holding(WHOLE, IDS)
    plain, places = Subset(WHOLE, IDS), torch.tensor([4, 0, 4])
    assert len(held) == 5
    assert same(held.get_rows(places), plain.get_rows(places))
    assert same(held.take(places, train=train), plain.take(places, train=train))
    assert held.labels is not None
    assert plain.labels is not None
    assert same_bits(held.labels, plain.labels)


def test_what_has_come_is_kept_as_it_came() -> None:
    held = Holding(WHOLE, IDS)
    rows = Batch(torch.tensor([[-1.0, -2.0], [-3.0, -4.0]]), torch.tensor([50, 51]))
    held.replace_samples(torch.tensor([3, 1]), torch.tensor([5, 6]), rows)
    assert held.ids.tolist() == [11, 6, 7, 5, 19]
    found = held.get_rows(torch.tensor([1, 0, 3, 1]))
    assert found.inputs.tolist() == [[-3, -4], [22, 23], [-1, -2], [-3, -4]]
    assert found.targets.tolist() == [51, 11, 50, 51]
    assert held.take(torch.tensor([3]), train=True).inputs.tolist() == [[0, -2]]
    assert IDS.tolist() == [11, 3, 7, 0, 19], "the share itself is the caller's"


def test_it_goes_on_from_ids_alone() -> None:
    held = Holding(WHOLE, IDS)
    places = torch.arange(5)
    held.replace_samples(places[:2], torch.tensor([5, 6]), WHOLE.get_rows(torch.tensor([5, 6])))
    again = Holding(WHOLE, IDS)
    again.load_ids(held.ids)
    assert same(again.get_rows(places), held.get_rows(places))
    again.replace_samples(places[:1], torch.tensor([8]), WHOLE.get_rows(torch.tensor([8])))
    assert held.ids.tolist() == [5, 6, 7, 0, 19]


@given(data=st.data())
def test_any_moves_leave_each_sample_in_its_place(data: st.DataObject) -> None:
    held, ids = Holding(WHOLE, IDS), IDS.tolist()
    for _ in range(data.draw(st.integers(0, 5))):
        places = data.draw(st.lists(st.integers(0, 4), min_size=1, unique=True))
        came = data.draw(st.lists(st.integers(0, 19), min_size=len(places), max_size=len(places)))
        held.replace_samples(torch.tensor(places), torch.tensor(came), WHOLE.get_rows(torch.tensor(came)))
        for place, one in zip(places, came, strict=True):
            ids[place] = one
    asked = data.draw(st.lists(st.integers(0, 4)))
    assert held.ids.tolist() == ids
    wanted = torch.tensor([ids[place] for place in asked], dtype=torch.int64)
    assert same(held.get_rows(torch.tensor(asked, dtype=torch.int64)), WHOLE.get_rows(wanted))
    assert held._received_rows is None or len(held._received_rows) <= len(held), (
        "a place that is taken again is not kept twice"
    )
