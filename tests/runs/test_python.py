"""Runs from Python: what the commands do, as functions that give back objects, with parts of a user's own."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import farflung
from farflung.cli.main import main
from farflung.errors import ConfigError, UnknownName
from farflung.faults import FaultPlan
from farflung.network import Link, NetworkProfile, find_network
from farflung.runs import RunConfig, SimulatedConfig
from farflung.schedules import Synchronous
from farflung.state_trees import load_tree
from tests.helpers import same_tree
from tests.runs.own import Coarse, Late, OwnOrder, halves

SMALL: dict[str, Any] = {"steps": 6, "batch_size": 4, "workers": 2, "evaluate_every": 3}
OWN = farflung.Recipe(codec=Coarse(unit=0.01), schedule=Late(steps=2))


def options(settings: dict[str, Any]) -> list[str]:
    return [word for name, value in settings.items() for word in (f"--{name.replace('_', '-')}", str(value))]


def told(folder: Path) -> dict[str, bytes]:
    """Everything in a folder."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


# --- one run ------------------------------------------------------------------------------------------------------


def test_simulate_leaves_what_the_command_leaves(tmp_path: Path) -> None:
    settings = {**SMALL, "network": "wifi-10mbps", "partition": "labels(k=5)"}
    run = farflung.simulate(
        "synthetic/quadratic", "ring(codec=int8, learning_rate=0.05)", out=tmp_path / "function", **settings
    )
    command = ["--workload", "synthetic/quadratic", "--recipe", "ring", "--codec", "int8", *options(settings)]
    assert (
        main(["simulate", *command, "--learning-rate", "0.05", "--out", str(tmp_path / "command"), "--quiet"])
        == 0
    )
    assert told(tmp_path / "function") == told(tmp_path / "command")
    assert run.folder == tmp_path / "function"
    assert run.summary == json.loads((run.folder / "summary.json").read_text())
    assert [event["event"] for event in run.events[1]][-1] == "end"


def test_a_run_without_a_folder_takes_its_files_with_it(tmp_path: Path) -> None:
    run = farflung.simulate("synthetic/quadratic", **SMALL)
    assert "simulated times" in str(run)
    kept, folder = run.copy_to(tmp_path / "kept"), run.folder
    assert told(kept) == told(folder)
    del run
    assert not folder.exists()


def test_the_model_is_the_one_that_was_evaluated() -> None:
    """Also where updates are late."""
    for recipe in ("synchronous", "dga"):
        run = farflung.simulate("synthetic/quadratic", recipe, **SMALL)
        task = run.config.task
        model = task.build_model(torch.Generator())
        model.load_state_dict(run.state_dict())
        data, _ = task.load_datasets()
        batch = data.take(torch.arange(len(data)), train=False)
        assert float(task.compute_losses(model, batch).detach().mean()) == pytest.approx(
            run.summary["final_loss"], rel=1e-5
        )


def test_buffers_of_the_model_are_averaged() -> None:
    data = torch.utils.data.TensorDataset(torch.randn(64, 3), torch.randint(2, (64,)))
    task = farflung.TorchWorkload(
        lambda: nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 2)), data, data, nn.functional.cross_entropy
    )
    run = farflung.simulate(task, **SMALL)
    means = [
        load_tree(run.folder / "checkpoints" / "step-00000006" / f"rank-{rank}-of-2.safetensors")["buffers"][
            "0.running_mean"
        ]
        for rank in (0, 1)
    ]
    assert not torch.equal(*means)
    assert torch.allclose(run.state_dict()["0.running_mean"], (means[0] + means[1]) / 2)


