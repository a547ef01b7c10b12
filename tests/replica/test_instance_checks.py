"""A replica asks what kind its members are at its beginning alone: such a check takes longer than a small layer."""

from __future__ import annotations

from typing import Any

import pytest

from farflung.runs import simulate
from farflung.types import Scores

RECIPES = [
    "diloco(sync_every=2)",
    "mercury",
    "pipe_sgd",
    "scadles",
    "synchronous(codec=error_feedback(topk), sampler=balanced)",
]


@pytest.mark.parametrize("recipe", RECIPES)
def test_steps_ask_for_no_protocol(recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[type] = []
    kind: Any = type(Scores)
    real = kind.__instancecheck__

    def noted(protocol: type, instance: object) -> bool:
        asked.append(protocol)
        return bool(real(protocol, instance))

    monkeypatch.setattr(kind, "__instancecheck__", noted)
    counts = []
    for steps in (2, 4):
        asked.clear()
        simulate("synthetic/quadratic", recipe, workers=2, batch_size=4, steps=steps, evaluate_every=2)
        counts.append(len(asked))
    assert 0 < counts[0] == counts[1]
