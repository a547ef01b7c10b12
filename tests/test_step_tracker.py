"""Loops that take several passes for a step, none, or step by other means: right, or one line that says what to do."""

from __future__ import annotations

import contextlib
import warnings
from typing import Any

import pytest
import torch
from torch import nn

import farflung
from tests import own_loops
from tests.pool import Pool

PIPELINED = "pipelined(2)"
LOCAL = [
    "delayed(2)",
    "delayed(2, pull='swap')",
    "local_sgd(2)",
    "post_local_sgd(3, 2)",
    "diloco(3)",
    "streaming_diloco(3, fragments=1, delay=1)",
]
STEP_BY_HAND = "SGD, which attach() was given, takes no step, while parameters change"
NOT_LAST = "AdamW steps after SGD, which attach() was given, on other parameters of the model"
BROKE_OFF = "the backward pass of step 2 broke off on rank 0"
IN_BACKWARD = dict.fromkeys(("in_backward", "by_hand_in_backward"), "Step after backward()")
REFUSED = {
    PIPELINED: {
        "two_losses": "a second backward pass before the step of SGD",
        "micro_batches": "a second backward pass before the step of SGD",
        "discarded_passes": "a second backward pass before the step of SGD",
        "by_hand": "a second backward pass before the step of SGD",
        "sharpness_aware": "non-empty TensorList",  # of SAM, since the first pass leaves no gradient
        "in_backward": "Step after backward()",
        "by_hand_in_backward": "a second backward pass before the step of SGD",
        "micro_batches_of_padding": "a second backward pass before the step of SGD",
        "another_try": BROKE_OFF,
        "critics": "a second backward pass before the step of SGD",
    },
    "synchronous": {"another_try": BROKE_OFF, **IN_BACKWARD},
    **{how: {"by_hand": STEP_BY_HAND, "another_after": NOT_LAST, **IN_BACKWARD} for how in LOCAL},
}
REFUSED["post_local_sgd(3, 2)"].pop("by_hand")  # it is synchronous until three steps are through
REFUSED["post_local_sgd(3, 2)"]["another_try"] = BROKE_OFF
SAME = {
    "two_losses": "one_loss",
    "micro_batches": "micro_batches_no_sync",
    "discarded_passes": "one_loss",
    "with_graph": "one_loss",
    "another_try": "one_loss",
}
"""Loops that come to the same by other passes."""


@pytest.fixture(scope="module")
def ends(pool: Pool) -> dict[str, list[dict[str, Any]]]:
    """What each rank's loops end with, by schedule."""
    return {
        how: pool.run(2, "tests.own_loops.run", how=how, loops=[*own_loops.LOOPS])
        for how in ("synchronous", PIPELINED, *LOCAL)
    }


@pytest.mark.parametrize("how", ["synchronous", PIPELINED, *LOCAL])
def test_loops_end_alike_on_all_ranks_or_say_what_to_do(
    how: str, ends: dict[str, list[dict[str, Any]]]
) -> None:
    one, other = ends[how]
    for name in own_loops.LOOPS:
        refusal = REFUSED[how].get(name, "")
        for end in (one[name], other[name]):
            assert refusal in end["error"], name
            assert bool(refusal) == bool(end["error"]), (name, end["error"])
            assert "\n" not in end["error"]
        if not refusal:
            assert_equal(one[name]["end"], other[name]["end"], name)
            assert_equal(one[name]["averaged"], other[name]["averaged"], name)


@pytest.mark.parametrize("how", ["synchronous", PIPELINED, *LOCAL])
def test_passes_of_a_step_add_up(how: str, ends: dict[str, list[dict[str, Any]]]) -> None:
    for end in ends[how]:
        for name, same in SAME.items():
            if name not in REFUSED[how]:
                torch.testing.assert_close(end[name]["end"], end[same]["end"])
                assert end[name]["step"] == own_loops.STEPS


def test_the_order_of_two_optimizers_decides_nothing(ends: dict[str, list[dict[str, Any]]]) -> None:
    for end in ends["synchronous"]:
        assert_equal(end["another_after"]["end"], end["another_before"]["end"], "synchronous")


@pytest.mark.parametrize("how", LOCAL)
def test_the_optimizer_that_steps_last_takes_all_to_the_others(
    how: str, ends: dict[str, list[dict[str, Any]]]
) -> None:
    """What another one has done in the same step is exchanged with it: nothing is left for the end to average."""
    assert [end["another_before"]["said"] for end in ends[how]] == ["", ""]


def test_replicas_that_something_else_moves_are_said_to_come_apart(
    ends: dict[str, list[dict[str, Any]]],
) -> None:
    for end in ends["synchronous"]:
        assert "replicas have come apart by" in end["noised"]["said"]
        assert "noise drawn with different seeds" in end["noised"]["said"]
        assert end["clamped"]["said"] == end["by_hand"]["said"] == ""
        assert "followed no exchange" in end["functional"]["said"]


def assert_equal(these: list[torch.Tensor], those: list[torch.Tensor], what: str) -> None:
    assert all(torch.equal(one, other) for one, other in zip(these, those, strict=True)), what


@pytest.mark.parametrize("how", ["synchronous", *LOCAL])
def test_every_step_counts_once(how: str, ends: dict[str, list[dict[str, Any]]]) -> None:
    for end in ends[how]:
        for name in {"micro_batches_of_padding", "critics"} - REFUSED[how].keys():
            assert end[name]["step"] == own_loops.STEPS, name


@pytest.mark.parametrize("how", LOCAL)
@pytest.mark.filterwarnings("ignore:.*and there is one")
def test_weights_that_are_loaded_before_the_first_pass_are_no_update(how: str) -> None:
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-9)
    loaded = {name: torch.full_like(value, 10.0) for name, value in model.state_dict().items()}
    with farflung.attach(model, optimizer, farflung.Recipe(schedule=how)) as handle:
        model.load_state_dict(loaded)
        for _ in range(8):
            optimizer.zero_grad()
            model(torch.randn(3, 4)).mean().backward()
            optimizer.step()
            with handle.use_averaged_model():
                torch.testing.assert_close(model.state_dict(), loaded)
    torch.testing.assert_close(model.state_dict(), loaded)


@pytest.mark.parametrize(
    ("codec", "is_warned"),
    [("identity", False), ("int8", False), ("error_feedback(topk)", True), ("dgc", True)],
)
def test_discarded_passes_are_said_to_stay_in_what_a_codec_has_left_out(codec: str, is_warned: bool) -> None:
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with farflung.attach(model, optimizer, farflung.Recipe(codec=codec)) as handle:
        for probe in (handle.no_sync, contextlib.nullcontext):
            with warnings.catch_warnings(record=True) as said:
                warnings.simplefilter("always")
                for _ in range(3):
                    with probe():
                        model(torch.randn(3, 4)).square().mean().backward()
                    optimizer.zero_grad()
                    model(torch.randn(3, 4)).mean().backward()
                    optimizer.step()
                    optimizer.zero_grad()
            expected = is_warned and probe is contextlib.nullcontext
            assert ["inside handle.no_sync()" in str(one.message) for one in said] == [True] * expected
