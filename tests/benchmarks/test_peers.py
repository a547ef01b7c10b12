"""Systems beside each other: which steps and times count, and what is tuned."""

from __future__ import annotations

import math
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn

from benchmarks.common.results import load_expected
from benchmarks.peers import run
from benchmarks.peers.paced import STEP_S, Paced
from benchmarks.peers.run import (
    BENCHMARK,
    LAN,
    LARGE_ROWS,
    NETWORKS,
    TIMED,
    TIMED_WHERE_SLOW,
    fastest,
    large,
    over,
    rows_of,
    spent,
    system_rows,
    timed,
)
from benchmarks.peers.trained import JUDGES, PILOT, RATES, TIMES, Learned, Timed, Trained, learned, steps_to
from benchmarks.peers.worker import (
    LARGE,
    LARGE_OURS,
    LONG,
    NO_EXCHANGE,
    OURS,
    PERIOD,
    REFERENCE,
    SYNCHRONOUS,
    SYSTEMS,
    batches,
    halves,
)
from benchmarks.sampling.training import Looks
from benchmarks.workloads.news import NewsgroupsGPT
from farflung.recipes import parse_recipe
from farflung.seeding import create_generator


def test_every_row_is_measured_by_one_group() -> None:
    rows = [row for group in BENCHMARK.groups for row in group.rows]
    assert sorted(rows) == sorted(row.name for row in load_expected(BENCHMARK.folder))


def test_what_steps_take_counts_their_start_apart() -> None:
    rounds = [{"until": 100, "sent": [200.0, each]} for each in (0.5, 1.0)]
    assert [spent(rounds, "sent", steps) for steps in (50, 100, 300)] == [
        [100.0, 100.0],
        [200.0, 200.0],
        [300.0, 400.0],
    ]
    assert TIMED % (2 * LONG) == TIMED_WHERE_SLOW % PERIOD == 0


@pytest.mark.parametrize("network", NETWORKS)
def test_a_system_has_all_its_rows(network: str, monkeypatch: pytest.MonkeyPatch) -> None:
    came = Learned(0.1, {"0.1": 64.0}, [64.0, 65.0], 63.0, [100, 200])
    found = [
        {"until": 10, "peak_mb": 300.0} | {key: [10.0, each] for key in ("seconds", "sent", "processor_s")}
        for each in (3.0, 2.0, 1.0)
    ]
    monkeypatch.setattr(run, "learned", lambda name: came)
    monkeypatch.setattr(run, "timed", lambda name, where: found)
    rows = system_rows(REFERENCE, network, quick=False)
    assert [*rows] == [*rows_of(REFERENCE, network)]
    first = rows[rows_of(REFERENCE, network)[0]]
    assert (first.ours, first.spread) == (290.0, (100.0, 580.0))


