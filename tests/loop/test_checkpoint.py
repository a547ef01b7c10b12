"""A checkpoint holds everything, appears whole or not at all, and says what is wrong when it does not fit."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from benchmarks.common.meter import Memory
from farflung import state_trees
from farflung.config import Training
from farflung.errors import CheckpointError, StorageError
from farflung.loop import Checkpoints, Replica
from farflung.loop.optimizers import get_optimizer_state, load_optimizer_state
from farflung.recipes import parse_recipe
from farflung.sim import VirtualWorld
from farflung.state_trees import load_tree, save_tree
from farflung.telemetry import Telemetry
from farflung.types import Batch, State
from farflung.workloads import Quadratic
from tests.helpers import same_bits, same_tree

TREE: State = {
    "model": {"0.weight": torch.arange(6.0).reshape(2, 3), "0.bias": torch.zeros(0)},
    "step": 12,
    "loss": 0.25,
    "nothing": None,
    "empty": {},
    "list": [1, "two", {"three": [None]}],
}

# --- trees ------------------------------------------------------------------------------------------------------

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.uint8, torch.bool]
names = st.text(st.sampled_from("ab/%2F5. _é"), max_size=6)
tensors = st.builds(
    lambda shape, dtype: torch.ones(shape).cumsum(0).to(dtype) if shape else torch.tensor(3).to(dtype),
    st.lists(st.integers(0, 3), max_size=3),
    st.sampled_from(DTYPES),
)
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3),
    max_leaves=5,
)
trees = st.dictionaries(
    names,
    st.recursive(tensors | values, lambda inner: st.dictionaries(names, inner, max_size=3), max_leaves=8),
    max_size=4,
)


@settings(max_examples=40)  # each is written to a disk
@given(tree=trees)
def test_trees_come_back(tree: State, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.getbasetemp() / "trees" / "tree.safetensors"
    save_tree(path, tree)
    assert same_tree(load_tree(path), tree)


def test_tensors_of_every_kind_come_back(tmp_path: Path) -> None:
    base = torch.arange(12.0).reshape(3, 4)
    tree: State = {
        "transposed": base.T,
        "strided": base[:, ::2],
        "the same twice": {"a": base, "b": base, "row": base[1]},
        "nan": torch.tensor([float("nan"), float("inf"), -0.0]),
        "parameter": nn.Parameter(base),
        "scalar": torch.tensor(3.5),
    }
    save_tree(tmp_path / "tree", tree)
    loaded = load_tree(tmp_path / "tree")
    assert same_bits(loaded["transposed"], base.T)
    assert same_bits(loaded["strided"], base[:, ::2])
    assert same_tree(loaded["the same twice"], tree["the same twice"])
    assert same_bits(loaded["nan"], tree["nan"])
    assert same_bits(loaded["parameter"], base)
    assert same_bits(loaded["scalar"], torch.tensor(3.5))


@pytest.mark.parametrize("dtype", state_trees._DTYPE_NAMES)
def test_files_are_safetensors(dtype: torch.dtype, tmp_path: Path) -> None:
    """Numbers lie at multiples of their size, so that a reader may map them: also an odd number of narrow ones."""
    tensors = {"a": torch.tensor([1, 0, 1]).to(dtype), "b": torch.ones(3), "c": torch.zeros(2, 0)}
    save_tree(tmp_path / "tree", tensors)
    content = (tmp_path / "tree").read_bytes()
    begin = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(content[8:begin])
    for name, tensor in tensors.items():
        assert (begin + header[name]["data_offsets"][0]) % tensor.itemsize == 0
    assert same_tree(load_file(tmp_path / "tree"), tensors)
    assert same_tree(load_tree(tmp_path / "tree"), tensors)


def test_nothing_is_copied_to_be_written(tmp_path: Path) -> None:
    tree = {str(number): torch.ones(1 << 20) for number in range(16)}
    with Memory() as memory:
        save_tree(tmp_path / "tree", tree)
    assert memory.most_nbytes < 16 << 20  # a quarter of the tensors


def test_folders_are_made_and_what_was_there_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "a" / "b" / "tree"
    for step in (1, 2):
        save_tree(path, {"step": step})
        assert load_tree(path) == {"step": step}
    assert [file.name for file in path.parent.iterdir()] == ["tree"]


# --- whole or not at all ----------------------------------------------------------------------------------------


def fails_halfway(monkeypatch: pytest.MonkeyPatch, moment: str) -> None:
    def no_space(descriptor: int) -> None:
        raise OSError("no space left on device")

    def no_rename(self: Path, target: Path) -> None:
        raise OSError("interrupted")

    if moment == "writing":
        monkeypatch.setattr(os, "fsync", no_space)
    else:
        monkeypatch.setattr(Path, "replace", no_rename)


@pytest.mark.parametrize("moment", ["writing", "renaming"])
def test_a_write_that_fails_leaves_what_was_there(
    moment: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_tree(tmp_path / "tree", TREE)
    fails_halfway(monkeypatch, moment)
    with pytest.raises(StorageError, match=r"cannot be written .(no space|interrupted)"):
        save_tree(tmp_path / "tree", {"step": 13})
    monkeypatch.undo()
    assert same_tree(load_tree(tmp_path / "tree"), TREE)


def test_a_file_is_on_the_disk_before_it_gets_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a loss of power could leave a name of nothing, where an older checkpoint was removed already."""
    on_disk, named = dict[int, bytes](), list[str]()
    fsync, replace = os.fsync, Path.replace

    def noted_fsync(descriptor: int) -> None:
        fsync(descriptor)
        on_disk[os.fstat(descriptor).st_ino] = Path(f"/proc/self/fd/{descriptor}").read_bytes()

    def noted_replace(self: Path, target: Path) -> Path:
        assert on_disk.get(self.stat().st_ino) == self.read_bytes(), "what is written is not on the disk yet"
        named.append(target.name)
        return replace(self, target)

    monkeypatch.setattr(os, "fsync", noted_fsync)
    monkeypatch.setattr(Path, "replace", noted_replace)
    Checkpoints(tmp_path, 0, 1, is_leader=True).save(1, TREE, TREE)
    assert named == ["shared.safetensors", "rank-0-of-1.safetensors"]


