"""The quadratic program over the simplex, by its optimality conditions."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from farflung.coded.solvers.simplex import over_simplex
from farflung.seeding import generator


@given(
    seed=st.integers(0, 10_000),
    planes=st.integers(1, 60),
    rows=st.integers(1, 12),
    spread=st.sampled_from([1e-6, 1.0, 1e6]),
    offset=st.sampled_from([0.0, 1.0, 1e6]),
)
def test_optimality(seed: int, planes: int, rows: int, spread: float, offset: float) -> None:
    random = generator(seed)
    normals = spread * torch.randn(planes, rows, generator=random, dtype=torch.float64)
    offsets = offset * torch.randn(planes, generator=random, dtype=torch.float64)
    matrix = normals @ normals.T
    shares = over_simplex(matrix, offsets)
    assert float(shares.sum()) == pytest.approx(1, abs=1e-12)
    assert bool((shares >= 0).all())
    gradient = matrix @ shares - offsets
    scale = max(float(matrix.diagonal().max()), float(offsets.abs().max()))
    assert float(shares @ gradient - gradient.min()) <= 1e-12 * scale


def test_known_answers() -> None:
    two = over_simplex(torch.eye(2, dtype=torch.float64), torch.tensor([0.5, 0.0], dtype=torch.float64))
    torch.testing.assert_close(two, torch.tensor([0.75, 0.25], dtype=torch.float64))
    none = torch.zeros(3, 3, dtype=torch.float64)
    flat = over_simplex(none, torch.zeros(3, dtype=torch.float64))
    torch.testing.assert_close(flat, torch.full((3,), 1 / 3, dtype=torch.float64))
    linear = over_simplex(none, torch.tensor([1.0, 3, 2], dtype=torch.float64))
    torch.testing.assert_close(linear, torch.tensor([0.0, 1, 0], dtype=torch.float64), atol=1e-10, rtol=0)
