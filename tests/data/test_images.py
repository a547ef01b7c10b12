"""Shifts, flips and scaling do to images what their names say."""

from __future__ import annotations

import pytest
import torch

from farflung.data import TensorDataset
from farflung.data.images import Compose, Normalize, RandomFlip, RandomShift
from farflung.errors import DataError

IMAGES = torch.arange(1, 1 + 64 * 2 * 5 * 4).reshape(64, 2, 5, 4).remainder(255).to(torch.uint8)


def test_shift_moves_and_fills_with_zero() -> None:
    torch.manual_seed(0)
    shifted = RandomShift(1)(IMAGES)
    assert shifted.shape == IMAGES.shape
    assert shifted.dtype == torch.uint8
    padded = torch.nn.functional.pad(IMAGES, (1, 1, 1, 1))
    seen = set()
    for image, frame in zip(shifted, padded, strict=True):
        (where,) = [
            (row, column)
            for row in range(3)
            for column in range(3)
            if torch.equal(image, frame[:, row : row + 5, column : column + 4])
        ]
        seen.add(where)
    assert len(seen) == 9


def test_flip_mirrors_about_half() -> None:
    torch.manual_seed(0)
    flipped = RandomFlip()(IMAGES)
    mirrored = (flipped == IMAGES.flip(-1)).flatten(1).all(dim=1)
    same = (flipped == IMAGES).flatten(1).all(dim=1)
    assert bool((mirrored ^ same).all())
    assert 16 < int(mirrored.sum()) < 48


def test_normalize() -> None:
    scaled = Normalize((0.5, 0.25), (0.5, 0.25))(IMAGES)
    wanted = (IMAGES / 255 - torch.tensor([0.5, 0.25])[:, None, None]) / torch.tensor([0.5, 0.25])[
        :, None, None
    ]
    torch.testing.assert_close(scaled, wanted)


def test_augmentation_comes_before_scaling() -> None:
    data = TensorDataset(
        IMAGES, torch.zeros(64), transform=lambda x: x.float() * 2, augment=Compose(lambda x: x + 1)
    )
    ids = torch.tensor([3, 1])
    assert torch.equal(data.take(ids, train=True).inputs, (IMAGES[ids] + 1).float() * 2)
    assert torch.equal(data.take(ids, train=False).inputs, IMAGES[ids].float() * 2)


def test_counts_must_agree() -> None:
    with pytest.raises(DataError, match="3 inputs, 2 targets, 3 labels"):
        TensorDataset(torch.zeros(3), torch.zeros(2), torch.zeros(3))
