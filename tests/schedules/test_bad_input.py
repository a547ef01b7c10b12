"""What a schedule refuses, and with which words; and a loss that is not finite."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from farflung.errors import ConfigError, NonFinite, Unsupported
from farflung.handle import attach, carries
from farflung.recipes import recipe
from farflung.runs import RunConfig
from farflung.types import Batch
from farflung.workloads import Quadratic
from tests.carrying import Carrying
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
    "delayed(most=0)": "most 0 must be at least 1",
    "delayed(warmup=-1)": "warmup -1 must be at least 0",
    "delayed(pull='hard')": "pull 'hard' must be 'swap', 'auto' or a share",
    "delayed(pull=0)": "pull 0 must be above 0 and at most 1",
    "delayed(pull=1.5)": "pull 1.5 must be above 0 and at most 1",
    "delayed(pull=None)": "pull None must be above 0 and at most 1",
    "delayed_gradient(delay=-1)": "delay -1 must be at least 0",
    "delayed_gradient(delay='auto')": "delay 'auto' must be a whole number",
    "delayed_gradient(period=0)": "period 0 must be at least 1",
    "delayed(width=2)": "unexpected keyword argument 'width'",
    "local_sgd(0)": "local_sgd: sync_every 0 must be at least 1",
    "local_sgd(optimizer_state='lost')": "optimizer_state 'lost' must be 'kept', 'reset' or 'averaged'",
    "post_local_sgd(until=-1)": "until -1 must be at least 0",
    "post_local_sgd(sync_every=0)": "post_local_sgd: sync_every 0 must be at least 1",
    "adacomm(sync_every=0)": "adacomm: sync_every 0 must be at least 1",
    "adacomm(interval_s=0)": "interval_s must be above 0",
    "adacomm(rule='grow')": "rule 'grow' must be 'shrink' or 'basic'",
    "adacomm(shrink=1)": "shrink 1 would shrink nothing",
    "adacomm(shrink=0)": "shrink 0 must be above 0 and at most 1",
    "adacomm(rate_power=-1)": "rate_power -1 must be a number of at least 0",
    "adacomm(most=5)": "most 5 must be at least 20",
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
    "ssp(bound=-1)": "ssp: bound -1 must be at least 0",
    "ssp(bound='all')": "ssp: bound 'all' must be a whole number",
    "gradient_coding(-1)": "gradient_coding: stragglers -1 must be at least 0",
    "gradient_coding(1.5)": "gradient_coding: stragglers 1.5 must be a whole number",
    "gradient_coding(construction='mds')": "construction 'mds' must be one of auto, cyclic, fractional_repetition",
    "gradient_coding(seed=1)": "unexpected keyword argument 'seed'",
    "backup_workers(0)": "backup_workers: stragglers 0 must be at least 1",
    "backup_workers(grace_s=-1)": "backup_workers: grace_s -1 must be a number of at least 0",
    "backup_workers(late_steps=-1)": "backup_workers: late_steps -1 must be at least 0",
    "lazy": "unknown schedule 'lazy'",
}


@pytest.mark.parametrize("schedule", REFUSED)
def test_options_out_of_range_are_refused_with_the_reason(schedule: str) -> None:
    with pytest.raises(ConfigError, match=REFUSED[schedule]):
        recipe("synchronous").but(schedule=schedule).parts(0)


@pytest.mark.parametrize(
    ("schedule", "settings", "reason"),
    [
        ("delayed_gradient(2)", {"clip_norm": 1.0}, "sends gradients before their norm is known"),
        ("pipelined(predict=True)", {"optimizer": "adam"}, "use --optimizer sgd"),
        ("local_sgd(2, 'averaged')", {"optimizer": "lars"}, "the state of Lars is not known"),
    ],
)
def test_settings_that_do_not_go_together_are_refused(
    schedule: str, settings: dict[str, Any], reason: str
) -> None:
    with pytest.raises(ConfigError, match=reason):
        Run(schedule, settings=settings)


@pytest.mark.parametrize(
    "member",
    [
        {"codec": "int8"},
        {"reducer": "powersgd"},
        {"collective": "native"},
        {"collective": "ring"},
        {"sampler": "grouped_importance(groups='bacc')"},
        {"stream": "rate(20)"},
        {"sharing": "injection"},
        {"sharing": "resharding(by='uniform')"},
        {"scaling": "linear"},
    ],
    ids=str,
)
@pytest.mark.parametrize("preset", ["ssp", "gradient_coding"])
def test_what_a_server_leaves_no_place_for_is_refused_by_name(preset: str, member: dict[str, str]) -> None:
    ((family, text),) = member.items()
    with pytest.raises(ConfigError, match=re.escape(f"leave out --{family} {text}")):
        recipe(preset).but(**member).parts(0)


def test_what_a_code_leaves_no_place_for_is_refused_by_name() -> None:
    coded = recipe("gradient_coding")
    with pytest.raises(ConfigError, match="leave out --sampler tests"):
        coded.but(sampler=Carrying).parts(0)
    with pytest.raises(ConfigError, match="leave out --partition"):
        coded.parts(0, share=1)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"partition": "iid"}, "leave out --partition"),
        ({"schedule": "gradient_coding(4)"}, "stragglers 4 must be below the number of replicas, which is 4"),
        (
            {"schedule": "gradient_coding(2, 'fractional_repetition')"},
            "needs replicas in groups of stragglers + 1 = 3, and there are 4: use construction='cyclic'",
        ),
    ],
    ids=str,
)
def test_a_code_that_does_not_suit_a_run_is_refused_before_it(settings: dict[str, Any], words: str) -> None:
    given = {"workload": "synthetic/quadratic", "recipe": "gradient_coding", "workers": 4, **settings}
    with pytest.raises(ConfigError, match=re.escape(words)):
        RunConfig.resolve(given).check()


def test_attach_says_what_it_carries() -> None:
    def said(**members: str) -> str:
        return carries(recipe("synchronous").but(**members))

    assert said(schedule="pipelined(correction=0.1)") == said(schedule="delayed('auto')") == "yes"
    assert said(schedule="delayed(5, pull='swap')") == "yes"
    assert "forward pass" in said(schedule="pipelined(predict=True)")
    assert said(schedule="diloco") == said(schedule="streaming_diloco") == "yes"
    assert said(schedule="adacomm") == "no: the loss, which it does not see, decides how long blocks are"
    assert said(schedule="ssp") == "no: its server has to know how many steps there are"
    assert (
        said(schedule="gradient_coding")
        == "no: rank 0 makes means of what comes first, and a code weighs the shares of a batch"
    )
    assert "swapped gradients" in said(schedule="delayed_gradient")
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
        ("ssp", {}, {"schedule": "delayed(delay=2)"}),
        ("ssp", {"schedule": "ssp(bound=None)"}, {"schedule": "delayed(delay='auto')"}),
        ("gradient_coding", {}, {"schedule": "synchronous"}),
        (
            "ring",
            {"schedule": "delayed_gradient(3, 2)"},
            {"schedule": "delayed(delay=3, period=2, pull='swap')"},
        ),
        ("ring", {"schedule": "pipelined(3, predict=True)"}, {"schedule": "pipelined(width=3)"}),
    ],
)
def test_attach_names_the_nearest_recipe_that_it_carries(
    preset: str, members: dict[str, str], nearest: dict[str, str]
) -> None:
    model, chosen = nn.Linear(2, 2), recipe(preset).but(**members)
    changes = ", ".join(f"{family}={text!r}" for family, text in nearest.items())
    with pytest.raises(
        Unsupported, match=f"cannot follow recipe {preset}.*{re.escape(f'recipe.but({changes}),')}"
    ):
        attach(model, torch.optim.SGD(model.parameters(), 0.1), chosen)
    assert not carries(chosen.but(**nearest)).startswith("no")


# --- losses that are not finite ---------------------------------------------------------------------------------


class Spoilt(Quadratic):
    """One whose loss becomes infinite at one step of the replica that spoils."""

    forwards = 0
    spoils = False

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        self.forwards += model.training
        losses = super().loss(model, batch)
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
    "delayed_gradient(3, 4)": 7,
    "local_sgd(4)": 7,
    "diloco(3, optimizer_state='averaged')": 5,
    "streaming_diloco(3, fragments=1, delay=2)": 5,
    "ssp(0)": 5,
    "ssp(None)": 5,
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
