"""Batches as large as replicas are fast: shares, draws, decisions and their replay."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from typing_extensions import override

import farflung
from farflung.devices import DeviceProfile
from farflung.errors import ConfigError
from farflung.faults import FaultPlan
from farflung.runs import RunConfig
from farflung.sampling import BalancedSampler, compute_balanced_counts
from farflung.telemetry import Event
from farflung.types import Draw, DrawContext
from tests.covering import thorough
from tests.refusals import refuse

QUADRATIC: dict[str, Any] = {"workload": "synthetic/quadratic", "batch_size": 12, "network": "wifi-100mbps"}
DEVICE = DeviceProfile("slow", 0.05 / 3)
SLOW = FaultPlan().slow(3, factor=3.0, at_s=0.0)


@given(st.lists(st.floats(1e-3, 1e3), min_size=1, max_size=9), st.integers(9, 500))
def test_shares_are_whole_and_in_proportion(speeds: list[float], total: int) -> None:
    counts = compute_balanced_counts(speeds, total)
    assert sum(counts) == total
    assert min(counts) >= 1
    exact = [total * speed / sum(speeds) for speed in speeds]
    raised = sum(max(0.0, 1 - share) for share in exact)
    assert all(abs(count - share) <= 1 + raised for count, share in zip(counts, exact, strict=True))


def test_each_sample_comes_once_in_a_pass_while_shares_change() -> None:
    samplers = [BalancedSampler(7) for _ in range(3)]
    drawn: list[int] = []
    for rank, sampler in enumerate(samplers):
        sampler.set_rank(rank, 3)
    for step in range(10):
        for rank, sampler in enumerate(samplers):
            sampler.set_counts([[2, 2, 2], [3, 2, 1], [1, 4, 1]][step % 3])
            drawn += sampler.draw(DrawContext(step, rank, 3, 2, 60, 1.0)).ids.tolist()
    assert sorted(drawn) == list(range(60))


def told(**settings: Any) -> tuple[farflung.Run, list[Event]]:
    events: list[Event] = []
    return farflung.simulate(**{**QUADRATIC, **settings}, sink=events.append), events


def shares(events: list[Event], rank: int = 0) -> list[Any]:
    return [event["samples"] for event in events if event["event"] == "shares" and event["rank"] == rank]


def test_all_end_their_computation_together_and_a_step_takes_as_many_samples() -> None:
    both = {"workers": 4, "steps": 40, "device": DEVICE, "faults": SLOW}
    plain, _ = told(**both)
    run, events = told(sampler="balanced(every=4)", **both)
    assert shares(events) == [[15, 14, 14, 5]] * 10, (
        "of equal devices the first takes the sample that is left over"
    )
    assert run.summary["samples"] == plain.summary["samples"] == 40 * 48
    assert shares(events) == shares(events, 3)
    late = [event for event in events if event["event"] == "step" and int(str(event["step"])) > 30]
    took = [
        statistics.median(float(str(e["compute_s"])) for e in late if e["rank"] == rank) for rank in range(4)
    ]
    assert max(took) < 1.1 * min(took)
    assert float(str(run.summary["duration_s"])) < 0.6 * float(str(plain.summary["duration_s"]))
    weights = plain.state_dict()["w"]
    assert torch.allclose(run.state_dict()["w"], weights, rtol=1e-4, atol=1e-5), (
        "the mean of the same samples"
    )
    assert not torch.allclose(told(**both, seed=1)[0].state_dict()["w"], weights, rtol=1e-4, atol=1e-5)


def test_each_sample_comes_once_in_a_pass_of_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[tuple[int, int, list[int]]] = []

    class Watched(BalancedSampler):
        @override
        def draw(self, context: DrawContext) -> Draw:
            draw = super().draw(context)
            drawn.append((context.step, context.rank, draw.ids.tolist()))
            return draw

    monkeypatch.setattr("farflung.sampling.BalancedSampler", Watched)
    told(workers=4, steps=64, device=DEVICE, faults=SLOW, sampler="balanced(every=4)")
    assert len({len(ids) for _, _, ids in drawn}) > 1
    ids = [one for _, _, each in sorted(drawn) for one in each]
    assert len(ids) == 3 * 1024
    for begin in range(0, len(ids), 1024):
        assert sorted(ids[begin : begin + 1024]) == list(range(1024))


def test_little_gained_changes_nothing() -> None:
    _, events = told(
        workers=2, steps=20, sampler="balanced(every=4)", faults=FaultPlan().slow(1, factor=1.1, at_s=0.0)
    )
    assert {tuple(each) for each in shares(events)} == {(12, 12)}


@pytest.mark.parametrize(
    "schedule", ["pipelined(width=2)", *thorough("synchronous", "local_sgd(sync_every=2)")]
)
def test_a_replay_has_equal_bits(schedule: str, tmp_path: Path) -> None:
    """Real replicas, whose batches follow their measured speeds, and virtual time."""
    settings: dict[str, Any] = {
        "workload": "synthetic/quadratic", "workers": 2, "steps": 30, "batch_size": 12, "schedule": schedule,
        "sampler": "balanced(every=4, min_gain=0)", "collective": "direct",
    }  # fmt: skip
    real = farflung.train(**settings, out=tmp_path / "real")
    again = farflung.simulate(
        **settings, network="wifi-100mbps", replay=tmp_path / "real" / "decisions.jsonl"
    )
    assert '"shares"' in (tmp_path / "real" / "decisions.jsonl").read_text()
    for name, tensor in real.state_dict().items():
        assert torch.equal(tensor, again.state_dict()[name]), name


def test_shares_go_on_from_a_checkpoint(tmp_path: Path) -> None:
    both = {"workers": 4, "faults": SLOW, "device": DEVICE, "sampler": "balanced(every=4)"}
    _, events = told(**both, steps=20, out=tmp_path / "run")
    more: list[Event] = []
    farflung.simulate(resume=tmp_path / "run", steps=24, faults=SLOW, device=DEVICE, sink=more.append)
    first = [event["batch"] for event in more if event["event"] == "step" and event["step"] == 20]
    assert sorted(map(int, map(str, first))) == sorted(shares(events)[-1])


def test_a_resumed_run_decides_as_a_whole_one(tmp_path: Path) -> None:
    """From a checkpoint between a decision and what was measured for it."""
    both = {"workers": 4, "faults": SLOW, "device": DEVICE, "sampler": "balanced"}
    whole, events = told(**both, steps=24)
    told(**both, steps=15, out=tmp_path / "run")
    more: list[Event] = []
    rest = farflung.simulate(resume=tmp_path / "run", steps=24, faults=SLOW, device=DEVICE, sink=more.append)
    assert shares(more) == shares(events) == [[15, 14, 14, 5]]
    assert torch.equal(whole.state_dict()["w"], rest.state_dict()["w"])


@pytest.mark.parametrize("counts", ["[24]", "[24, 0]", "[20, 5]", '"even"'])
def test_a_log_of_other_shares_is_refused_in_one_line(counts: str, tmp_path: Path) -> None:
    log = tmp_path / "decisions.jsonl"
    settings: dict[str, Any] = {
        "workers": 2,
        "steps": 8,
        "sampler": "balanced(every=4)",
        "collective": "direct",
    }
    run, _ = told(**settings)
    log.write_text(run.files.decisions_path.read_text().replace("[12,12]", counts))
    with pytest.raises(ConfigError, match=r"decision 'shares' at step 3"):
        told(**settings, replay=log)


def test_auto_is_a_batch_size() -> None:
    """By which the workload's own is shared out; a number that is said later, or another recipe, takes it back."""

    def resolved(*layers: Any) -> tuple[object, int]:
        config = RunConfig.resolve({"workload": "synthetic/quadratic"}, *layers)
        return config.recipe.sampler, config.training.batch_size

    auto = {"batch_size": "auto"}
    assert resolved(auto) == ("balanced", 32)
    assert resolved({"batch_size": 8}, auto) == ("balanced", 32)
    assert resolved(auto, {"batch_size": 8}) == ("uniform", 8)
    assert resolved({"recipe": "ring(batch_size=auto)"}) == ("balanced", 32)
    assert resolved({"sampler": "balanced(every=4)", **auto}) == ("balanced(every=4)", 32)
    with pytest.raises(ConfigError, match=r"batch_size must be a whole number, not 'car'"):
        resolved({"batch_size": "car"})


