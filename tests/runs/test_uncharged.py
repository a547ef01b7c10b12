"""What coding takes stands in a run's summary, and what of it is not known is said once, in one line.

So are exchanges that take long to simulate because of it, beforehand.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from typing_extensions import override

import farflung
from farflung.calibration import build_coding_tasks, measure_coding
from farflung.codecs import Int8, error_feedback
from farflung.comm import COLLECTIVES
from farflung.devices import CodingRates, DeviceProfile, Points
from farflung.reducers.aggregation import CodecExchange
from farflung.reducers.base import build_result, pack_metadata
from farflung.sim import VirtualNetwork
from farflung.tasks import Pending
from farflung.types import (
    Channel,
    CodecState,
    Contribution,
    Reducer,
    ReduceResult,
    Seeds,
    StateSlot,
    TensorSpec,
)

SMALL: dict[str, Any] = {"steps": 4, "batch_size": 4, "workers": 2, "evaluate_every": 2}
PLAIN: dict[tuple[str, str], Points] = {
    (operation, ""): ((1, 0.5),) for operation in ("add", "copy", "scale", "subtract")
}
INT8: dict[tuple[str, str], Points] = {
    (operation, "int8"): ((1, 2.0),) for operation in ("encode", "decode", "accumulate", "learn")
}


@pytest.fixture(autouse=True)
def nothing_was_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("farflung.runs.simulation.WARNED_UNCHARGED", set())


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


@dataclass(frozen=True)
class Signs(Reducer):
    """Charges under a name of its own."""

    collective: str = "direct"

    @override
    def init(self, spec: TensorSpec, seeds: Seeds) -> CodecState:
        return CodecState()

    @override
    async def reduce(
        self, channel: Channel, slot: StateSlot, contribution: Contribution, *, step: int
    ) -> ReduceResult:
        channel.charge("encode", contribution.tensor.numel(), "all signs")
        signs = contribution.tensor.sign()
        total, side = await CodecExchange(channel, self.collective, pack_metadata(contribution), step).sum(
            signs
        )
        return build_result(channel, total, side)


@dataclass(frozen=True)
class Own(Int8):
    """A codec that no registry has."""


def test_what_is_said_of_parts_of_ones_own_can_be_done(caplog: pytest.LogCaptureFixture) -> None:
    """The command that is named measures what was not charged."""
    options = {"--reducers": "reducers", "--codecs": "codecs"}
    recipes = [
        farflung.Recipe(reducer=Signs()),
        farflung.Recipe(codec=Own()),
        farflung.Recipe(codec=error_feedback(Own())),
    ]
    for recipe in recipes:
        caplog.clear()
        run = farflung.simulate("synthetic/quadratic", recipe, device=device(PLAIN), **SMALL)
        (record,) = caplog.records
        option, *texts = shlex.split(record.getMessage().partition("farflung calibrate ")[2])
        points = measure_coding(build_coding_tasks(**{options[option]: texts}), [TensorSpec((64,))], rounds=1)
        uncharged = run.summary["coding_not_charged"]
        assert isinstance(uncharged, list)
        assert {*uncharged} <= {method for _, method in points}
        farflung.retime(run)
        assert len(caplog.records) == 1, "a process says it once"


def test_what_cannot_be_imported_cannot_be_measured(caplog: pytest.LogCaptureFixture) -> None:
    @dataclass(frozen=True)
    class Inner(Signs):
        pass

    recipe = farflung.Recipe(reducer=Inner())
    farflung.simulate("synthetic/quadratic", recipe, device=device(PLAIN), **SMALL)
    (record,) = caplog.records
    assert record.getMessage() == (
        "coding of all signs is not charged on this device: farflung calibrate measures only what can be imported, "
        "as module:name"
    )


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


@pytest.mark.parametrize("collective", [name for name, one in COLLECTIVES.items() if one.count_messages])
def test_exchanges_that_take_long_to_simulate_are_said_before(
    collective: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    carried: list[Any] = []
    monkeypatch.setattr("farflung.runs.simulation.MESSAGE_COST_S", 10.0)
    monkeypatch.setattr("farflung.sim.VirtualNetwork.send", counted(VirtualNetwork.send, carried))
    settings: dict[str, Any] = {"collective": collective, "workers": 5, "steps": 1, "evaluate_every": 0}
    run = farflung.simulate("synthetic/quadratic", device=device(PLAIN), **settings)
    says = (
        f"an exchange of 5 replicas by {collective} has about {len(carried)} messages, which are simulated one by "
        f"one: each will take about {timedelta(seconds=10 * len(carried))}"
    )
    farflung.retime(run)
    assert [record.getMessage() for record in caplog.records] == [says, says]


def counted(carry: Callable[..., Pending[None]], calls: list[Any]) -> Callable[..., Pending[None]]:
    def counting(*message: Any) -> Pending[None]:
        calls.append(message)
        return carry(*message)

    return counting
