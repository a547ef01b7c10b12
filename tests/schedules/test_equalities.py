"""Which schedules come to the same parameters, and which do not."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.helpers import same_bits
from tests.schedules.runs import Run, distance

SGD: dict[str, dict[str, Any]] = {
    "sgd": {},
    "momentum": {"momentum": 0.9, "learning_rate": 0.02},
    "decay": {"momentum": 0.9, "weight_decay": 0.01, "learning_rate": 0.02},
}
ADAM: dict[str, Any] = {"optimizer": "adam", "learning_rate": 0.01}


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("codec", ["identity", "int8", "error_feedback(topk(density=0.2))"])
def test_width_1_is_synchronous_bit_for_bit(size: int, codec: str) -> None:
    one = Run("pipelined(width=1)", size, {"codec": codec}).whole()
    other = Run("synchronous", size, {"codec": codec}).whole()
    for rank in range(size):
        assert same_bits(one.weights(rank), other.weights(rank))


def test_a_warm_up_is_synchronous_bit_for_bit() -> None:
    one = Run("pipelined(width=3, warmup=12)").steps(12)
    assert same_bits(one.weights(), Run("synchronous").steps(12).weights())
    assert len(one.replicas[0].engine.flights) == 0
    one.steps(2)
    assert same_bits(one.weights(), Run("synchronous").steps(12).weights()), "nothing is due for two steps"
    assert not same_bits(one.steps(1).weights(), Run("synchronous").steps(12).weights())


@pytest.mark.parametrize("pull", ["auto", "swap"])
@pytest.mark.parametrize("settings", SGD.values(), ids=SGD)
def test_a_warm_up_before_delays_is_synchronous(pull: str, settings: dict[str, Any]) -> None:
    one = Run(f"delayed(4, 3, pull='{pull}', warmup=13)", 3, settings=settings).steps(13)
    other = Run("synchronous", 3, settings=settings).steps(13)
    for rank in range(3):
        assert distance(one.weights(rank), other.weights(rank)) < 1e-6
    one.steps(2)
    assert len(one.replicas[0].engine.flights) > 0
    assert distance(one.weights(0), one.weights(1)) > 1e-3


@pytest.mark.parametrize("settings", [*SGD.values(), ADAM], ids=[*SGD, "adam"])
@pytest.mark.parametrize("period", [1, 4])
def test_without_a_delay_a_pull_is_a_swap_bit_for_bit(period: int, settings: dict[str, Any]) -> None:
    """With a block that is unfinished at the end too."""
    one, other = (
        Run(f"delayed(0, {period}, pull='{pull}')", 3, settings={**settings, "steps": 22}).whole()
        for pull in ("auto", "swap")
    )
    for rank in range(3):
        assert same_bits(one.weights(rank), other.weights(rank))


@pytest.mark.parametrize("settings", SGD.values(), ids=SGD)
@pytest.mark.parametrize("size", [2, 3])
def test_no_delay_is_synchronous_within_rounding(settings: dict[str, Any], size: int) -> None:
    one = Run("delayed(delay=0)", size, settings={**settings, "steps": 40}).whole()
    other = Run("synchronous", size, settings={**settings, "steps": 40}).whole()
    assert distance(one.weights(), other.weights()) < 1e-6
    for rank in range(size):
        assert same_bits(one.weights(rank), one.weights())


def test_no_delay_is_not_synchronous_with_adam() -> None:
    """The mean of the updates is not the update of the mean."""
    one = Run("delayed(delay=0)", settings=ADAM).whole()
    other = Run("synchronous", settings=ADAM).whole()
    assert distance(one.weights(), other.weights()) > 1e-3
    alone = Run("delayed(delay=0)", 1, settings=ADAM).whole()
    assert distance(alone.weights(), Run("synchronous", 1, settings=ADAM).whole().weights()) < 1e-6


@pytest.mark.parametrize("settings", [*SGD.values(), ADAM], ids=[*SGD, "adam"])
@pytest.mark.parametrize(("delay", "period"), [(0, 1), (1, 1), (5, 1), (2, 5), (5, 5), (7, 5), (30, 3)])
def test_with_the_same_batches_everywhere_any_delay_is_one_worker(
    delay: int, period: int, settings: dict[str, Any]
) -> None:
    one = Run(f"delayed({delay}, {period}, pull='swap')", 2, alike=True, settings=settings).whole()
    alone = Run("synchronous", 1, alike=True, settings=settings).whole()
    assert distance(one.weights(), alone.weights()) < 1e-6
    assert same_bits(one.weights(0), one.weights(1))


@pytest.mark.parametrize("settings", SGD.values(), ids=SGD)
@pytest.mark.parametrize("width", [2, 4])
def test_what_is_predicted_alone_is_what_comes(width: int, settings: dict[str, Any]) -> None:
    """A replica's own gradients are the means where it is alone: the delay is gone."""
    one = Run(f"pipelined({width}, predict=True)", 1, settings=settings).whole()
    other = Run("synchronous", 1, settings=settings).whole()
    assert distance(one.weights(), other.weights()) < 1e-6
    plain = Run(f"pipelined({width}, predict=False)", 1, settings=settings).whole()
    assert distance(plain.weights(), other.weights()) > 1e-3


