"""What tests of pictures share."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from matplotlib.figure import Figure


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[Figure]:
    """The figures that are saved from now on; not rendered, which takes a second each."""
    figures: list[Figure] = []

    def savefig(self: Figure, target: Path, **_: Any) -> None:
        figures.append(self)
        target.touch()

    monkeypatch.setattr(Figure, "savefig", savefig)
    return figures
