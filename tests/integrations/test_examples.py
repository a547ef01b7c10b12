"""Lightning, Transformers, Accelerate, a DataLoader: an example of each, as two replicas."""

from __future__ import annotations

import shutil
import socket
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from farflung.errors import ConfigError
from farflung.state_trees import load_tree
from tests.covering import thorough
from tests.pool import Pool


def ran(pool: Pool, name: str, *args: str) -> list[float]:
    """The parameters that both replicas of an example ended with."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    one, other = pool.run(2, "tests.integrations.jobs.example", name=name, port=port, args=list(args))
    assert one == other
    return list(one)


@pytest.mark.thorough
def test_lightning_shares_all_samples_out(pool: Pool, tmp_path: Path) -> None:
    pytest.importorskip("lightning")
    options = ["--recipe", "synchronous", "--folder", str(tmp_path), "--batch-size", "80", "--steps", "5"]
    shared = ran(pool, "with_lightning.py", *options)
    torch.manual_seed(0)
    inputs, alone = torch.randn(160, 8), torch.nn.Linear(8, 1)
    optimizer = torch.optim.SGD(alone.parameters(), lr=0.1, momentum=0.5)
    for _ in range(5):
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(alone(inputs), inputs.sum(dim=1, keepdim=True)).backward()
        optimizer.step()
    assert shared == pytest.approx([*alone.weight.flatten().tolist(), alone.bias.item()], abs=1e-6)


def test_lightning_goes_on_from_its_checkpoint_with_local_steps(pool: Pool, tmp_path: Path) -> None:
    pytest.importorskip("lightning")
    options = ["--recipe", "local_sgd(4)", "--folder", str(tmp_path), "--batch-size", "80"]
    whole = ran(pool, "with_lightning.py", *options)
    (half,) = tmp_path.glob("*step=10.ckpt")
    assert ran(pool, "with_lightning.py", *options, "--resume", str(half)) == pytest.approx(whole, abs=1e-6)


def test_lightning_goes_on_from_its_checkpoint(pool: Pool, tmp_path: Path) -> None:
    pytest.importorskip("lightning")
    # A pass is one step with all samples: where in a pass a checkpoint was made is Lightning's affair.
    how = "synchronous(codec=error_feedback(topk(0.2)))"
    options = ["--recipe", how, "--folder", str(tmp_path), "--batch-size", "80"]
    whole = ran(pool, "with_lightning.py", *options)
    (half,) = tmp_path.glob("*step=10.ckpt")
    assert sorted(path.name for path in tmp_path.glob(f"{half.name}.farflung-*")) == [
        f"{half.name}.farflung-{rank}-of-2" for rank in range(2)
    ]
    assert ran(pool, "with_lightning.py", *options, "--resume", str(half)) == pytest.approx(whole, abs=1e-6)
    for rank in range(2):
        Path(f"{half}.farflung-{rank}-of-2").unlink()
    assert ran(pool, "with_lightning.py", *options, "--resume", str(half)) != pytest.approx(whole, abs=1e-6)


@pytest.mark.parametrize(
    "how",
    ["diloco(sync_every=4)", *thorough("synchronous(codec=error_feedback(topk(0.2)))", "delayed(delay=2)")],
)
def test_the_trainer_of_transformers_goes_on_from_its_checkpoint(
    pool: Pool, tmp_path: Path, how: str
) -> None:
    pytest.importorskip("transformers")
    options = ["--recipe", how, "--folder", str(tmp_path)]
    whole = ran(pool, "with_transformers.py", *options)
    half = tmp_path / "checkpoint-10"
    assert len(list(half.glob("farflung-*-of-2.safetensors"))) == 2
    assert ran(pool, "with_transformers.py", *options, "--resume", str(half)) == whole


def test_a_callback_that_was_not_added_is_missed(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    from transformers import Trainer, TrainingArguments

    from farflung.integrations.transformers import FarflungCallback

    trainer = Trainer(torch.nn.Linear(2, 1), TrainingArguments(str(tmp_path), use_cpu=True, report_to="none"))
    FarflungCallback(trainer, "synchronous")
    with pytest.raises(ConfigError, match="add_callback"):
        trainer.train()


def test_a_checkpoint_of_the_trainer_holds_the_averaged_model(pool: Pool, tmp_path: Path) -> None:
    """Each rank's own file has the parameters that it goes on from."""
    pytest.importorskip("transformers")
    ran(pool, "with_transformers.py", "--recipe", "local_sgd(4)", "--folder", str(tmp_path))
    half = tmp_path / "checkpoint-10"
    own = [load_tree(half / f"farflung-{rank}-of-2.safetensors")["state"]["handle"] for rank in range(2)]
    one, other = (state["model"]["layer.weight"] for state in own)
    assert not torch.equal(one, other)
    assert torch.equal(load_file(half / "model.safetensors")["layer.weight"], (one + other) / 2)


