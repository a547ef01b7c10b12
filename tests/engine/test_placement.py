"""Which device a replica trains on; on a machine that has one, that training there is training."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from farflung import simulate
from farflung.engine import select_device
from farflung.engine.placement import HOST, move_batch, move_state
from farflung.errors import ConfigError
from farflung.seeding import RandomState
from farflung.types import Batch
from farflung.workloads import Quadratic
from tests.helpers import same_bits, same_tree
from tests.schedules.runs import Run, distance

SCHEDULES = [
    "synchronous",
    "pipelined(2, predict=True)",
    "pipelined(3, correction=0.1)",
    "delayed(3, 2)",
    "delayed(3, pull='swap')",
]
PARTS = [{}, {"codec": "error_feedback(topk(density=0.3))"}, {"reducer": "powersgd"}]


def devices(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)


def test_a_device_for_each_replica_or_one_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    devices(monkeypatch, 2)
    assert select_device("cpu", local_rank=5, local_size=9) == HOST
    assert [select_device("cuda", local_rank=rank, local_size=2) for rank in range(2)] == [
        torch.device("cuda:0"),
        torch.device("cuda:1"),
    ]
    assert select_device("cuda:1", local_rank=3, local_size=4) == torch.device("cuda:1")


@pytest.mark.parametrize(
    ("count", "device", "said"),
    [
        (0, "cuda", "--device cuda: torch sees no CUDA device on this machine: use --device cpu"),
        (0, "cuda:0", "--device cuda:0: torch sees no CUDA device"),
        (
            2,
            "cuda",
            "3 replicas here for 2 CUDA devices: start fewer, or have them share one with --device cuda:0",
        ),
        (2, "cuda:2", "--device cuda:2: this machine's last CUDA device is cuda:1"),
        (2, "tpu", "--device tpu: must be cpu, cuda (one for each replica)"),
        (2, "cuda:", "--device cuda:: must be cpu"),
    ],
)
def test_a_device_that_is_not_there_is_refused(
    count: int, device: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    devices(monkeypatch, count)
    with pytest.raises(ConfigError) as caught:
        select_device(device, local_rank=0, local_size=3)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_simulated_run_is_refused_by_the_name_of_its_own_option(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--compute-on tpu: must be cpu, cuda"):
        simulate("synthetic/quadratic", steps=2, compute_on="tpu", out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.gpu
def test_a_simulated_run_computes_on_the_device_and_takes_as_long(tmp_path: Path) -> None:
    """It goes on there, too."""
    there, here = (
        simulate(
            "synthetic/quadratic",
            "local_sgd",
            steps=16,
            checkpoint_every=8,
            compute_on=where,
            out=tmp_path / where,
        )
        for where in ("cuda:0", "cpu")
    )
    assert there.events[0][0]["device"] == "cuda:0"
    assert there.summary["duration_s"] == here.summary["duration_s"]
    assert distance(there.state_dict()["w"].cpu(), here.state_dict()["w"]) < 1e-4
    again = simulate(resume=tmp_path / "cuda:0", steps=24, compute_on="cuda:0")
    assert again.summary["steps"] == 24


def test_on_the_host_nothing_is_copied() -> None:
    batch = Batch(torch.zeros(3, 2), torch.zeros(3))
    assert move_batch(batch, HOST) is batch
    state = {
        "flights": {"0": {"metadata": torch.ones(2), "contribution": torch.ones(3), "step": 4}},
        "sent": 7,
    }
    assert same_tree(move_state(state, HOST), state)


# --- on a device ------------------------------------------------------------------------------------------------


class Dropping(nn.Module):
    """Dropout, running statistics and parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.drop, self.layer = nn.BatchNorm1d(6), nn.Dropout(0.3), nn.Linear(6, 1)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layer(self.drop(self.norm(x)))[:, 0]
        return y


class Task(Quadratic):
    """Something that draws random numbers on the device."""

    def build_model(self, generator: torch.Generator) -> nn.Module:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(int(torch.randint(2**31, (1,), generator=generator)))
            return Dropping()

    def compute_losses(self, model: nn.Module, batch: Batch) -> Tensor:
        out: Tensor = model(batch.inputs)
        return (out - batch.targets).square()

    def compute_metrics(self, model: nn.Module, batch: Batch) -> Tensor:
        return -self.compute_losses(model, batch)


def task() -> Quadratic:
    return Task(dim=6, samples=48)


def evaluations(run: Run) -> list[Any]:
    return [event["loss"] for event in run.events[0] if event["event"] == "evaluation"]


@pytest.mark.gpu
@pytest.mark.parametrize("parts", PARTS, ids=str)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_run_ends_where_it_ends_on_the_host(schedule: str, parts: dict[str, str]) -> None:
    settings = {"momentum": 0.9, "evaluate_every": 7}
    there, here = (
        Run(schedule, 2, parts, settings=settings, device=device).whole() for device in ("cuda:0", "cpu")
    )
    assert all(p.is_cuda for replica in there.replicas for p in replica.model.parameters())
    assert distance(there.weights(), here.weights()) < 0.02
    assert evaluations(there) == pytest.approx(evaluations(here), rel=0.02)
    assert same_bits(there.weights(0), there.weights(1))
    assert there.events[0][0]["device"] == "cuda:0"


@pytest.mark.gpu
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_run_resumed_on_the_device_ends_as_the_whole(schedule: str, optimizer: str, tmp_path: Path) -> None:
    if "predict" in schedule and optimizer != "sgd":
        pytest.skip("predictions follow SGD")
    settings = {
        "momentum": 0.9,
        "optimizer": optimizer,
        "learning_rate": 0.01,
        "learning_rate_schedule": "cosine(warmup=3)",
    }

    def run(**more: Any) -> Run:
        given: dict[str, Any] = {**settings, **more}
        return Run(schedule, workload=task, settings=given, folder=tmp_path, device="cuda:0")

    whole = run(checkpoint_every=7).whole()
    again = run()
    for replica in again.replicas:
        replica.resume(7)
    again.whole()
    for rank in range(2):
        assert same_bits(again.weights(rank), whole.weights(rank))


@pytest.mark.gpu
@pytest.mark.parametrize(("first", "second"), [("cuda:0", "cpu"), ("cpu", "cuda:0")])
@pytest.mark.parametrize("schedule", ["pipelined(3, correction=0.1)", "delayed(3, 2)"])
def test_a_run_goes_on_elsewhere(schedule: str, first: str, second: str, tmp_path: Path) -> None:
    parts = {"codec": "error_feedback(topk(density=0.3))"}
    whole = Run(schedule, 2, parts, settings={"checkpoint_every": 7}, folder=tmp_path, device=first).whole()
    again = Run(schedule, 2, parts, folder=tmp_path, device=second)
    for replica in again.replicas:
        replica.resume(7)
    assert distance(again.whole().weights(), whole.weights()) < 0.02


@pytest.mark.gpu
def test_random_numbers_of_a_device_belong_to_a_replica() -> None:
    device = torch.device("cuda:0")

    def draw() -> Tensor:
        return torch.rand(4, device=device).cpu()

    before = torch.cuda.get_rng_state(0)
    with RandomState.preserve_globals():
        one, other = RandomState(1, device), RandomState(2, device)
        one.install()
        first = draw()
        kept = one.state_dict()
        wanted = draw()
        other.install()
        assert not torch.equal(draw(), first)
        one.load_state_dict(kept)
        one.install()
        assert torch.equal(draw(), wanted)
    assert torch.equal(torch.cuda.get_rng_state(0), before)
