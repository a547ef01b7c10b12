"""A run that goes on from a checkpoint is the run that was never stopped, with exchanges under way at the cut."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from farflung.sim import LinkModel
from farflung.state_trees import load_tree
from farflung.workloads import Quadratic
from tests.helpers import same_bits, same_tree
from tests.schedules.runs import Run

SCHEDULES = [
    "pipelined(4)",
    "pipelined(3, warmup=6)",
    "pipelined(3, predict=True)",
    "pipelined(3, correction=0.1)",
    "delayed(5, pull='swap')",
    "delayed(7, 3, pull='swap')",
    "delayed('auto', pull='swap')",
    "delayed(5)",
    "delayed(7, 3)",
    "delayed('auto')",
    "delayed(4)",
    "delayed(5, 3, warmup=7)",
    "local_sgd(3)",
    "post_local_sgd(6, 5)",
    "adacomm(5, interval_s=0.3, block_momentum=0.3)",
    "diloco(3, optimizer_state='averaged')",
    "streaming_diloco(6, fragments=1, delay=3, optimizer_state='reset')",
    "priority",
]
CODECS = ["identity", "error_feedback(topk(density=0.2))", "dgc(density=0.2, warmup_steps=4)", "qsgd"]
LINK = LinkModel(0.05, 1e5)


def run(folder: Path, schedule: str, codec: str, steps: int, **settings: Any) -> Run:
    settings = {"momentum": 0.9, "steps": steps, "checkpoint_every": 4, **settings}
    return Run(schedule, 2, {"codec": codec}, LINK, 0.002, settings=settings, folder=folder)


@pytest.mark.parametrize(
    ("schedule", "codec"),
    [(schedule, CODECS[at % len(CODECS)]) for at, schedule in enumerate(SCHEDULES)]
    + [(schedule, CODECS[(at + 1) % len(CODECS)]) for at, schedule in enumerate(SCHEDULES)],
)
def test_a_resumed_run_is_the_run_that_was_never_stopped(schedule: str, codec: str, tmp_path: Path) -> None:
    goes_on(tmp_path, lambda folder, steps: run(folder, schedule, codec, steps))


class Kernel(nn.Module):
    """A point whose numbers are those of a convolution."""

    def __init__(self, w: Tensor) -> None:
        super().__init__()
        self.w = nn.Parameter(w)

    def forward(self, centres: Tensor) -> Tensor:
        return self.w.view(-1) - centres


class Kernels(Quadratic):
    """Paraboloids over a convolution."""

    def build_model(self, generator: torch.Generator) -> nn.Module:
        return Kernel(torch.randn((4, 4, 3, 3), generator=generator))


@pytest.mark.parametrize("windows", ["spread", "paper"])
@pytest.mark.parametrize("schedule", ["synchronous", "pipelined(2)", "delayed(3)"])
def test_a_window_goes_on_where_it_was(schedule: str, windows: str, tmp_path: Path) -> None:
    """Of a reducer that samples for some exchanges and compresses the next ones; the cuts are in either."""
    reducer = f"gradiveq(warm_up=1, sample_steps=4, compress_steps=7, windows={windows!r})"
    parts = {"reducer": reducer, "collective": "ring"}
    settings = {"momentum": 0.9, "checkpoint_every": 4}

    def make(folder: Path, steps: int) -> Run:
        return Run(
            schedule, 2, parts, LINK, 0.002, workload=lambda: Kernels(144, 64),
            settings={**settings, "steps": steps}, folder=folder,
        )  # fmt: skip

    goes_on(tmp_path, make)


def goes_on(tmp_path: Path, make: Callable[[Path, int], Run]) -> None:
    """Compares a run of 16 steps with those that go on from two checkpoints of another."""
    whole = make(tmp_path / "whole", 16).whole()
    make(tmp_path / "parts", 8).whole()
    for start in (4, 8):
        resumed = make(tmp_path / "parts", 16)
        for replica in resumed.replicas:
            replica.resume(start)
        resumed.whole()
        assert sent_in_steps(resumed) == sent_in_steps(whole)
        for got, wanted in zip(resumed.replicas, whole.replicas, strict=True):
            assert same_tree(dict(got.model.state_dict()), dict(wanted.model.state_dict()))
            assert got.engine.sent_nbytes == wanted.engine.sent_nbytes
            assert got.engine.peak_nbytes == wanted.engine.peak_nbytes
            for slot, other in zip(got.engine.reducer_states, wanted.engine.reducer_states, strict=True):
                assert same_tree(slot.state.shared, other.state.shared)
                assert same_tree(slot.state.local, other.state.local)


def sent_in_steps(run: Run) -> list[list[int]]:
    """What each replica has sent to each for its steps, as it says at its end."""
    found = []
    for *_, end in run.events:
        sent = end["bytes_sent_to"]
        assert isinstance(sent, dict)
        rows = torch.tensor([sent[kind] for kind in ("gradients", "moments") if kind in sent])
        found.append(rows.sum(dim=0).tolist())
        assert sum(found[-1]) == end["bytes_sent_per_replica"]
    return found


@pytest.mark.parametrize("pull", ["swap", "auto"])
def test_a_resume_of_a_resume(pull: str, tmp_path: Path) -> None:
    """What starts again is under way at the next checkpoint as it was the first time."""
    schedule = f"delayed(9, pull='{pull}')"
    whole = run(tmp_path / "whole", schedule, "error_feedback(topk(density=0.2))", 16).whole()
    for steps in (4, 8, 12, 16):
        part = run(tmp_path / "parts", schedule, "error_feedback(topk(density=0.2))", steps)
        if steps > 4:
            for replica in part.replicas:
                replica.resume(steps - 4)
        part.whole()
    assert same_bits(part.weights(), whole.weights())


@pytest.mark.parametrize("pull", ["swap", "auto"])
def test_checkpoints_change_nothing(pull: str, tmp_path: Path) -> None:
    schedule = f"delayed(5, 2, pull='{pull}')"
    often = run(tmp_path / "often", schedule, "identity", 12, checkpoint_every=1).whole()
    never = run(tmp_path / "never", schedule, "identity", 12, checkpoint_every=0).whole()
    assert same_bits(often.weights(), never.weights())


def test_the_shared_part_has_what_replicas_have_in_common(tmp_path: Path) -> None:
    half = run(tmp_path, "delayed(6, 2, pull='swap')", "identity", 8).whole()
    shared = load_tree(tmp_path / "step-00000008" / "shared.safetensors")
    own = [load_tree(tmp_path / "step-00000008" / f"rank-{rank}-of-2.safetensors") for rank in range(2)]
    assert not same_bits(own[0]["parameters"]["w"], own[1]["parameters"]["w"])
    assert [flight["step"] for flight in own[0]["exchanges"]["flights"].values()] == [3, 5, 7]
    for tree in own:
        blocks = [flight["saved"]["0"]["contribution"] for flight in tree["exchanges"]["flights"].values()]
        total = shared["model"]["w"].clone()
        for block in blocks:
            total += block
        assert same_bits(total, tree["parameters"]["w"])
    assert half.replicas[0].completed_steps == 8
