"""Every preset, and recipes beyond them, ends with the parameters, bytes and virtual times that it always had."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.common.first_steps import machine
from tests.battery.cases import CASES
from tests.battery.record import EXPECTED
from tests.battery.runs import virtual, wall
from tests.pool import Pool

RECORDED: dict[str, Any] = json.loads(EXPECTED.read_text())


def test_every_case_is_recorded() -> None:
    assert RECORDED.keys() == CASES.keys(), "record them: python -m tests.battery.record"


@pytest.mark.parametrize("name", CASES)
def test_nothing_has_changed(pool: Pool, tmp_path: Path, name: str) -> None:
    case, recorded = CASES[name], RECORDED[name]
    outcomes = {}
    if case.virtual:
        outcomes["virtual"] = virtual(case, tmp_path / "virtual")
    outcomes["wall"] = wall(pool, case, tmp_path / "wall", tmp_path / "virtual" / "decisions.jsonl")
    bits = [outcome.pop("bits") for outcome in outcomes.values()]
    assert bits[0] == bits[-1], "in virtual time it ends with other bits than on the wall clock"
    for world, outcome in outcomes.items():
        assert outcome == recorded[world], world
    if machine() not in recorded["bits"]:
        pytest.skip(
            f"no bits are recorded for {machine()}: python -m tests.battery.record on code that is trusted"
        )
    assert bits[0] == recorded["bits"][machine()]