def test_systems_are_timed_in_rounds_where_the_network_is_fast(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = list[tuple[str, int]]()

    def once(name: str, network: str, number: int) -> dict[str, Any]:
        asked.append((name, number))
        return {"name": name, "round": number}

    monkeypatch.setattr(run, "timed_once", once)
    names = sorted(name for name, system in SYSTEMS.items() if system.installed)
    assert timed(REFERENCE, LAN) == [{"name": REFERENCE, "round": number} for number in range(3)]
    assert asked == [(name, number) for number in range(3) for name in names]
    asked.clear()
    timed(REFERENCE, "four-regions")
    assert asked == [(REFERENCE, 0)]


def test_what_one_takes_is_compared_within_rounds() -> None:
    measured = over("a", "b", {"a": [1.0, 2.0, 4.0], "b": [2.0, 2.0, 6.0]}, {})
    assert (measured.ours, measured.spread) == (1.5, (1.0, 2.0))


def test_the_fastest_is_one_that_comes_there() -> None:
    assert fastest(["a", "b", "c"], {"a": [], "b": [3.0], "c": [9.0, 2.0, 1.0], "d": [1.0]}) == "c"
    assert fastest(["a"], {"a": []}) is None


class Trainer:
    """Accuracies that rise to a height at one rate, and to less at others; notes what was trained."""

    def __init__(self, best: dict[str, tuple[float, float]]) -> None:
        self.best, self.asked = best, list[Trained]()

    def __call__(self, one: Trained) -> Looks:
        self.asked.append(one)
        rate, height = self.best[one.name]
        top = height - 5 * abs(math.log(one.rate / rate)) - one.seed
        return [[step, min(top, step / 10)] for step in range(50, one.steps + 1, 50)]


def test_rates_are_tuned_on_the_pilot_alone_and_a_missed_target_says_so() -> None:
    train = Trainer({REFERENCE: (0.1, 64.0), "torchft DiLoCo": (0.002, 66.0), "post-local SGD": (0.05, 60.0)})
    reference = learned(REFERENCE, train)
    assert (reference.rate, reference.bests, reference.target) == (0.1, [63.0, 62.0], 61.5)
    assert reference.there == 650  # the median of three looks
    ours = learned("torchft DiLoCo", train)
    assert (ours.rate, ours.target, ours.steps) == (0.002, 61.5, [650, 650])
    never = learned("post-local SGD", train)
    assert (never.rate, never.steps, never.there) == (0.05, [None, None], None)
    for name in ("torchft DiLoCo", "post-local SGD"):
        asked = [one for one in train.asked if one.name == name]
        assert [one.rate for one in asked if one.seed == PILOT] == [*RATES[SYSTEMS[name].optimizer]]
        assert [one.seed for one in asked if one.seed != PILOT] == [*JUDGES]
    assert learned(SYNCHRONOUS, train) == reference
    assert SYNCHRONOUS not in {one.name for one in train.asked}


def test_ranks_share_each_batch() -> None:
    ranks = [batches(10, 2, rank, 2, seed=3) for rank in range(2)]
    epoch = [sorted(int(one) for rank in ranks for one in next(rank)) for _ in range(2)]
    assert all(len(set(step)) == 4 for step in epoch)
    assert not set(epoch[0]) & set(epoch[1])


@pytest.mark.parametrize("sizes", [(1, 1, 8), (8, 1, 1), (3, 3, 3, 3)])
def test_fragments_are_about_equal(sizes: tuple[int, ...]) -> None:
    first, second = halves([nn.Linear(size, 1, bias=False) for size in sizes])
    assert [*first, *second]
    assert abs(sum(one.in_features for one in first) - sum(one.in_features for one in second)) <= 6  # type: ignore[misc]


def test_three_are_named() -> None:
    assert len(OURS) == 3


def test_a_paced_model_has_the_parameters_of_its_size_and_gradients_of_random_numbers() -> None:
    size = {"layers": 1, "heads": 1, "width": 8}
    model = Paced(**size).build_model(create_generator(0, "model"))
    real = NewsgroupsGPT(**size).build_model(create_generator(0, "model"))
    assert [one.shape for one in model.parameters()] == [one.shape for one in real.parameters()]
    reached = list[int]()
    for number, weight in enumerate(model.parameters()):
        weight.register_post_accumulate_grad_hook(lambda _, number=number: reached.append(number))
    batch = Paced(**size).load_datasets()[0].take(torch.arange(2), train=True)
    with patch("benchmarks.peers.paced.time") as clock:
        clock.monotonic.return_value = 0.0
        Paced(**size).compute_losses(model, batch).backward()
    assert reached == [*range(len(reached))][::-1]
    assert all(one.grad is not None and one.grad.norm() > 0 for one in model.parameters())
    moments = [call.args[0] for call in clock.sleep.call_args_list]
    assert len(moments) == len(reached) + 1
    assert moments == sorted(moments)
    assert (moments[0], moments[-1]) == (STEP_S / 3, STEP_S)


def test_steps_to_a_loss_are_interpolated_between_evaluations() -> None:
    curve = [[50, 3.0, 0], [100, 2.0, 0], [150, 1.5, 0]]
    assert [steps_to(curve, loss) for loss in (2.5, 1.75, 1.0)] == [75, 125, None]


def test_a_large_model_counts_the_exchange_alone_beside_a_device_s_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    each = dict.fromkeys(LARGE, 1.0) | {NO_EXCHANGE: 0.5, "torchft DiLoCo, 43 MB": 2.5}
    late = {"DDP, PowerSGD hook, 43 MB", "powersgd, rank 4, 43 MB"}

    def times(one: Timed) -> dict[str, Any]:
        return {"until": 10} | {key: [10 * each[one.name], each[one.name]] for key in ("seconds", "sent")}

    monkeypatch.setattr(TIMES, "curve", times)
    monkeypatch.setattr(
        run, "large_curve", lambda name: [[0, 3.0, 0], [1000, 2.5 if name in late else 2.0, 0]]
    )
    rows = large("wifi-10mbps", quick=False)
    torchft, hook = (rows[row] for row in LARGE_ROWS["wifi-10mbps"])
    assert torchft.ours == pytest.approx((0.25 + 2.0) / (0.25 + 0.5))
    assert hook.ours == pytest.approx(1000 / 950)
    assert hook.config["at_least"] == "not there in 1,000 steps: DDP, PowerSGD hook, 43 MB"
    assert "at_least" not in torchft.config
    assert hook.config["steps"]["torchft DiLoCo, 43 MB"] == pytest.approx(950)


def test_all_that_is_large_has_a_recipe_of_its_steps() -> None:
    for name, system in LARGE.items():
        if name != NO_EXCHANGE:
            parse_recipe(LARGE[system.steps_of or name].recipe).build_components(seed=0)
    assert len(LARGE_OURS) == 3
