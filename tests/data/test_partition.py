"""Every split holds every sample once, depends on its seed alone, and has the shape it promises."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from farflung.data import (
    PARTITIONS,
    Partition,
    Subset,
    TensorDataset,
    by_label,
    describe,
    dirichlet,
    iid,
    in_order,
)
from farflung.errors import ConfigError, DataError

LABELS = torch.arange(1000) % 10
DATA = TensorDataset(torch.zeros(1000, 1), LABELS, LABELS)
EACH: dict[str, Partition] = {
    "iid": PARTITIONS["iid"](),
    "labels": PARTITIONS["labels"](),
    "labels(k=3)": PARTITIONS["labels"](k=3),
    "dirichlet": PARTITIONS["dirichlet"](),
    "dirichlet(alpha=100)": PARTITIONS["dirichlet"](alpha=100),
    "by_order": PARTITIONS["by_order"](),
}


def test_every_way_is_tried() -> None:
    assert {name.partition("(")[0] for name in EACH} == PARTITIONS.keys()


@pytest.mark.parametrize("how", EACH)
@pytest.mark.parametrize("parts", [10, 16])
def test_each_sample_once(how: str, parts: int) -> None:
    pieces = EACH[how].split(DATA, parts, seed=3)
    assert len(pieces) == parts
    assert all(piece.dtype == torch.int64 for piece in pieces)
    assert torch.equal(torch.cat(pieces).sort().values, torch.arange(1000))


@pytest.mark.parametrize("how", EACH)
def test_depends_on_the_seed_alone(how: str) -> None:
    torch.manual_seed(1)
    one = EACH[how].split(DATA, 10, seed=3)
    torch.manual_seed(2)
    two = EACH[how].split(DATA, 10, seed=3)
    assert all(torch.equal(a, b) for a, b in zip(one, two, strict=True))
    other = EACH[how].split(DATA, 10, seed=4)
    changed = any(not torch.equal(a, b) for a, b in zip(one, other, strict=True))
    assert changed == (how != "by_order")


@given(samples=st.integers(1, 200), parts=st.integers(1, 40))
def test_even_sizes(samples: int, parts: int) -> None:
    if samples < parts:
        with pytest.raises(ConfigError, match="cannot split"):
            iid(samples, parts)
        return
    for pieces in (iid(samples, parts), in_order(samples, parts)):
        sizes = [len(piece) for piece in pieces]
        assert sum(sizes) == samples
        assert max(sizes) - min(sizes) <= 1


def test_one_label_each() -> None:
    for rank, share in enumerate(describe(by_label(LABELS, 10), LABELS)):
        assert share.histogram == tuple(100 if label == rank else 0 for label in range(10))


def test_four_consecutive_labels_each() -> None:
    labels = torch.arange(5000) % 100
    shares = describe(by_label(labels, 25, 4), labels)
    for rank, share in enumerate(shares):
        assert [label for label, count in enumerate(share.histogram) if count] == list(
            range(4 * rank, 4 * rank + 4)
        )


def test_shared_labels_are_divided() -> None:
    shares = describe(by_label(LABELS, 16, 1), LABELS)
    assert [sum(1 for count in share.histogram if count) for share in shares] == [1] * 16
    assert sorted(share.size for share in shares) == [50] * 12 + [100] * 4


def test_labels_that_nobody_would_hold() -> None:
    with pytest.raises(ConfigError, match="leave 6 of 10 labels out; take at least 3"):
        by_label(LABELS, 4, 1)
    with pytest.raises(ConfigError, match="11 labels each: this data set has 10"):
        by_label(LABELS, 4, 11)


def test_dirichlet_concentration_means_evenness() -> None:
    def skew(alpha: float) -> float:
        shares = describe(dirichlet(LABELS, 10, alpha), LABELS)
        return sum(max(share.histogram) / share.size for share in shares) / len(shares)

    assert skew(0.1) > 0.5 > skew(1.0) > skew(1000.0)
    assert skew(1000.0) < 0.15


def test_dirichlet_balanced_keeps_sizes_near() -> None:
    def largest(balanced: bool) -> int:
        return max(len(part) for part in dirichlet(LABELS, 8, 0.1, balanced=balanced))

    assert largest(True) <= 125 + 100 < largest(False)


def test_dirichlet_smallest() -> None:
    assert min(len(part) for part in dirichlet(LABELS, 20, 0.2, smallest=20)) >= 20
    with pytest.raises(ConfigError, match="take a larger concentration or fewer parts"):
        dirichlet(LABELS[:200], 20, 0.001, balanced=False)


@pytest.mark.parametrize(
    ("name", "options"),
    [("labels", {"k": 0}), ("labels", {"k": 1.5}), ("labels", {"k": "two"}), ("dirichlet", {"alpha": 0}),
     ("dirichlet", {"alpha": "x"}), ("dirichlet", {"alpha": float("nan")}), ("dirichlet", {"alpha": float("inf")})],
    ids=str,
)  # fmt: skip
def test_numbers_that_cannot_work(name: str, options: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match=rf"partition {name}\(.*\): (k|alpha) must be a"):
        PARTITIONS[name](**options)


@pytest.mark.parametrize("how", ["labels", "dirichlet"])
def test_classes_are_needed(how: str) -> None:
    data = TensorDataset(torch.zeros(10, 1), torch.zeros(10))
    with pytest.raises(DataError, match=f"partition {how} needs classes"):
        EACH[how].split(data, 2)
    assert [share.histogram for share in describe(EACH["iid"].split(data, 2))] == [(), ()]


def test_a_subset_is_a_data_set() -> None:
    ids = torch.tensor([7, 3, 999])
    whole = TensorDataset(torch.arange(1000), LABELS, LABELS)
    part = Subset(whole, ids)
    assert len(part) == 3
    assert part.labels is not None
    assert part.labels.tolist() == [7, 3, 9]
    batch = part.take(torch.tensor([2, 0, 2]), train=True)
    assert batch.inputs.tolist() == [999, 7, 999]
    assert batch.targets.tolist() == [9, 7, 9]
    assert Subset(TensorDataset(ids, ids), ids[:0]).labels is None
