"""Every preset and each of the six systems ends with the parameters, bytes and virtual times that it always had."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from farflung.recipes import RECIPES
from tests.battery.cases import CASES, DENSE
from tests.battery.process import Battery
from tests.battery.record import EXPECTED, same
from tests.covering import thorough

RECORDED: dict[str, Any] = json.loads(EXPECTED.read_text())
SIX = {
    "Mercury": "preset mercury",
    "RLNC-coded training": "coded",
    "Pipe-SGD": "preset pipe_sgd",
    "GradiVeQ": "gradiveq, around a ring",
    "delayed updates": "preset delayed",
    "ScaDLES": "preset scadles",
}


@pytest.fixture(scope="module")
def battery() -> Iterator[Battery]:
    """The process that all cases run in."""
    battery = Battery()
    yield battery
    battery.close()


def test_presets_and_systems_are_covered_and_recorded() -> None:
    assert RECORDED.keys() == {*CASES, DENSE}, "record them: python -m tests.battery.record"
    assert {f"preset {name}" for name in RECIPES} | set(SIX.values()) <= CASES.keys()


FIRST = [
    name
    for name in CASES
    if (name.startswith("preset") or name in SIX.values())
    and name not in ("preset mercury", "preset scadles_baseline")
]
"""Presets and systems, without two that take long."""


@pytest.mark.parametrize("name", [*FIRST, *thorough(*(name for name in CASES if name not in FIRST))])
def test_nothing_has_changed(battery: Battery, name: str) -> None:
    """Bits are compared where they are recorded for this version of torch; bytes and times everywhere."""
    found, recorded = battery.outcome(name), RECORDED[name]
    assert same(found, recorded), (found, recorded)
    for version, bits in found["bits"].items():
        assert bits == recorded["bits"].get(version, bits)


def test_parameters_after_three_dense_exchanges(battery: Battery) -> None:
    """Whatever the version of torch."""
    assert battery.outcome(DENSE)["parameters"] == pytest.approx(RECORDED[DENSE]["parameters"], abs=1e-5)
