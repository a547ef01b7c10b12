"""Every split holds every sample once, depends on its seed alone, and has the shape it promises."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from farflung.data import (
    PARTITIONS,
    Dirichlet,
    Labels,
    Partition,
    Share,
    Subset,
    TensorDataset,
    describe_parts,
)
from farflung.errors import ConfigError, DataError

LABELS = torch.arange(1000) % 10
EACH: dict[str, Partition] = {
    "iid": PARTITIONS["iid"](),
    "labels": PARTITIONS["labels"](),
    "labels(k=3)": PARTITIONS["labels"](k=3),
    "dirichlet": PARTITIONS["dirichlet"](),
    "dirichlet(alpha=100)": PARTITIONS["dirichlet"](alpha=100),
    "by_order": PARTITIONS["by_order"](),
}


def of(labels: Tensor | None = LABELS, count: int = 1000) -> TensorDataset:
    count = count if labels is None else len(labels)
    return TensorDataset(torch.zeros(count, 1), torch.zeros(count), labels)


def shares(how: Partition, parts: int, labels: Tensor = LABELS) -> list[Share]:
    return describe_parts(how.split(of(labels), parts), labels)


def test_every_way_is_tried() -> None:
    assert {name.partition("(")[0] for name in EACH} == PARTITIONS.keys()


@pytest.mark.parametrize("how", EACH)
def test_each_sample_once_and_by_the_seed_alone(how: str) -> None:
    for parts in (10, 16):
        torch.manual_seed(1)
        one = EACH[how].split(of(), parts, seed=3)
        assert len(one) == parts
        assert all(piece.dtype == torch.int64 for piece in one)
        assert torch.equal(torch.cat(one).sort().values, torch.arange(1000))
        torch.manual_seed(2)
        two, other = (EACH[how].split(of(), parts, seed=seed) for seed in (3, 4))
        assert all(map(torch.equal, one, two))
        assert all(map(torch.equal, one, other)) == (how == "by_order")


@given(samples=st.integers(1, 200), parts=st.integers(1, 40))
def test_even_sizes(samples: int, parts: int) -> None:
    for how in ("iid", "by_order"):
        if samples < parts:
            with pytest.raises(ConfigError, match="cannot split"):
                EACH[how].split(of(None, samples), parts)
            continue
        sizes = [len(piece) for piece in EACH[how].split(of(None, samples), parts)]
        assert sum(sizes) == samples
        assert max(sizes) - min(sizes) <= 1


def test_consecutive_labels_each() -> None:
    for rank, share in enumerate(shares(Labels(), 10)):
        assert share.histogram == tuple(100 if label == rank else 0 for label in range(10))
    for rank, share in enumerate(shares(Labels(4), 25, torch.arange(5000) % 100)):
        held = [label for label, count in enumerate(share.histogram) if count]
        assert held == list(range(4 * rank, 4 * rank + 4))


def test_shared_labels_are_divided() -> None:
    found = shares(Labels(), 16)
    assert [sum(1 for count in share.histogram if count) for share in found] == [1] * 16
    assert sorted(share.size for share in found) == [50] * 12 + [100] * 4


def test_dirichlet_concentration_means_evenness() -> None:
    def skew(alpha: float) -> float:
        found = shares(Dirichlet(alpha), 10)
        return sum(max(share.histogram) / share.size for share in found) / len(found)

    assert skew(0.1) > 0.5 > skew(1.0) > skew(1000.0)
    assert skew(1000.0) < 0.15


def test_dirichlet_sizes_are_near_and_not_too_small() -> None:
    sizes = [share.size for share in shares(Dirichlet(0.1), 8)]
    assert 10 <= min(sizes) <= max(sizes) <= 125 + 100


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: Labels(0), "partition labels: k 0 must be at least 1"),
        (lambda: Labels(1.5), "k 1.5 must be a whole number"),  # type: ignore[arg-type]
        (lambda: Dirichlet(0), "partition dirichlet: alpha 0 must be a number of at least"),
        (lambda: Dirichlet(10**400), "must be a number of at least"),
        (lambda: Dirichlet(float("nan")), "alpha nan must be a number"),
        (lambda: Labels().split(of(), 4), "leave 6 of 10 labels out; take at least 3"),
        (lambda: Labels(11).split(of(), 4), "11 labels each: this data set has 10"),
        (lambda: Labels().split(of(None), 2), "partition labels needs classes"),
        (lambda: Dirichlet().split(of(None), 2), "partition dirichlet needs classes"),
        (lambda: Dirichlet(1e-3).split(of(LABELS[:200]), 20), "take a larger concentration or fewer parts"),
    ],
)
def test_what_cannot_work_is_refused(make: object, says: str) -> None:
    with pytest.raises((ConfigError, DataError), match=says):
        make()  # type: ignore[operator]


def test_without_classes_sizes_alone_are_described() -> None:
    assert describe_parts(EACH["iid"].split(of(None, 5), 2)) == [Share(3, ()), Share(2, ())]


def test_a_subset_is_a_data_set() -> None:
    ids = torch.tensor([7, 3, 999])
    part = Subset(TensorDataset(torch.arange(1000), LABELS, LABELS), ids)
    assert len(part) == 3
    assert part.labels is not None
    assert part.labels.tolist() == [7, 3, 9]
    batch = part.take(torch.tensor([2, 0, 2]), train=True)
    assert batch.inputs.tolist() == [999, 7, 999]
    assert batch.targets.tolist() == [9, 7, 9]
    assert Subset(TensorDataset(ids, ids), ids[:0]).labels is None


def test_dirichlet_takes_any_finite_number() -> None:
    assert shares(Dirichlet(99999999999999999999), 10) is not None


@pytest.mark.parametrize("how", EACH.keys() - {"labels(k=3)"})
def test_labels_may_be_any_numbers(how: str) -> None:
    for values in ([-1, 1], [3, 500_000_000]):
        labels = torch.tensor(values).repeat(200)
        parts = EACH[how].split(of(labels), 2)
        assert sorted(torch.cat(parts).tolist()) == list(range(400))
        described = describe_parts(parts, labels)
        assert [sum(column) for column in zip(*(one.histogram for one in described), strict=True)] == [
            200,
            200,
        ]
