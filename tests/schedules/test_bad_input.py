"""What a schedule refuses, and with which words; and a loss that is not finite."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from farflung.attach_checks import describe_attach_support
from farflung.errors import ConfigError, NonFinite, Unsupported
from farflung.handle import attach
from farflung.recipes import parse_recipe
from farflung.types import Batch
from farflung.workloads import Quadratic
from tests.helpers import same_bits
from tests.schedules.runs import Run, distance

REFUSED = {
    "pipelined(width=0)": "width 0 must be at least 1",
    "pipelined(width=2.5)": "width 2.5 must be a whole number",
    "pipelined(warmup=-1)": "warmup -1 must be at least 0",
    "pipelined(correction=-0.1)": "correction -0.1 must be 0 or more",
    "pipelined(correction='much')": "correction 'much' must be a number",
    "pipelined(predict='yes')": "predict 'yes' must be True, False or None",
    "pipelined(width=1, predict=True)": "width 1 delays nothing",
    "pipelined(width=1, correction=1)": "width 1 delays nothing",
    "pipelined(predict=True, correction=1)": "predict or correction, not both",
    "pipelined(period=2)": "unexpected keyword argument 'period'",
    "delayed(delay=-1)": "delay -1 must be at least 0",
    "delayed(delay='soon')": "delay 'soon' must be a whole number or 'auto'",
    "delayed(delay=1.5)": "delay 1.5 must be a whole number",
    "delayed(period=0)": "period 0 must be at least 1",
    "delayed(max_delay=0)": "max_delay 0 must be at least 1",
    "delayed(warmup=-1)": "warmup -1 must be at least 0",
    "delayed(pull='hard')": "pull 'hard' must be 'swap', 'auto' or a share",
    "delayed(pull=0)": "pull 0 must be above 0 and at most 1",
    "delayed(pull=1.5)": "pull 1.5 must be above 0 and at most 1",
    "delayed(pull=None)": "pull None must be above 0 and at most 1",
    "delayed(width=2)": "unexpected keyword argument 'width'",
    "local_sgd(0)": "local_sgd: sync_every 0 must be at least 1",
    "local_sgd(optimizer_state='lost')": "optimizer_state 'lost' must be 'kept', 'reset' or 'averaged'",
    "post_local_sgd(warmup=-1)": "warmup -1 must be at least 0",
    "post_local_sgd(sync_every=0)": "post_local_sgd: sync_every 0 must be at least 1",
    "adacomm(sync_every=0)": "adacomm: sync_every 0 must be at least 1",
    "adacomm(interval_s=0)": "interval_s must be above 0",
    "adacomm(rule='grow')": "rule 'grow' must be 'shrink' or 'basic'",
    "adacomm(shrink=1)": "shrink 1 would shrink nothing",
    "adacomm(shrink=0)": "shrink 0 must be above 0 and at most 1",
    "adacomm(rate_power=-1)": "rate_power -1 must be a number of at least 0",
    "adacomm(max_period=5)": "max_period 5 must be at least 20",
    "adacomm(block_momentum=1)": "block_momentum 1 must be at least 0 and below 1",
    "diloco(sync_every=0)": "diloco: sync_every 0 must be at least 1",
    "diloco(outer_momentum=1)": "outer_momentum 1 must be at least 0 and below 1",
    "diloco(outer_rate=0)": "outer_rate must be above 0",
    "diloco(outer_rate=-0.1)": "outer_rate -0.1 must be a number of at least 0",
    "diloco(nesterov=1)": "nesterov 1 must be True or False",
    "streaming_diloco(sync_every=10)": "sync_every 10 is no multiple of fragments 4",
    "streaming_diloco(fragments=0)": "fragments 0 must be at least 1",
    "streaming_diloco(delay=25)": "delay 25 must be below sync_every / fragments, which is 25",
    "streaming_diloco(delay=-1)": "delay -1 must be at least 0",
    "streaming_diloco(mix=1)": "mix 1 must be at least 0 and below 1",
    "streaming_diloco(keep='yes')": "keep 'yes' must be True or False",
    "streaming_diloco(outer_momentum=1.0)": "outer_momentum 1.0 must be at least 0 and below 1",
    "lazy": "unknown schedule 'lazy'",
}


@pytest.mark.parametrize("schedule", REFUSED)
def test_options_out_of_range_are_refused_with_the_reason(schedule: str) -> None:
    with pytest.raises(ConfigError, match=REFUSED[schedule]):
        parse_recipe("synchronous").with_components(schedule=schedule).build_components(0)


@pytest.mark.parametrize(
    ("schedule", "settings", "reason"),
    [
        ("pipelined(predict=True)", {"optimizer": "adam"}, "use --optimizer sgd"),
        ("local_sgd(2, 'averaged')", {"optimizer": "lars"}, "the moments of Lars cannot be averaged"),
    ],
)
def test_settings_that_do_not_go_together_are_refused(
    schedule: str, settings: dict[str, Any], reason: str
) -> None:
    with pytest.raises(ConfigError, match=reason):
        Run(schedule, settings=settings)


def test_attach_says_what_it_carries() -> None:
    def said(**members: str) -> str:
        return describe_attach_support(parse_recipe("synchronous").with_components(**members))

    assert said(schedule="pipelined(correction=0.1)") == said(schedule="delayed('auto')") == "yes"
    assert said(schedule="delayed(5, pull='swap')") == "yes"
    assert "forward pass" in said(schedule="pipelined(predict=True)")
    assert said(schedule="diloco") == said(schedule="streaming_diloco") == "yes"
    assert said(schedule="adacomm") == "no: the loss, which it does not see, decides how long blocks are"
    assert said(stream="rate(20)") == "draw batches with stream rate(20)"
    assert said(sharing="injection").startswith("no: it sees no samples")
    assert said(scaling="root") == "no: the learning rate is the loop's own"


@pytest.mark.parametrize(
    ("preset", "members", "nearest"),
    [
        ("synchronous", {"sharing": "injection"}, {"sharing": "none"}),
        ("scadles", {"sharing": "injection"}, {"sharing": "none", "scaling": "none"}),
        ("mercury", {}, {"sharing": "none"}),
        ("adacomm", {}, {"schedule": "local_sgd(sync_every=20)"}),
        ("ring", {"schedule": "pipelined(3, predict=True)"}, {"schedule": "pipelined(width=3)"}),
    ],
)
def test_attach_names_the_nearest_recipe_that_it_carries(
    preset: str, members: dict[str, str], nearest: dict[str, str]
) -> None:
    model, chosen = nn.Linear(2, 2), parse_recipe(preset).with_components(**members)
    changes = ", ".join(f"{family}={text!r}" for family, text in nearest.items())
    with pytest.raises(
        Unsupported,
        match=f"cannot follow recipe {preset}.*{re.escape(f'recipe.with_components({changes}),')}",
    ):
        attach(model, torch.optim.SGD(model.parameters(), 0.1), chosen)
    assert not describe_attach_support(chosen.with_components(**nearest)).startswith("no")


# --- losses that are not finite ---------------------------------------------------------------------------------


class Spoilt(Quadratic):
    """One whose loss becomes infinite at one step of the replica that spoils."""

    forwards = 0
    spoils = False

    def compute_losses(self, model: nn.Module, batch: Batch) -> Tensor:
        self.forwards += model.training
        losses = super().compute_losses(model, batch)
        return losses * float("inf") if self.spoils and self.forwards == 6 else losses


def spoilt(schedule: str, policy: str) -> Run:
    run = Run(
        schedule,
        3,
        workload=lambda: Spoilt(dim=6, samples=48),
        settings={"on_nonfinite": policy, "steps": 16, "momentum": 0.9},
    )
    run.replicas[1].workload.spoils = True  # type: ignore[attr-defined]
    return run


LATE = {
    "pipelined(3)": 5,
    "delayed(4, pull='swap')": 5,
    "delayed(4, 2, pull='swap')": 5,
    "delayed(3, 4, pull='swap')": 7,
    "delayed(4)": 5,
    "delayed(4, 2)": 5,
    "local_sgd(4)": 7,
    "diloco(3, optimizer_state='averaged')": 5,
    "streaming_diloco(3, fragments=1, delay=2)": 5,
}


@pytest.mark.parametrize("schedule", LATE)
def test_stop_names_exchange_and_replica(schedule: str) -> None:
    with pytest.raises(NonFinite, match=f"at step {LATE[schedule]} on rank 1:"):
        spoilt(schedule, "stop").whole()


@pytest.mark.parametrize("schedule", LATE)
@pytest.mark.parametrize("policy", ["skip", "exclude"])
def test_others_go_on_and_end_alike(schedule: str, policy: str) -> None:
    run = spoilt(schedule, policy).whole()
    for rank in range(3):
        assert torch.isfinite(run.weights(rank)).all()
        assert same_bits(run.weights(rank), run.weights())
    assert [event["nonfinite"] for event in run.step_events()].count(1) == 1


@pytest.mark.parametrize("pull", ["swap", "auto"])
@pytest.mark.parametrize("policy", ["skip", "exclude"])
def test_without_delay_a_skip_is_as_in_synchronous_sgd(policy: str, pull: str) -> None:
    settings = {"momentum": 0.0}
    one, other = (spoilt(schedule, policy) for schedule in (f"delayed(0, pull='{pull}')", "synchronous"))
    for run in (one, other):
        for replica in run.replicas:
            replica.optimizer.param_groups[0].update(settings)
    assert distance(one.whole().weights(), other.whole().weights()) < 1e-6