@pytest.mark.parametrize(
    ("command", "options", "says"),
    [
        ("train", ["--elastic", "1"], "sampler balanced (--batch-size auto) needs all replicas"),
        (
            "simulate",
            ["--partition", "iid"],
            "(--batch-size auto): all replicas draw from the whole set: leave out --partition",
        ),
        (
            "train",
            ["--recipe", "mercury"],
            "--batch-size auto: shares out what the uniform sampler draws, and this is sampler g",
        ),
        (
            "simulate",
            ["--sampler", "grouped_importance"],
            "and this is sampler grouped_importance: give a number",
        ),
        (
            "simulate",
            ["--stream", "rate(20)"],
            "(--batch-size auto): shares out samples that all replicas have: leave out --str",
        ),
        (
            "train",
            ["--sharing", "injection"],
            "(--batch-size auto): shares out samples that all replicas have: leave out --str",
        ),
    ],
)
def test_auto_is_refused_where_it_cannot_be(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, command: str, options: list[str], says: str
) -> None:
    given = ["--workload", "synthetic/quadratic", "--batch-size", "auto", "--out", str(tmp_path / "run")]
    assert says in refuse(capsys, command, *given, *options)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"sampler": "balanced(every=0)"}, "every"),
        ({"sampler": "balanced(min_gain=1)"}, "min_gain"),
    ],
)
def test_bad_options_are_one_line(options: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        told(**{"workers": 2, "steps": 4, "sampler": "balanced", **options})