def test_a_run_goes_on_and_is_retimed(tmp_path: Path) -> None:
    whole = farflung.simulate("synthetic/quadratic", "ring", **SMALL)
    farflung.simulate("synthetic/quadratic", "ring", out=tmp_path / "run", **{**SMALL, "steps": 3})
    broken = farflung.simulate(resume=tmp_path / "run", steps=6)
    assert broken.config.recipe.name == "ring"
    assert same_tree(broken.state_dict(), whole.state_dict())
    slow = NetworkProfile.create_uniform(Link(0.5, 1e6))
    elsewhere = farflung.retime(whole, network=slow)
    fresh = farflung.simulate("synthetic/quadratic", "ring", network=slow, **SMALL)
    assert elsewhere.events == fresh.events
    assert elsewhere.summary == fresh.summary
    assert same_tree(elsewhere.state_dict(), whole.state_dict())
    with pytest.raises(ConfigError, match="the run was resumed"):
        farflung.retime(broken, network="4g")


def test_objects_are_settings() -> None:
    plan = FaultPlan().throttle(1, bandwidth_bps=1e5, at_s=0.0)
    plain: dict[str, Any] = {"network": "wifi-10mbps", "device": "raspberry-pi-4"}
    text = farflung.simulate("synthetic/quadratic", **SMALL, **plain)
    profile = farflung.simulate(
        "synthetic/quadratic", **SMALL, **{**plain, "network": find_network("wifi-10mbps")}
    )
    assert profile.events == text.events
    throttled = farflung.simulate("synthetic/quadratic", **SMALL, **plain, faults=plan)
    assert throttled.summary["duration_s"] > text.summary["duration_s"]  # type: ignore[operator]


# --- parts of one's own -------------------------------------------------------------------------------------------


def test_own_parts_reach_both_worlds_and_end_with_the_same_bits(tmp_path: Path) -> None:
    virtual = farflung.simulate(halves, OWN, **SMALL)
    assert virtual.config.to_json()["codec"] == "tests.runs.own:Coarse(unit=0.01)"
    real = farflung.train(halves, OWN, out=tmp_path / "real", **SMALL)
    assert same_tree(real.state_dict(), virtual.state_dict())
    assert real.summary["bytes_sent_per_replica"] == virtual.summary["bytes_sent_per_replica"]
    stored = json.loads((tmp_path / "real" / "config.json").read_text())
    again = farflung.simulate(**stored)
    assert same_tree(again.state_dict(), virtual.state_dict()), "text makes the same parts"


def test_own_parts_have_text_for_commands() -> None:
    texts: dict[str, Any] = {
        "codec": "tests.runs.own:Coarse(unit=0.01)",
        "schedule": "tests.runs.own:Late(steps=2)",
    }
    one = farflung.simulate("tests.runs.own:halves(side=8)", **texts, **SMALL)
    other = farflung.simulate(halves, OWN, **SMALL)
    assert same_tree(one.state_dict(), other.state_dict())
    nested = farflung.simulate(
        halves, "ring(codec=error_feedback(tests.runs.own:Coarse(0.01)), learning_rate=0.1)", **SMALL
    )
    assert nested.config.recipe.codec == "error_feedback(tests.runs.own:Coarse(0.01))"


def test_a_sampler_is_what_makes_one() -> None:
    plain = farflung.simulate(halves, **SMALL)
    same = farflung.simulate(halves, farflung.Recipe(sampler=OwnOrder), **SMALL)
    other = farflung.simulate(halves, farflung.Recipe(sampler=functools.partial(OwnOrder, turn=1)), **SMALL)
    assert same_tree(plain.state_dict(), same.state_dict())
    assert not same_tree(plain.state_dict(), other.state_dict())
    assert other.config.to_json()["sampler"] == "tests.runs.own:OwnOrder(turn=1)"


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"workload": halves()}, r"workload <own/Linear>: workers in processes of their own can only import it"),
        ({"workload": lambda: halves(4)}, "workload <.*lambda.*>: workers in processes"),
        ({"workload": "synthetic/quadratic",
          "recipe": farflung.Recipe(codec=type("Here", (Coarse,), {"__qualname__": "f.<locals>.Here"})())},
         "codec <.*>: workers in processes"),
    ],
    ids=["object", "lambda", "local"],
)  # fmt: skip
def test_what_cannot_be_carried_is_refused_by_name(
    tmp_path: Path, settings: dict[str, Any], says: str
) -> None:
    with pytest.raises(ConfigError, match=says) as refused:
        farflung.train(out=tmp_path / "run", **settings, **SMALL)
    assert len(str(refused.value).splitlines()) == 1
    assert not (tmp_path / "run").exists()
    farflung.simulate(**settings, **SMALL)


