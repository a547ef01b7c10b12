"""Evaluations and checkpoints are no part of training: they move neither its times nor its bits."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from farflung import TorchWorkload
from farflung.devices import DeviceProfile
from farflung.devices.stragglers import VaryingStraggler
from farflung.loop.evaluation import _cache_forward
from farflung.runs import Run, compare, simulate
from farflung.types import Json
from tests.covering import thorough

UNEVEN = DeviceProfile(forward_s=0.01, stragglers=(VaryingStraggler(spread=0.9),), name="uneven")
"""Replicas come to their evaluations at unlike times, and with late means at unlike steps."""
AT_ONCE = DeviceProfile(name="at once")
"""They compute in no time, so that much happens in one instant."""
OFTEN = {"evaluate_every": 1, "checkpoint_every": 2}
NETWORKS = ["4g", "wifi-shared-100mbps", "four-regions", "wifi-shared-100mbps"]
NEVER = {"evaluate_every": 0, "checkpoint_every": 0}
SCHEDULES = [
    "synchronous",
    "pipelined(width=2, predict=True)",
    "delayed(delay=3, period=2)",
    "delayed(delay=3, pull='swap')",
]


def quadratic(**settings: Any) -> Run:
    given = {"workers": 3, "steps": 8, "batch_size": 4, "device": UNEVEN, "network": "4g", **settings}
    return simulate("synthetic/quadratic", **given)


def told(run: Run, kind: str, *fields: str) -> list[list[Any]]:
    """These fields of all events of a kind, rank after rank."""
    events = run.files.load_events()
    return [
        [event[name] for name in fields]
        for rank in sorted(events)
        for event in events[rank]
        if event["event"] == kind
    ]


@pytest.mark.parametrize(("schedule", "network"), [*zip(SCHEDULES, NETWORKS, strict=True)])
def test_they_move_no_time(schedule: str, network: str) -> None:
    often, never = (quadratic(schedule=schedule, network=network, workers=4, **how) for how in (OFTEN, NEVER))
    assert told(often, "step", "step", "t", "duration_s") == told(never, "step", "step", "t", "duration_s")
    assert told(often, "end", "t", "duration_s", "time_s") == told(never, "end", "t", "duration_s", "time_s")
    assert len(told(often, "checkpoint", "step")) == 4 * 4
    assert {took for (took,) in told(often, "evaluation", "duration_s")} == {0.0}


def test_they_are_told_with_the_time_at_which_the_replica_came_to_them() -> None:
    run = quadratic(schedule="delayed(delay=3)", **OFTEN)
    steps = {(rank, step + 1): t for rank, step, t in told(run, "step", "rank", "step", "t")}
    before_the_last = [one for one in told(run, "evaluation", "rank", "step", "t") if one[1] < 8]
    assert before_the_last == [[rank, step, steps[rank, step]] for rank, step, _ in before_the_last]
    assert len(before_the_last) == 3 * 7


def test_counted_they_are_a_part_of_the_time() -> None:
    counted, off = (quadratic(count_evaluation=yes, **OFTEN) for yes in (True, False))
    for (split, took), (free, least) in zip(
        told(counted, "end", "time_s", "duration_s"), told(off, "end", "time_s", "duration_s"), strict=True
    ):
        assert sum(split.values()) == pytest.approx(took)
        assert took > least
        assert split["evaluation"] > 0 == free["evaluation"]
    parts = [told(counted, kind, "rank", "duration_s") for kind in ("evaluation", "checkpoint")]
    of_rank_0 = sum(took for part in parts for rank, took in part if rank == 0)
    assert of_rank_0 == pytest.approx(told(counted, "end", "time_s")[0][0]["evaluation"])


def test_the_winner_is_whoever_trains_faster() -> None:
    given: dict[str, Any] = {"workload": "synthetic/quadratic", "workers": 4, "steps": 12, "batch_size": 4}
    rows = {}
    for counted in (False, True):
        compared = compare(
            ("synchronous", "synchronous(schedule=delayed(delay=3, pull='swap'))"), ("4g",), evaluate_every=1,
            count_evaluation=counted, **given,
        )  # fmt: skip
        rows[counted] = [row.duration_s for row in compared.rows]
    assert rows[False][1] < rows[False][0] / 2
    assert rows[True][1] > rows[True][0]


# --- what they find ---------------------------------------------------------------------------------------------


class Noisy(nn.Module):
    """Running statistics, and noise even when it is evaluated."""

    def __init__(self) -> None:
        super().__init__()
        self.dense = nn.Linear(6, 5)
        self.statistics = nn.BatchNorm1d(5)
        self.head = nn.Linear(5, 2)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = torch.relu(self.statistics(self.dense(inputs)))
        found: Tensor = self.head(hidden + 0.1 * torch.randn_like(hidden))
        return found


def noisy() -> TorchWorkload:
    samples = torch.Generator().manual_seed(0)
    inputs = torch.randn(40, 6, generator=samples)
    data = torch.utils.data.TensorDataset(inputs, (inputs.sum(dim=1) > 0).long())
    defaults: dict[str, Json] = {"steps": 8, "batch_size": 4}
    return TorchWorkload(Noisy, data, data, nn.functional.cross_entropy, defaults=defaults)


@pytest.mark.parametrize("device", [UNEVEN, *thorough(AT_ONCE)], ids=lambda device: device.name)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_they_find_the_same_on_and_off_the_clock_and_move_no_bit(
    schedule: str, device: DeviceProfile
) -> None:
    def run(**how: Any) -> Run:
        return simulate(noisy(), schedule=schedule, workers=3, device=device, network="4g", seed=3, **how)

    on, off, never = run(count_evaluation=True, **OFTEN), run(**OFTEN), run(**NEVER)
    scores = [sorted(told(one, "evaluation", "rank", "step", "accuracy", "loss")) for one in (on, off)]
    assert scores[0] == scores[1]
    assert len(scores[0]) >= 3 * 8
    final = told(never, "end", "final_loss")
    assert final == told(off, "end", "final_loss") == told(on, "end", "final_loss")
    for name, value in never.state_dict().items():
        assert torch.equal(value, off.state_dict()[name]), name


def test_what_fails_in_one_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> Tensor:
        raise ArithmeticError("no metric")

    monkeypatch.setattr("farflung.workloads.synthetic.Quadratic.compute_metrics", fails)
    with pytest.raises(ArithmeticError, match="no metric"):
        quadratic(**OFTEN)


def test_a_checkpoint_is_of_the_step_at_which_it_was_due(tmp_path: Path) -> None:
    settings: dict[str, Any] = {
        "schedule": "delayed(delay=3)", "checkpoint_every": 5, "evaluate_every": 1, "device": "raspberry-pi-4"
    }  # fmt: skip
    whole = quadratic(**settings)
    quadratic(**{**settings, "steps": 5}, out=tmp_path / "half")
    resumed = simulate(resume=tmp_path / "half", steps=8)
    for name, value in whole.state_dict().items():
        assert torch.equal(value, resumed.state_dict()[name])


def test_loss_and_metric_share_one_forward_pass() -> None:
    passes = 0

    class Counts(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            nonlocal passes
            passes += not torch.is_grad_enabled()
            return super().forward(input)

    inputs = torch.randn(40, 6, generator=torch.Generator().manual_seed(0))
    data = torch.utils.data.TensorDataset(inputs, (inputs.sum(dim=1) > 0).long())
    made = partial(Counts, 6, 2)
    workload = TorchWorkload(made, data, data, nn.functional.cross_entropy, defaults={"batch_size": 4})
    run = simulate(workload, workers=2, steps=2, device=AT_ONCE, evaluate_every=1)
    assert passes == 2 * len(told(run, "evaluation", "step"))


@pytest.mark.parametrize(
    "made", [lambda: torch.jit.trace(nn.Linear(3, 2), torch.ones(1, 3)), partial(nn.Linear, 3, 2)]
)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_model_is_afterwards_as_it_was(made: Any) -> None:
    model, inputs = made(), torch.ones(1, 3)
    before, own = model(inputs), dict(vars(model))
    with _cache_forward(model):
        assert model(inputs) is model(inputs)
        assert torch.equal(model(inputs), before)
    assert vars(model) == own
    assert torch.equal(model(2 * inputs), model.forward(2 * inputs))