@pytest.mark.parametrize("moment", ["writing", "renaming"])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_checkpoint_with_a_part_unfinished_does_not_count(
    moment: str, rank: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks = [Checkpoints(tmp_path, r, 2, is_leader=r == 0) for r in range(2)]
    for step in (1, 2):
        ranks[1 - rank].save(step, TREE, {"step": step})
    ranks[rank].save(1, TREE, {"step": 1})
    fails_halfway(monkeypatch, moment)
    with pytest.raises(StorageError, match=r"cannot be written .(no space|interrupted)"):
        ranks[rank].save(2, TREE, {"step": 2})
    monkeypatch.undo()
    for checkpoints in ranks:
        assert checkpoints.list_complete() == [1]
        assert checkpoints.find_newest() == 1


def test_a_system_without_advice_on_files_saves_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As macOS."""
    monkeypatch.delattr(os, "posix_fadvise", raising=False)
    save_tree(tmp_path / "tree", TREE)
    assert same_tree(load_tree(tmp_path / "tree"), TREE)


def test_files_of_an_attempt_that_broke_off_do_not_mix_with_those_of_fewer_replicas(tmp_path: Path) -> None:
    def save(attempt: str, size: int) -> None:
        for rank in range(3):
            state = {**TREE, "attempt": attempt}
            Checkpoints(tmp_path, rank, size, is_leader=rank == 0, allows_any_size=True).save(1, state, state)

    save("first", 4)
    checkpoints = [
        Checkpoints(tmp_path, rank, 3, is_leader=rank == 0, allows_any_size=True) for rank in range(3)
    ]
    assert checkpoints[0].list_complete() == []
    save("second", 3)
    assert checkpoints[0].list_complete() == [1]
    assert [state["attempt"] for one in checkpoints for state in one.load(1)] == ["second"] * 6


def test_every_way_of_being_cut_short_is_found(tmp_path: Path) -> None:
    path = tmp_path / "tree"
    save_tree(path, TREE)
    whole = path.read_bytes()
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        with pytest.raises(CheckpointError, match="cut short or damaged"):
            load_tree(path)
    path.write_bytes(whole + b"more")
    with pytest.raises(CheckpointError, match="cut short or damaged"):
        load_tree(path)


@pytest.mark.parametrize("content", [b"", b"\0" * 64, b"\xff" * 64, b"step: 12\n" * 20])
def test_another_kind_of_file_is_refused(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "tree").write_bytes(content)
    with pytest.raises(CheckpointError, match="cut short or damaged"):
        load_tree(tmp_path / "tree")


@pytest.mark.parametrize(
    ("metadata", "says"),
    [
        (None, "not written by farflung"),
        ({"format": "pt"}, "not written by farflung"),
        ({"farflung": "{"}, "cut short or damaged"),
        ({"farflung": '{"format": 5, "values": {}}'}, "cut short or damaged.*no checksum"),
        ({"farflung": '{"step": 3}'}, "a file of format 1, and this version of farflung reads format 5: use"),
        ({"farflung": '{"format": 6, "values": {}}'}, "a file of format 6, and this version"),
    ],
)
def test_what_was_written_by_something_else_is_refused(metadata: Any, says: str, tmp_path: Path) -> None:
    save_file({"weight": torch.zeros(3)}, tmp_path / "tree", metadata)
    with pytest.raises(CheckpointError, match=says):
        load_tree(tmp_path / "tree")


def test_every_flipped_bit_is_found(tmp_path: Path) -> None:
    """In values and tensors too, where a file remains one that can be read."""
    path = tmp_path / "tree"
    save_tree(path, TREE)
    whole = path.read_bytes()
    for at in range(len(whole)):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 1 << at % 8]) + whole[at + 1 :])
        with pytest.raises(CheckpointError, match=f"^{path}: "):
            load_tree(path)
    path.write_bytes(whole)
    assert same_tree(load_tree(path), TREE)


def test_the_same_tree_is_the_same_file(tmp_path: Path) -> None:
    for name in "ab":
        save_tree(tmp_path / name, TREE)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def test_what_is_absent_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"tree: no such checkpoint file"):
        load_tree(tmp_path / "tree")
    assert CheckpointError.exit_code == 2


# --- the checkpoints of a run -----------------------------------------------------------------------------------


def saved(folder: Path, size: int, *steps: int, keep: int = 2) -> list[Checkpoints]:
    ranks = [Checkpoints(folder, rank, size, is_leader=rank == 0, num_kept=keep) for rank in range(size)]
    for step in steps:
        for rank, checkpoints in enumerate(ranks):
            checkpoints.save(step, {"step": step}, {"rank": rank, "step": step})
    return ranks


def test_each_rank_gets_its_own_part(tmp_path: Path) -> None:
    for rank, checkpoints in enumerate(saved(tmp_path, 3, 5, 10)):
        assert checkpoints.list_complete() == [5, 10]
        assert checkpoints.find_newest() == 10
        assert checkpoints.load(5) == ({"step": 5}, {"rank": rank, "step": 5})


def test_a_checkpoint_counts_once_everybody_has_written(tmp_path: Path) -> None:
    ranks = [Checkpoints(tmp_path, rank, 3, is_leader=rank == 0) for rank in range(3)]
    for rank in (1, 0, 2):
        assert ranks[0].list_complete() == []
        with pytest.raises(CheckpointError, match="no complete checkpoint"):
            ranks[0].find_newest()
        ranks[rank].save(4, {}, {})
    assert ranks[0].list_complete() == [4]


def test_a_checkpoint_without_its_shared_part_does_not_count(tmp_path: Path) -> None:
    (checkpoints,) = saved(tmp_path, 1, 4)
    (tmp_path / "step-00000004" / "shared.safetensors").unlink()
    assert checkpoints.list_complete() == []


def test_other_things_in_the_folder_are_no_checkpoints(tmp_path: Path) -> None:
    (checkpoints,) = saved(tmp_path, 1, 4)
    for name in ("step-", "step-x", "step-00000005", "steps", "other"):
        (tmp_path / name).mkdir()
    (tmp_path / "events.jsonl").write_text("{}")
    assert checkpoints.list_complete() == [4]
    assert Checkpoints(tmp_path / "absent", 0, 1, is_leader=True).list_complete() == []


def test_steps_are_ordered_by_number(tmp_path: Path) -> None:
    (checkpoints,) = saved(tmp_path, 1, 9, 100_000_000, 10, 99_999_999)
    assert checkpoints.list_complete() == [9, 10, 99_999_999, 100_000_000]


@pytest.mark.parametrize(("before", "after"), [(2, 3), (3, 2), (1, 4)])
def test_another_number_of_replicas_is_refused(before: int, after: int, tmp_path: Path) -> None:
    saved(tmp_path, before, 4)
    for rank in range(after):
        with pytest.raises(CheckpointError, match=f"saved by another number of replicas than {after}"):
            Checkpoints(tmp_path, rank, after, is_leader=rank == 0).load(4)


def test_any_number_of_replicas_goes_on_where_that_is_wanted(tmp_path: Path) -> None:
    """Those with a part of their own take it; others take that of rank 0, without what is its own."""
    for rank in range(2):
        own: State = {
            "random": rank,
            "sent": {"gradients": [rank]},
            "exchanges": {"reducer": {"0": rank}, "unused_local": {}},
        }
        Checkpoints(tmp_path, 0, 5, is_leader=False).with_ranks(rank, 2).save(3, {"step": 3}, own)
    read = [Checkpoints(tmp_path, rank, 3, is_leader=False, allows_any_size=True) for rank in range(3)]
    assert [one.find_newest() for one in read] == [3, 3, 3]
    (_, first), (_, second), (_, third) = (one.load(3) for one in read)
    assert (first["random"], second["random"], "random" in third) == (0, 1, False)
    assert second["exchanges"]["reducer"] == {"0": 1}
    assert third["exchanges"] == {"reducer": {}, "unused_local": {}}
    assert first["sent"] == third["sent"] == {}


@pytest.mark.parametrize("keep", [1, 2, 3])
def test_the_newest_are_kept(keep: int, tmp_path: Path) -> None:
    ranks = saved(tmp_path, 2, 1, 2, 3, 4, keep=keep)
    ranks[0].save(5, {}, {})  # not complete: it counts for nothing, and stays
    ranks[1].prune()
    assert ranks[0].list_complete() == [1, 2, 3, 4], "one of them prunes"
    ranks[0].prune()
    assert ranks[0].list_complete() == [1, 2, 3, 4][-keep:]
    assert (tmp_path / "step-00000005").exists()
    ranks[1].save(5, {}, {})
    assert ranks[0].find_newest() == 5


# --- optimizers -------------------------------------------------------------------------------------------------


def trained(optimizer: torch.optim.Optimizer, model: nn.Module, steps: range) -> None:
    for step in steps:
        inputs = torch.randn(4, 3, generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        model(inputs).square().sum().backward()
        optimizer.step()


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"momentum": 0.9, "weight_decay": 0.01},
        {"momentum": 0.9, "optimizer": "sgd(nesterov=True)"},
        {"optimizer": "adam"},
        {"optimizer": "adamw(betas=(0.8, 0.9))"},
    ],
    ids=str,
)
@pytest.mark.parametrize("frozen", [False, True])
def test_an_optimizer_goes_on_from_its_state(options: dict[str, Any], frozen: bool, tmp_path: Path) -> None:
    training = Training(steps=1, batch_size=1, learning_rate=0.05, **options)

    def fresh() -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
        model[0].weight.requires_grad_(not frozen)
        return model, training.make_optimizer(model.parameters())

    model, optimizer = fresh()
    trained(optimizer, model, range(3))
    save_tree(
        tmp_path / "tree", {"model": dict(model.state_dict()), "optimizer": get_optimizer_state(optimizer)}
    )
    trained(optimizer, model, range(3, 6))

    tree = load_tree(tmp_path / "tree")
    resumed, resumed_optimizer = fresh()
    resumed.load_state_dict(tree["model"])
    load_optimizer_state(resumed_optimizer, tree["optimizer"])
    trained(resumed_optimizer, resumed, range(3, 6))
    assert same_tree(dict(resumed.state_dict()), dict(model.state_dict()))


# --- whole replicas ---------------------------------------------------------------------------------------------


class Net(nn.Module):
    """Dropout, running statistics, a buffer that is not kept, and parameters."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.drop = nn.BatchNorm1d(6), nn.Dropout(0.3)
        self.layers = nn.Sequential(nn.Linear(6, width), nn.Linear(width, 1))
        self.register_buffer("scale", torch.full((1,), 0.5), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layers(self.drop(self.norm(x)))[:, 0] * self.scale
        return y


class Task(Quadratic):
    """A model with more to it than a point."""

    width = 5

    def build_model(self, generator: torch.Generator) -> nn.Module:
        with torch.random.fork_rng():
            torch.manual_seed(int(torch.randint(2**31, (1,), generator=generator)))
            return Net(self.width)

    def compute_losses(self, model: nn.Module, batch: Batch) -> Tensor:
        out: Tensor = model(batch.inputs)
        return (out - batch.targets).square()

    def compute_metrics(self, model: nn.Module, batch: Batch) -> Tensor:
        return -self.compute_losses(model, batch)


def replicas(
    folder: Path,
    steps: int,
    size: int = 2,
    width: int = 5,
    parts: dict[str, str] | None = None,
    **settings: Any,
) -> tuple[VirtualWorld, list[Replica]]:
    training = Training(
        **{
            "steps": steps,
            "batch_size": 4,
            "learning_rate": 0.05,
            "seed": 3,
            "checkpoint_every": 4,
            **settings,
        }
    )
    world, made = VirtualWorld(size), []
    for runtime in world.runtimes:
        task = Task(dim=6, samples=44)
        task.width = width
        rank = runtime.comm.rank
        checkpoints = Checkpoints(folder, rank, size, is_leader=rank == 0, num_kept=9)
        chosen = (
            parse_recipe("synchronous")
            .with_components(**parts or {})
            .build_components(3, rank if parts else None)
        )
        share = torch.arange(44).chunk(size)[rank] if parts else None
        made.append(Replica(runtime, task, training, chosen, Telemetry(rank), checkpoints, share=share))
    return world, made


def run(world: VirtualWorld, made: list[Replica]) -> list[dict[str, Tensor]]:
    world.run([replica.run() for replica in made])
    return [dict(replica.model.state_dict()) for replica in made]


@pytest.mark.parametrize(
    "options",
    [
        {"momentum": 0.9},
        {"optimizer": "adam"},
        {"parts": {"sampler": "grouped_importance(rule='fill', scored_by='loss')"}},
        {
            "parts": {
                "sampler": "grouped_importance(rule='half', scored_by='loss', statistics='uniform')",
                "schedule": "pipelined(width=3)",
            }
        },
        {
            "parts": {
                "sampler": "grouped_importance(rule='pool', scored_by='loss')",
                "schedule": "pipelined(width=3)",
            }
        },
    ],
    ids=str,
)
def test_a_resumed_run_is_the_run_that_was_never_stopped(options: dict[str, Any], tmp_path: Path) -> None:
    wanted = run(*replicas(tmp_path / "whole", 12, **options))
    run(*replicas(tmp_path / "parts", 8, **options))
    for start in (4, 8):
        world, resumed = replicas(tmp_path / "parts", 12, **options)
        assert resumed[0].checkpoints is not None
        assert {4, 8} <= set(resumed[0].checkpoints.list_complete())
        for replica in resumed:
            replica.resume(start)
            assert replica.completed_steps == start
        for got, want in zip(run(world, resumed), wanted, strict=True):
            assert same_tree(got, want)


def changed(replica: Replica) -> Callable[[], bool]:
    kept = {name: t.clone() for name, t in replica.model.state_dict().items()}
    return lambda: not same_tree(kept, dict(replica.model.state_dict()))


def test_a_checkpoint_of_another_model_is_refused_and_changes_nothing(tmp_path: Path) -> None:
    run(*replicas(tmp_path, 4))
    _, others = replicas(tmp_path, 8, width=7)
    for replica in others:
        touched = changed(replica)
        with pytest.raises(CheckpointError, match="is of another model"):
            replica.resume(4)
        assert not touched()


def test_a_checkpoint_of_more_replicas_is_refused_and_changes_nothing(tmp_path: Path) -> None:
    run(*replicas(tmp_path, 4))
    _, (alone,) = replicas(tmp_path, 8, size=1)
    touched = changed(alone)
    with pytest.raises(CheckpointError, match="another number of replicas than 1"):
        alone.resume(4)
    assert not touched()


@pytest.mark.parametrize("schedule", ["synchronous", "pipelined(width=3)"])
def test_a_checkpoint_whose_codec_keeps_something_else_is_refused(schedule: str, tmp_path: Path) -> None:
    parts = {"codec": "by_role(other=demo, convolution=topk)", "schedule": schedule}
    run(*replicas(tmp_path, 4, parts=parts))

    def older(tree: State) -> State:
        return {
            "momentum" if key == "components" else key: older(node) if isinstance(node, dict) else node
            for key, node in tree.items()
        }

    for path in tmp_path.rglob("rank-*"):
        save_tree(path, older(load_tree(path)))
    _, resumed = replicas(tmp_path, 8, parts=parts)
    with pytest.raises(
        CheckpointError, match=r"the reducer's state in the checkpoint lacks .*components: use"
    ):
        resumed[0].resume(4)


def test_a_folder_that_another_machine_prunes_meanwhile_does_not_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoints = Checkpoints(tmp_path, 0, 1, is_leader=True)
    for step in (1, 2):
        checkpoints.save(step, {"step": step}, {"step": step})
    glob = Path.glob

    def pruned(self: Path, pattern: str) -> list[Path]:
        found = sorted(glob(self, pattern))
        shutil.rmtree(tmp_path / "step-00000001", ignore_errors=True)
        return found

    monkeypatch.setattr(Path, "glob", pruned)
    assert checkpoints.list_complete() == [2]
