"""A few steps without the model's arithmetic tell when those of a whole training end."""

from __future__ import annotations

import pytest

from farflung import simulate
from farflung.errors import Unsupported
from farflung.planning import time_recipe
from farflung.runs import SimulatedConfig
from farflung.schedules import SCHEDULES
from farflung.spec import build
from farflung.telemetry import read_number
from farflung.types import Bucket, Schedule, TensorSpec

STEPS = 97
SETTINGS = {"workload": "fashion-mnist/mlp", "workers": 2, "batch_size": 4, "evaluate_every": 0}


def build_config(recipe: str, steps: int = STEPS) -> SimulatedConfig:
    return SimulatedConfig.resolve({**SETTINGS, "recipe": recipe, "steps": steps})


@pytest.mark.parametrize(
    ("recipe", "network"),
    [
        ("synchronous(codec=truncate16)", "lan-1g"),
        ("powersgd(rank=2)", "four-regions"),
        ("local_sgd(sync_every=10)", "wifi-10mbps"),
        ("post_local_sgd(schedule=post_local_sgd(warmup=40, sync_every=5))", "four-regions"),
        ("diloco(sync_every=8, codec=error_feedback(qsgd(bits=4)))", "wifi-shared-100mbps"),
        ("delayed(delay=7, period=3)", "four-regions"),
        ("demo(optimizer=sign_sgd, learning_rate=0.001)", "wifi-10mbps"),
    ],
)
def test_pace_is_that_of_a_whole_training(recipe: str, network: str) -> None:
    (pace,), uncharged = time_recipe(build_config(recipe), [network])
    run = simulate(**{**SETTINGS, "recipe": recipe, "steps": STEPS, "network": network})  # type: ignore[arg-type]
    steps = [event for event in run.events[0] if event["event"] == "step"]
    assert pace.compute_seconds(STEPS) == pytest.approx(read_number(steps[-1], "t"), rel=0.005)
    assert 0 <= pace.waiting <= 1
    assert uncharged == run.summary.get("coding_not_charged", [])


def test_elastic_steps_are_simulated_on_each_network() -> None:
    config = SimulatedConfig.resolve({**SETTINGS, "recipe": "synchronous", "steps": STEPS, "elastic": "1"})
    paces, _ = time_recipe(config, ["lan-1g", "wifi-10mbps"])
    for pace, network in zip(paces, ("lan-1g", "wifi-10mbps"), strict=True):
        assert time_recipe(config, [network])[0] == [pace]


@pytest.mark.parametrize(
    "schedule",
    [
        "synchronous",
        "pipelined(width=3, warmup=4)",
        "local_sgd(sync_every=5)",
        "post_local_sgd(warmup=7, sync_every=4)",
        "diloco(sync_every=6, warmup=9)",
        "streaming_diloco(sync_every=8, fragments=4)",
        "delayed(delay=4, period=3, warmup=5)",
    ],
)
def test_transfers_repeat_after_a_period(schedule: str) -> None:
    built: Schedule = build("schedule", schedule, SCHEDULES)
    units = built.build_units([Bucket(index, TensorSpec((8,))) for index in range(4)])

    def list_transfers(step: int) -> list[tuple[int, int]]:
        transfers = built.plan(built.init(), units, step)
        return [(transfer.unit.index, transfer.merge_step - step) for transfer in transfers]

    steps = range(built.warmup_steps, built.warmup_steps + built.cycle_steps)
    pattern = [list_transfers(step) for step in steps]
    assert any(pattern)
    assert pattern == [list_transfers(step + built.cycle_steps) for step in steps]
    for period in range(1, built.cycle_steps):
        assert pattern != [list_transfers(step + period) for step in steps]


def test_bytes_are_those_of_a_whole_training() -> None:
    (pace,), _ = time_recipe(build_config("powersgd(rank=2)"), ["lan-1g"])
    run = simulate(**SETTINGS, recipe="powersgd(rank=2)", steps=STEPS)  # type: ignore[arg-type]
    assert pace.compute_nbytes(STEPS) == run.summary["bytes_sent_per_replica"]


def test_what_learns_by_time_is_refused() -> None:
    with pytest.raises(Unsupported, match="what it learns depends on the network"):
        time_recipe(build_config("delayed"), ["lan-1g"])
    with pytest.raises(Unsupported, match="it sends samples"):
        time_recipe(build_config("mercury"), ["lan-1g"])