@pytest.mark.parametrize(
    ("width", "settings", "predict"),
    [(2, {}, True), (2, {"optimizer": "adam"}, False), (3, {}, False)],
    ids=str,
)
def test_weights_are_predicted_by_default_at_width_2_with_sgd(
    width: int, settings: dict[str, Any], predict: bool
) -> None:
    one = Run(f"pipelined({width})", 2, settings=settings).steps(6)
    other = Run(f"pipelined({width}, predict={predict})", 2, settings=settings).steps(6)
    assert same_bits(one.weights(), other.weights())


def test_pipelined_applies_gradients_in_order_and_late() -> None:
    """By hand: with a batch of everything, the gradient of a quadratic is known."""
    run = Run("pipelined(3)", 2, alike=True, settings={"batch_size": 64})
    work = run.replicas[0].workload
    a, centre = work.compute_curvature(), work.draw_centres()[0].mean(dim=0)  # type: ignore[attr-defined]
    w, missing = [run.weights()], []
    for step in range(10):
        missing.append(a * (w[-1] - centre))
        w.append(w[-1] - 0.05 * missing.pop(0) if step >= 2 else w[-1])
    run.steps(10)
    assert distance(run.weights(), w[-1]) < 1e-5
    for gradient in missing:
        w.append(w[-1] - 0.05 * gradient)
    run.flush()
    assert distance(run.weights(), w[-1]) < 1e-5


def test_a_correction_is_by_the_equation() -> None:
    run = Run("pipelined(2, correction=0.5)", 2, alike=True, settings={"batch_size": 64})
    work = run.replicas[0].workload
    a, centre = work.compute_curvature(), work.draw_centres()[0].mean(dim=0)  # type: ignore[attr-defined]
    w = [run.weights()]
    for step in range(8):
        if step == 0:
            w.append(w[0])
            continue
        g = a * (w[step - 1] - centre)
        w.append(w[step] - 0.05 * (g + 0.5 * g * g * (w[step] - w[step - 1])))
    assert distance(run.steps(8).weights(), w[-1]) < 1e-5
    plain = Run("pipelined(2)", 2, alike=True, settings={"batch_size": 64}).steps(8)
    assert distance(plain.weights(), w[-1]) > 1e-4


@pytest.mark.parametrize(
    "schedule",
    [
        "pipelined(4)",
        "delayed(5, pull='swap')",
        "delayed(5, 3, pull='swap')",
        "delayed(5)",
        "delayed(5, 3)",
        "delayed(5, 3, warmup=7)",
        "delayed('auto')",
        "delayed('auto', pull='swap')",
    ],
)
@pytest.mark.parametrize("size", [2, 3])
def test_all_end_alike(schedule: str, size: int) -> None:
    run = Run(schedule, size, settings={"momentum": 0.9}).whole()
    for rank in range(size):
        assert same_bits(run.weights(rank), run.weights())
    assert torch.isfinite(run.weights()).all()
