"""Top-k where it keeps enough of the gradient."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import farflung
from farflung.engine.reducer_states import ReducerStates
from farflung.errors import ConfigError
from farflung.reducers import AdaptiveTopK
from farflung.seeding import create_generator
from farflung.types import CodecState, TensorSpec
from tests.reducers.replicas import SPEC, Replica, assert_alike, gradient, run

KEPT = 26
"""Entries of a tenth of :data:`SPEC`."""


def peaked(rank: int, step: int) -> Tensor:
    """A gradient whose largest tenth has nearly all of it."""
    found = 1e-3 * torch.randn(SPEC.numel, generator=create_generator(41, rank, step))
    found[:KEPT] += 1.0
    return found


def ways(replica: Replica) -> list[bool]:
    """Whether each exchange was compressed, by its bytes."""
    return [nbytes < max(replica.nbytes) / 2 for nbytes in replica.nbytes]


def test_what_its_largest_entries_hold_is_sent_by_them() -> None:
    replicas = run(AdaptiveTopK(smoothing=1.0), 2, 4, make=peaked)
    assert_alike(replicas)
    assert ways(replicas[0]) == [False, True, True, True]


def test_what_they_do_not_hold_is_sent_whole() -> None:
    (one, _) = run(AdaptiveTopK(smoothing=1.0), 2, 4)
    assert not any(ways(one))
    assert 0.3 < one.slot.state.shared["left_out"] < 0.9


def test_an_exact_decision_is_by_the_step_itself() -> None:
    def sometimes(rank: int, step: int) -> Tensor:
        return peaked(rank, step) if step in (0, 3) else gradient(rank, step)

    exact = run(AdaptiveTopK(smoothing=1.0, decide="exact"), 2, 5, make=sometimes)[0]
    late = run(AdaptiveTopK(smoothing=1.0), 2, 5, make=sometimes)[0]
    assert ways(exact) == [True, False, False, True, False]
    assert ways(late) == [False, True, False, False, True]


def test_shares_are_averaged() -> None:
    def share(own: list[Tensor]) -> float:
        whole = sum(float(one.double().square().sum()) for one in own)
        largest = sum(float(one.double().abs().sort().values[-KEPT:].square().sum()) for one in own)
        return 1.0 - largest / whole

    steps = [[weight * gradient(rank, step) for rank, weight in enumerate((1.0, 0.5))] for step in range(3)]
    expected = share(steps[0])
    for own in steps[1:]:
        expected += 0.2 * (share(own) - expected)
    replicas = run(AdaptiveTopK(smoothing=0.2, threshold=0.0), 2, 3)
    assert replicas[0].slot.state.shared["left_out"] == pytest.approx(expected)


def test_buckets_decide_together_or_each_for_itself() -> None:
    """One has little to leave out and one much, so that the whole is in between."""
    sums = {0: [100.0, 99.0], 1: [100.0, 21.0]}
    decided = {}
    for decide in ("last", "bucket"):
        reducer = AdaptiveTopK(smoothing=1.0, threshold=0.5, decide=decide)
        slots = ReducerStates(reducer, {0: SPEC, 1: SPEC}, 0, 0)
        states = {
            number: reducer._update_state(slots[number].state, is_compressed=False, sums=numbers)
            for number, numbers in sums.items()
        }
        together = reducer._update_all_states(states) if decide == "last" else states
        decided[decide] = [state.shared["compress"] for state in together.values()]
    assert decided == {"last": [True, True], "bucket": [True, False]}


@pytest.mark.parametrize("sums", [[0.0, 0.0], [float("nan"), 1.0], [float("inf"), 1.0]])
def test_what_is_zero_or_not_finite_teaches_nothing(sums: list[float]) -> None:
    reducer = AdaptiveTopK(decide="bucket")
    before = CodecState({"left_out": 0.2, "compress": True, "steps": 3, "compressed": 2}, {})
    after = reducer._update_state(before, is_compressed=True, sums=sums)
    assert (after.shared["left_out"], after.shared["compress"]) == (0.2, True)
    assert (after.shared["steps"], after.shared["compressed"]) == (4, 3)


@pytest.mark.parametrize("options", [{"decide": "exact"}, {"rule": "released"}])
def test_a_decision_on_the_whole_gradient_needs_one_bucket(options: dict[str, Any]) -> None:
    specs = [TensorSpec((10,)), TensorSpec((20,))]
    AdaptiveTopK(**options).check(specs[:1])
    AdaptiveTopK().check(specs)
    with pytest.raises(ConfigError, match="one bucket, and there are 2"):
        AdaptiveTopK(**options).check(specs)


def test_a_summary_has_the_share_of_compressed_steps_and_a_resumed_run_counts_all(tmp_path: Path) -> None:
    """The first step of all is dense, whatever the threshold."""
    recipe = farflung.Recipe(reducer=AdaptiveTopK(threshold=1.0))
    whole = farflung.simulate("synthetic/quadratic", recipe, steps=4, batch_size=4, out=tmp_path / "run")
    assert whole.summary["reducer"] == {"cnc": 3 / 4}
    again = farflung.simulate("synthetic/quadratic", resume=tmp_path / "run", steps=8)
    assert again.summary["reducer"] == {"cnc": 7 / 8}
    plain = farflung.simulate("synthetic/quadratic", steps=2, batch_size=4)
    assert "reducer" not in plain.summary