def test_what_was_an_object_has_to_be_given_again(tmp_path: Path) -> None:
    task = halves()
    farflung.simulate(task, out=tmp_path / "run", **SMALL)
    with pytest.raises(ConfigError, match=r"workload <own/Linear>: the run was made with an object"):
        farflung.simulate(resume=tmp_path / "run", steps=8)
    assert farflung.simulate(task, resume=tmp_path / "run", steps=8).summary["steps"] == 8


class Structural:
    """Has the methods of a schedule that plan, and derives from nothing."""

    plan = Synchronous.plan

    def __repr__(self) -> str:
        return "Structural()"


@pytest.mark.parametrize(
    ("settings", "error", "says"),
    [
        ({"learning_rat": 0.1}, ConfigError, "unknown setting 'learning_rat'; did you mean learning_rate?"),
        ({"steps": "many"}, ConfigError, "steps must be a whole number, not 'many'"),
        ({"steps": True}, ConfigError, "steps must be a whole number, not True"),
        ({"codec": 16}, ConfigError, r"codec 16: it has no method encode\(\)"),
        ({"schedule": Coarse}, ConfigError, r"schedule Coarse\(unit=0.001\): its class has to derive"),
        ({"schedule": Structural()}, ConfigError, "its class has to derive from farflung.types.Schedule"),
        ({"codec": "tests.runs.own:Course"}, ConfigError, "codec 'tests.runs.own:Course': cannot be imported"),
        ({"codec": "tests.runs.absent:X"}, ConfigError, "cannot be imported"),
        ({"codec": "tests.runs.own:Coarse(unite=1)"}, ConfigError, "unexpected keyword argument 'unite'"),
        ({"workload": "tests.runs.own:Coarse"}, ConfigError, "is no workload: it has no name, defaults"),
        ({"workload": "synthetic/cubic"}, UnknownName, "unknown workload 'synthetic/cubic'"),
        ({"recipe": "sinchronous"}, UnknownName, "unknown recipe 'sinchronous'"),
        ({"workload": halves(), "data": "full"}, ConfigError, "--data full"),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "",
)  # fmt: skip
def test_what_is_wrong_is_one_line(settings: dict[str, Any], error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says) as refused:
        farflung.simulate(**{"workload": "synthetic/quadratic", **SMALL, **settings})
    assert len(str(refused.value).splitlines()) == 1


# --- comparisons --------------------------------------------------------------------------------------------------


def test_objects_are_compared(tmp_path: Path) -> None:
    comparison = farflung.compare(
        {"plain": "synchronous", "own": OWN, "ring": "ring(codec=int8)"},
        ["wifi-10mbps", NetworkProfile.create_uniform(Link(0.1, 1e6))],
        workload=halves(),
        **{**SMALL, "evaluate_every": 2},
    )
    assert [row.recipe for row in comparison.rows] == ["plain", "own", "ring"] * 2
    assert "own" in str(comparison)
    assert str(comparison).startswith("Simulated. Time to accuracy")
    assert comparison.draw_picture(tmp_path / "compare.png").read_bytes().startswith(b"\x89PNG")
    assert len(comparison.runs) == 6
    assert {row.network for row in comparison.rows} == {"wifi-10mbps", "uniform"}


# --- one definition -----------------------------------------------------------------------------------------------


def test_a_field_of_the_training_is_a_setting_everywhere() -> None:
    fields = set(farflung.config.Training.__dataclass_fields__)
    for kind in (RunConfig, SimulatedConfig):
        assert fields <= set(kind.list_settings())
        assert set(kind.list_settings()) == set(kind.resolve({"workload": "synthetic/quadratic"}).to_json())
