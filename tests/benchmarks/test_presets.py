"""The recipes on language: how they are tuned and judged, when their steps end, and an optimizer of two."""

from __future__ import annotations

import math
from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from benchmarks.presets.courses import JUDGED, PILOT, STEPS, Course, course_of, first_within, gap
from benchmarks.presets.language import Curve, Language
from benchmarks.presets.methods import METHODS, REFERENCE
from benchmarks.presets.muon import MuonAdamW, MuonAdamWSettings
from benchmarks.presets.times import Pace, Paces, _phases, _simulated
from farflung import simulate
from farflung.recipes import parse_recipe
from farflung.telemetry import Event
from farflung.workloads import create_workload
from farflung.workloads.shakespeare import GPT
from tests.covering import thorough

SMALL = Language("synchronous", 0.001, steps=60, workload="synthetic/quadratic")


def course(*curves: Curve) -> Course:
    return Course("any", METHODS[REFERENCE][0], [], curves)


# --- tuned and judged -----------------------------------------------------------------------------------------------


def best_at(rate: float) -> tuple[Callable[[Language], Curve], list[Language]]:
    """Losses that rise with the distance from a rate, and what was asked for."""
    asked: list[Language] = []

    def train(one: Language) -> Curve:
        asked.append(one)
        return [(one.steps, 1.0 + abs(math.log(one.learning_rate / rate)), 1)]

    return train, asked


def test_a_method_is_tuned_at_half_the_length_and_judged_on_other_seeds() -> None:
    train, asked = best_at(0.004)
    found = course_of("powersgd", train=train)
    assert found.setting.learning_rate == 0.004
    assert len({len(grid) for grid in METHODS.values()}) == 1
    assert [(one.learning_rate, one.steps, one.seed) for one in asked] == [
        *((setting.learning_rate, STEPS // 2, PILOT) for setting in METHODS["powersgd"]),
        *((0.004, STEPS, seed) for seed in JUDGED),
    ]


def test_how_far_above_and_when_near() -> None:
    reference = course([(1, 3.0, 10), (2, 2.0, 20)], [(1, 3.0, 10), (2, 2.2, 20)])
    other = course([(1, 2.5, 5), (2, 2.1, 9)], [(1, 2.1, 5), (2, 2.2, 9)])
    assert gap(other, reference) == pytest.approx([0.1, 0.0])
    assert first_within(other, 2.3) == (1, 5)
    assert first_within(other, 2.2) == (2, 9)
    assert first_within(other, 2.0) is None


# --- times ----------------------------------------------------------------------------------------------------------


def test_steps_that_were_not_simulated_take_as_long_as_the_last_blocks() -> None:
    pace = Pace(
        [5.0, 6.0, 7.0, 10.0, 11.0, 14.0, 15.0], window=4, repeats_from=2, steps=100, flush_s=3.0, sent=8
    )
    assert [pace.end_s(step) for step in (0, 1, 7, 8, 9, 10, 11, 12)] == [0, 5, 15, 18, 19, 22, 23, 26]
    whole = Paces([pace, replace(pace, steps=10)], [])
    assert whole.end_s(100) == pace.end_s(100)
    assert whole.end_s(109) == pace.end_s(100) + pace.end_s(9)
    assert whole.end_s(110) == pace.end_s(100) + pace.end_s(10) + 3.0
    assert whole.sent_a_step == 2


@pytest.mark.parametrize(
    "name", ["synchronous", *thorough("pipe_sgd", "dga", "local_sgd", "diloco", "streaming_diloco")]
)
def test_simulating_some_steps_tells_when_all_would_end(name: str) -> None:
    steps, task = 230, create_workload("synthetic/quadratic")
    pace = Pace(**_simulated(task, "four-regions", parse_recipe(name).settings, steps)["pace"])
    assert len(pace.ends_s) < steps
    told: dict[str, Any] = {"network": "four-regions", "workers": 4, "device": "cpu-core"}
    run = simulate(task, name, steps=steps, evaluate_every=0, checkpoint_every=0, **told)
    told_by = [dict[str, Any](event) for event in run.events[0] if event["event"] == "step"]
    for step in (50, 200, 230):
        assert pace.end_s(step) == pytest.approx(told_by[step - 1]["t"], rel=0.01)


def test_what_changes_on_its_way_is_timed_in_two_parts() -> None:
    (first, until), (later, rest) = _phases(parse_recipe("post_local_sgd"), 2000)
    assert (first["schedule"], until) == ("synchronous", 1000)
    assert (later["schedule"], rest) == ("local_sgd(sync_every=16)", 1000)
    assert [steps for _, steps in _phases(parse_recipe("post_local_sgd"), 50)] == [50]
    (_, warmup), (grown, rest) = _phases(
        parse_recipe("diloco").with_components(schedule="diloco(sync_every=50, warmup=100)"), 2000
    )
    assert (warmup, rest, grown["schedule"]) == (100, 1900, "diloco(sync_every=50)")
    (_, dense), (low_rank, rest) = _phases(parse_recipe("powersgd"), 2000)
    assert (dense, rest, low_rank["reducer"]) == (200, 1800, "powersgd(dense_steps=0)")


# --- trainings ------------------------------------------------------------------------------------------------------


def test_a_training_counts_bytes_and_goes_on_where_it_was_cut_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("benchmarks.presets.language.RESULTS", tmp_path)
    whole = SMALL.train()
    assert [steps for steps, *_ in whole] == list(range(3, 61, 3))
    assert whole[-1][2] == 2 * whole[9][2] > 0
    assert not list((tmp_path / "parts").iterdir())
    seen: list[Event] = []

    def cut_off(*args: Any, **settings: Any) -> None:
        simulate(*args, should_stop=lambda: len(seen) >= 30, sink=seen.append, **settings)
        raise KeyboardInterrupt

    monkeypatch.setattr("benchmarks.presets.language.simulate", cut_off)
    with pytest.raises(KeyboardInterrupt):
        SMALL.train()
    monkeypatch.setattr("benchmarks.presets.language.simulate", simulate)
    assert SMALL.train()[-1] == whole[-1]


def test_muon_takes_hidden_matrices_and_goes_on_from_its_state() -> None:
    task = GPT(length=4, layers=1, heads=2, width=16)
    settings = MuonAdamWSettings(width=16, symbols=task.symbols)

    def made() -> tuple[torch.nn.Module, MuonAdamW]:
        model = task.build_model(torch.Generator().manual_seed(0))
        parameters = list(model.parameters())
        return model, settings.make(parameters, learning_rate=0.01, momentum=0.0, weight_decay=0.1)

    def train(model: torch.nn.Module, optimizer: MuonAdamW, steps: int) -> list[float]:
        losses = []
        symbols = torch.arange(32).view(8, 4)
        for _ in range(steps):
            loss = F.cross_entropy(model(symbols).transpose(1, 2), symbols)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return losses

    model, optimizer = made()
    matrices, others = (group["params"] for group in optimizer.param_groups)
    assert sorted(tuple(one.shape) for one in matrices) == [(16, 16), (16, 64), (48, 16), (64, 16)]
    assert len(others) == len(list(model.parameters())) - 4
    train(model, optimizer, 3)
    again, resumed = made()
    again.load_state_dict(model.state_dict())
    resumed.load_state_dict(deepcopy(optimizer.state_dict()))
    assert train(again, resumed, 3) == train(model, optimizer, 3)
