"""What coding takes stands in a run's summary, and what of it is not known is said once, in one line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import farflung
from farflung.devices import CodingRates, DeviceProfile, Points

SMALL: dict[str, Any] = {"steps": 4, "batch_size": 4, "workers": 2, "evaluate_every": 2}
PLAIN: dict[tuple[str, str], Points] = {
    (operation, ""): ((1, 0.5),) for operation in ("add", "copy", "scale", "subtract")
}
INT8: dict[tuple[str, str], Points] = {
    (operation, "int8"): ((1, 2.0),) for operation in ("encode", "decode", "accumulate", "learn")
}


def device(*known: dict[tuple[str, str], Points]) -> DeviceProfile:
    return DeviceProfile(coding=CodingRates({key: points for each in known for key, points in each.items()}))


def test_what_is_known_is_charged_and_nothing_said(caplog: pytest.LogCaptureFixture) -> None:
    free = farflung.simulate("synthetic/quadratic", device=DeviceProfile(), codec="int8", **SMALL)
    assert "coding_s" not in free.summary
    run = farflung.simulate("synthetic/quadratic", device=device(PLAIN, INT8), codec="int8", **SMALL)
    coding = run.summary["coding_s"]
    assert isinstance(coding, float)
    assert coding > 4 * 2.0
    assert "coding_not_charged" not in run.summary
    assert "coding and messages" in str(run)
    assert caplog.records == []


def test_what_is_not_known_is_said(caplog: pytest.LogCaptureFixture) -> None:
    slow = device(PLAIN)
    run = farflung.simulate("synthetic/quadratic", device=slow, codec="topk(density=0.5)", **SMALL)
    assert run.summary["coding_not_charged"] == ["topk(density=0.5)"]
    assert "topk(density=0.5)" in str(run)
    (record,) = caplog.records
    assert record.getMessage() == (
        "coding of topk(density=0.5) is not charged on this device: calibrate with farflung calibrate "
        "--codecs 'topk(density=0.5)'"
    )
    caplog.clear()
    farflung.simulate("synthetic/quadratic", "powersgd", device=device(INT8), **SMALL)
    (record,) = caplog.records
    assert "plain sums" in record.getMessage()


def test_a_comparison_says_it_once(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    found = farflung.compare(
        ["synchronous", "synchronous(codec=int8)", "powersgd"],
        ["wifi-10mbps", "4g"],
        seeds=(0, 1),
        device=device(PLAIN),
        out=tmp_path,
        workload="synthetic/quadratic",
        **{name: value for name, value in SMALL.items() if name != "evaluate_every"},
    )
    said = [record.getMessage() for record in caplog.records]
    assert len([one for one in said if "--codecs 'int8'" in one]) == 1
    assert len(said) <= 2
    charged = [row for row in found.rows if row.coding_s]
    assert [row.recipe for row in charged] != []
    assert "coding" in str(found)
