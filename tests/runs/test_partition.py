"""``--partition``: each replica has its own share of the training set, the same everywhere, and after a resume."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest
import torch
from torch import Tensor

from farflung.errors import BadInput, CheckpointError, ConfigError
from farflung.loop import Replica
from farflung.runs import RunConfig, RunFolder, make_replica
from farflung.sim import VirtualWorld
from farflung.types import Json, SampleIds
from tests.forks import farflung
from tests.helpers import same_tree
from tests.refusals import refuse

QUADRATIC: dict[str, Json] = {
    "workload": "synthetic/quadratic",
    "steps": 12,
    "batch_size": 8,
    "momentum": 0.9,
}


def configured(**given: Json) -> RunConfig:
    return RunConfig.resolve(QUADRATIC, given)


def replicas(config: RunConfig, folder: RunFolder | None = None) -> tuple[VirtualWorld, list[Replica]]:
    """The replicas of a run in virtual time, made as the command makes them."""
    world = VirtualWorld(config.workers)
    shares = config.make_shares()
    made = [
        make_replica(
            runtime,
            config.task,
            config.recipe,
            config.training,
            shares=shares,
            checkpoints=None
            if folder is None
            else folder.get_checkpoints(rank, config.workers, is_leader=rank == 0),
        )
        for rank, runtime in enumerate(world.runtimes)
    ]
    return world, made


def drawn(config: RunConfig) -> list[list[int]]:
    """The training samples that each replica of a run takes, in order."""
    world, made = replicas(config)
    taken: list[list[int]] = [[] for _ in made]

    async def train(rank: int, replica: Replica) -> None:
        commit = replica.components.stream.commit

        def note(ids: SampleIds, *, step: int) -> None:
            commit(ids, step=step)
            taken[rank] += (ids if replica.share is None else replica.share[ids]).tolist()

        replica.components.stream.commit = note  # type: ignore[method-assign]
        await replica.run()

    world.run([train(rank, replica) for rank, replica in enumerate(made)])
    return taken


def parameters(replica: Replica) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in replica.model.state_dict().items()}


@pytest.mark.parametrize("how", ["iid", "labels(k=5)", "dirichlet(alpha=0.1)", "by-order"])
def test_each_replica_draws_from_its_share_alone(how: str) -> None:
    config = configured(workers=2, partition=how)
    shares = config.make_shares()
    assert shares is not None
    for own, share in zip(drawn(config), shares, strict=True):
        assert len(own) == 12 * 8
        assert set(own) <= set(share.tolist())
        assert len(set(own)) == len(own), "not yet through the first pass"


def test_shared_is_one_pass_for_all() -> None:
    config = configured(workers=2)
    assert config.make_shares() is None
    one, other = drawn(config)
    assert len({*one, *other}) == 2 * 12 * 8


@pytest.mark.parametrize("how", [None, "iid"])
def test_samples_that_change_owner_have_one_before(how: str | None) -> None:
    config = configured(workers=3, partition=how, sharing="resharding(by='uniform', samples=4, every=3)")
    shares = config.make_shares()
    assert shares is not None
    pairs = zip(shares, configured(workers=3, partition="iid").make_shares() or [], strict=True)
    assert all(torch.equal(one, other) for one, other in pairs)
    assert config.partition_text == "iid"
    assert config.to_json()["partition"] == "iid"
    world, made = replicas(config)
    world.run([replica.run() for replica in made])
    assert made[0].sent_nbytes > 0
    unlike = configured(workers=3, partition="by-order", sharing="resharding(by='uniform')")
    assert unlike.partition_text == "by-order"


def test_a_pass_is_over_the_replicas_own_share() -> None:
    config = configured(workers=2, partition="dirichlet(alpha=0.1)", steps=200)
    shares = config.make_shares()
    assert shares is not None
    sizes = [len(share) for share in shares]
    assert sizes[0] != sizes[1]
    for own, size in zip(drawn(config), sizes, strict=True):
        for begin in range(0, len(own) - size, size):
            assert len(set(own[begin : begin + size])) == size


def test_a_share_smaller_than_a_batch_is_in_it_several_times() -> None:
    config = configured(workers=4, partition="iid", steps=2, batch_size=600)
    shares = config.make_shares()
    assert shares is not None
    for own, share in zip(drawn(config), shares, strict=True):
        assert len(share) == 256
        assert len(own) == 2 * 600
        first = Counter(own[:600])
        assert first.keys() == set(share.tolist())
        assert set(first.values()) == {2, 3}
        assert set(Counter(own[: 4 * 256]).values()) == {4}, "passes run on from batch to batch"


def test_replicas_go_through_their_shares_in_orders_of_their_own() -> None:
    config = configured(workers=2, partition="by-order", steps=20)
    one, other = drawn(config)
    assert [number - 512 for number in other] != one


@pytest.mark.parametrize(("seed", "same"), [(0, True), (1, False)])
def test_the_split_depends_on_the_seed(seed: int, same: bool) -> None:
    first, second = configured(workers=3, partition="iid"), configured(workers=3, partition="iid", seed=seed)
    pairs = zip(first.make_shares() or [], second.make_shares() or [], strict=True)
    assert [torch.equal(one, other) for one, other in pairs] == [same] * 3


# --- resuming ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["labels(k=5)", "shared"])
def test_a_resumed_run_ends_with_the_same_bits(tmp_path: Path, how: str) -> None:
    ends = []
    for name, stops in [("whole", [60]), ("broken", [25, 60])]:
        folder = RunFolder(tmp_path / name)
        for steps in stops:  # passes of 128 samples, so that a cursor in the middle of a later one is kept
            config = configured(workers=4, partition=how, steps=steps, evaluate_every=0, checkpoint_every=0)
            world, made = replicas(config, folder)
            if steps != stops[0]:
                for replica in made:
                    replica.resume(25)
            world.run([replica.run() for replica in made])
        ends.append(parameters(made[0]))
    assert same_tree(*ends)


@pytest.mark.parametrize("change", [{"partition": "iid"}, {"partition": "shared"}, {"seed": 1}], ids=str)
def test_another_share_is_refused(tmp_path: Path, change: dict[str, Json]) -> None:
    folder = RunFolder(tmp_path)
    config = configured(workers=2, partition="labels(k=5)", steps=1)
    with folder.begin_run(config.to_json()):
        pass
    world, made = replicas(config, folder)
    world.run([replica.run() for replica in made])
    configured(workers=2, partition="labels(k=5)").check_resumable(folder)
    other = RunConfig.resolve(config.to_json(), {"steps": 2, **change})
    with pytest.raises(
        CheckpointError, match="drew from another share of the data; resume with the --partition"
    ):
        other.check_resumable(folder)
    _, made = replicas(other, folder)
    with pytest.raises(CheckpointError, match="drew from another share"):
        made[0].resume(1)


# --- what cannot be ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("how", "says"),
    [
        ("lables", "unknown partition 'lables'; did you mean labels?"),
        ("labels(k=1)", "2 parts of 1 labels leave 8 of 10 labels out"),
        ("labels(k=0)", "partition labels: k 0 must be at least 1"),
        ("labels(n=1)", "partition 'labels(n=1)': "),
        ("dirichlet(alpha=-1)", "partition dirichlet: alpha -1 must be a number of at least 1e-06"),
        ("iid(", "write it as name or name(option=value)"),
    ],
)
def test_bad_partitions(capsys: pytest.CaptureFixture[str], how: str, says: str) -> None:
    assert says in refuse(capsys, "train", "--workload", "synthetic/quadratic", "--partition", how)


def test_a_replica_without_samples_is_refused() -> None:
    config = configured(workers=1100, partition="labels(k=1)")
    with pytest.raises(BadInput, match="cannot split 1024 samples into 1100 parts"):
        config.make_shares()
    config = configured(workers=1020, partition="labels(k=2)")
    with pytest.raises(ConfigError, match=r"--partition labels\(k=2\): replica \d+ gets no sample"):
        config.check()
    world = VirtualWorld(1)
    config = configured(workers=1)
    nothing = torch.empty(0, dtype=torch.int64)
    with pytest.raises(ConfigError, match="replica 0 has no training sample"):
        make_replica(world.runtimes[0], config.task, config.recipe, config.training, shares=[nothing])


# --- the command ------------------------------------------------------------------------------------------------


@pytest.mark.thorough
def test_shares_are_shown_and_summed_up(tmp_path: Path) -> None:
    out = tmp_path / "run"
    options = [
        "--workload", "synthetic/quadratic", "--workers", "2", "--steps", "3", "--batch-size", "4",
        "--partition", "labels(k=5)",
    ]  # fmt: skip
    with farflung("train", *options, "--out", str(out)) as process:
        _, shown = process.finished()
    assert process.returncode == 0
    assert "labels(k=5): 1,024 training samples on 2 replicas" in "\n".join(shown)
    assert "1 510 · · · · · 102 102 102 102 102" in " ".join(" ".join(shown).split())
    split = {
        "partition": "labels(k=5)",
        "shares": [
            {"samples": 514, "labels": [103, 103, 103, 103, 102, 0, 0, 0, 0, 0]},
            {"samples": 510, "labels": [0, 0, 0, 0, 0, 102, 102, 102, 102, 102]},
        ],
    }
    assert json.loads((out / "summary.json").read_text())["partition"] == split
    assert json.loads((out / "config.json").read_text())["partition"] == "labels(k=5)"

    with farflung("train", "--resume", str(out), "--steps", "5", "--json") as process:
        said, shown = process.finished()
    assert json.loads(said)["partition"] == split
    assert json.loads(said)["steps"] == 5
    assert shown == []
