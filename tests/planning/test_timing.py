"""A few steps without the model's arithmetic tell when those of a whole training end."""

from __future__ import annotations

import pytest

from farflung import simulate
from farflung.errors import Unsupported
from farflung.planning import time_recipe
from farflung.runs import SimulatedConfig
from farflung.telemetry import read_number

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


def test_bytes_are_those_of_a_whole_training() -> None:
    (pace,), _ = time_recipe(build_config("powersgd(rank=2)"), ["lan-1g"])
    run = simulate(**SETTINGS, recipe="powersgd(rank=2)", steps=STEPS)  # type: ignore[arg-type]
    assert pace.compute_nbytes(STEPS) == run.summary["bytes_sent_per_replica"]


def test_what_learns_by_time_is_refused() -> None:
    with pytest.raises(Unsupported, match="what it learns depends on the network"):
        time_recipe(build_config("delayed"), ["lan-1g"])
    with pytest.raises(Unsupported, match="it sends samples"):
        time_recipe(build_config("mercury"), ["lan-1g"])
