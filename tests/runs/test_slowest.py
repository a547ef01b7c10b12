"""Which replica the others wait for, and what for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import farflung
from farflung.devices import DeviceProfile
from farflung.faults import FaultPlan
from farflung.runs.bottleneck import find_bottleneck
from farflung.telemetry import Event
from tests.covering import thorough

DEVICE = DeviceProfile("even", 1e-3)
SLOW = FaultPlan().slow(2, factor=3.0, at_s=0.0)


def told(*times: tuple[float, float, float]) -> dict[int, list[Event]]:
    """Steps of replicas that compute, wait for samples and wait for exchanges so long."""
    return {
        rank: [
            {"event": "begin", "rank": rank},
            {"event": "step", "rank": rank, "compute_s": compute, "data_s": data, "exposed_s": exposed,
             "duration_s": compute + data + exposed},
        ]
        for rank, (compute, data, exposed) in enumerate(times)
    }  # fmt: skip


@pytest.mark.parametrize(
    ("times", "found"),
    [
        (
            [(1.0, 0.0, 3.0), (3.5, 0.0, 0.5), (1.5, 0.0, 2.5)],
            {"reason": "compute", "rank": 1, "share": 0.5625},
        ),
        ([(1.0, 2.0, 1.0), (1.0, 0.0, 3.0), (1.0, 0.0, 3.0)], {"reason": "data", "rank": 0, "share": 0.5}),
        ([(1.0, 0.0, 3.0), (1.5, 0.0, 2.5)], {"reason": "link", "share": 0.625}),
        ([(9.0, 0.0, 1.0), (9.1, 0.0, 0.9)], None),
        ([(1.0, 0.0, 3.0)], None),
        ([], None),
    ],
)
def test_by_mean_times(times: list[tuple[float, float, float]], found: dict[str, Any] | None) -> None:
    assert find_bottleneck(told(*times)) == found


@pytest.mark.parametrize(
    ("settings", "rank", "reason"),
    [
        ({"network": "lan-1g", "faults": SLOW}, 2, "compute"),
        *thorough(({"network": "lan-1g", "faults": SLOW, "batch_size": "auto", "steps": 400}, None, None)),
        ({"network": "4g"}, None, "link"),
        ({"network": "lan-1g", "stream": "rate([400, 100, 400])", "steps": 30}, 1, "data"),
    ],
)
def test_of_simulated_runs(settings: dict[str, Any], rank: int | None, reason: str | None) -> None:
    both: dict[str, Any] = {"steps": 10, "workers": 3, "device": DEVICE}
    run = farflung.simulate("synthetic/quadratic", **{**both, **settings})
    found: Any = run.summary.get("bottleneck", {})
    assert (found.get("rank"), found.get("reason")) == (rank, reason)
    assert json.loads(run.files.summary_path.read_text()).get("bottleneck", {}) == found
    assert ("bottleneck" in str(run)) == bool(found)


@pytest.mark.thorough
def test_of_a_real_run_whose_batches_then_follow(tmp_path: Path) -> None:
    """One of two computes no faster than a device that takes thrice as long."""
    pace = tmp_path / "pace.toml"
    pace.write_text(
        "forward_s = 2e-4\n[[scheduled]]\nbegin_s = 0\nend_s = 1e6\nfactor = 3\nranks = [1]\n",
        encoding="utf-8",
    )
    both: dict[str, Any] = {"workers": 2, "steps": 33, "pace": str(pace)}
    run = farflung.train("synthetic/quadratic", out=tmp_path / "even", **both)
    found: Any = json.loads(run.files.summary_path.read_text())["bottleneck"]
    assert (found["rank"], found["reason"]) == (1, "compute")
    assert run.summary["bottleneck"] == found
    shared = farflung.train("synthetic/quadratic", batch_size="auto", out=tmp_path / "shared", **both)
    counts: Any = next(
        decision.value for decision in shared.files.load_decisions() if decision.name == "shares"
    )
    assert sum(counts) == 64
    assert counts[0] > 1.5 * counts[1]
