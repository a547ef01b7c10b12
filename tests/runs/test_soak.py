"""A run of 20,000 steps holds no more at its end than at its beginning."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.soak import STEPS, soak


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_a_long_run_does_not_grow(tmp_path: Path) -> None:
    soak(STEPS, tmp_path / "run")