@pytest.mark.thorough
def test_the_trainer_of_transformers_takes_the_files_of_its_checkpoint(pool: Pool, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    how = ["--recipe", "synchronous(codec=error_feedback(topk(0.2)))"]
    options = [*how, "--folder", str(tmp_path)]
    whole = ran(pool, "with_transformers.py", *options)
    half = tmp_path / "checkpoint-10"
    for folder in (
        tmp_path / "other",
        tmp_path / "empty",
    ):  # that of another run at first, whose files are left alone
        elsewhere = [*how, "--folder", str(folder)]
        if folder.name == "other":
            another = ["--recipe", "synchronous(codec=error_feedback(topk(0.1)))"]
            ran(pool, "with_transformers.py", *another, *elsewhere[2:])
        assert ran(pool, "with_transformers.py", *elsewhere, "--resume", str(half)) == whole
    for own in half.glob("farflung-*"):  # of the same step of the run that went on from here
        shutil.copyfile(tmp_path / "other" / "checkpoint-20" / own.name, own)
    left_alone = ran(pool, "with_transformers.py", *options, "--resume", str(half))
    for own in half.glob("farflung-*"):
        own.unlink()
    assert ran(pool, "with_transformers.py", *options, "--resume", str(half)) == left_alone != whole


@pytest.mark.parametrize(
    ("name", "half", "options"),
    [
        ("with_lightning.py", "*step=10.ckpt", ["--batch-size", "80"]),
        ("with_transformers.py", "checkpoint-10", []),
    ],
)
@pytest.mark.thorough
def test_a_trainer_is_one_site_of_several(
    pool: Pool, tmp_path: Path, name: str, half: str, options: list[str]
) -> None:
    """Two sites with the same data train as one of them would; they go on from files of their own."""
    pytest.importorskip(name.removeprefix("with_").removesuffix(".py"))
    options = ["--recipe", "synchronous", *options]

    def sited(half: str) -> list[float]:
        with ExitStack() as probes:
            servers = [probes.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(3)]
            ports = [server.getsockname()[1] for server in servers]
        job = "tests.integrations.jobs.example_in_site"
        ends = pool.run(4, job, name=name, ports=ports, folder=str(tmp_path), args=options, half=half)
        assert ends == [ends[0]] * 4
        return list(ends[0])

    whole = sited("")
    assert whole == pytest.approx(ran(pool, name, *options, "--folder", str(tmp_path / "alone")), abs=1e-5)
    assert sited(half) == pytest.approx(whole, abs=1e-6)


def test_accelerate(pool: Pool) -> None:
    pytest.importorskip("accelerate")
    *_, exchanges = ran(pool, "with_accelerate.py")
    assert exchanges == 2 * 256 / (2 * 8)


def test_accelerate_accumulates_without_exchanges(pool: Pool) -> None:
    pytest.importorskip("accelerate")
    every, fourth = (
        ran(pool, "with_accelerate.py", "--codec", "identity", "--accumulate", str(steps), "--passes", "1")
        for steps in (1, 4)
    )
    assert every[-1] == 4 * fourth[-1] == 256 / (2 * 8)


@pytest.mark.parametrize("options", [[], *thorough(["--scored-by", "loss"])])
def test_importance_under_ddp(pool: Pool, options: list[str]) -> None:
    steps = ran(pool, "importance_in_ddp.py", "--steps", "3", *options)
    assert steps != ran(pool, "importance_in_ddp.py", "--steps", "2", *options)
