"""Settings in a file: the same keys as options, the command line first, and one line for what is wrong."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from farflung.cli.main import main
from farflung.cli.options import read_settings
from farflung.cli.train import Train
from farflung.coded.coordinator import Settings
from farflung.coded.run import Learner
from farflung.comm import Endpoint
from farflung.config import Training, list_settings
from farflung.recipes import Recipe
from farflung.runs import PreparedRun, RunConfig, RunFolder, RunOptions, SimulatedConfig, prepare_training
from farflung.types import Json
from tests.refusals import refuse

KNOWN = {
    name: one
    for name, one in list_settings(Train).items()
    if name not in ("config", "resume", *Train.ignored_keys)
}
DOCUMENTED = (Path(__file__).parents[2] / "docs" / "configuration.md").read_text(encoding="utf-8")


class Started(Exception):
    """A run would have been started."""


@pytest.fixture
def resolved(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What a run would have been started with, once ``farflung train`` has been called."""
    seen: dict[str, Any] = {}

    def instead(run: PreparedRun[RunConfig], **how: object) -> None:
        seen.update(run.config.to_json(), folder=run.files.path)
        raise Started

    monkeypatch.setattr("farflung.runs.begin_training", instead)
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    return seen


def train(*options: str) -> None:
    with pytest.raises(Started):
        main(["train", *options])


def written(folder: Path, text: str, name: str = "run.toml") -> str:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return str(path)


def test_options_have_the_types_that_files_are_checked_against() -> None:
    assert KNOWN.keys() == {field.name for field in fields(Train)} - {"config", "resume"} - Train.ignored_keys
    assert set(RunConfig.list_settings().keys()) <= KNOWN.keys()
    kinds = {"steps": int, "learning_rate": float, "codec": str, "out": Path, "json": bool}
    assert {name: KNOWN[name].kind for name in kinds} == kinds


@pytest.mark.parametrize(
    "owner", [Endpoint, Learner, Recipe, RunOptions, Settings, SimulatedConfig, Training]
)
def test_each_setting_is_explained_in_the_docstring(owner: type) -> None:
    settings = list_settings(owner)
    assert settings
    assert [name for name, setting in settings.items() if not setting.description] == []


def test_keys_are_options_with_either_hyphen(tmp_path: Path, resolved: dict[str, Any]) -> None:
    file = written(
        tmp_path,
        'workload = "synthetic/quadratic"\nsteps = 7\nbatch-size = 3\nlearning_rate = 1\nout = "there"\nquiet = true\n',
    )
    train("--config", file)
    assert {name: resolved[name] for name in ("workload", "steps", "batch_size", "learning_rate")} == {
        "workload": "synthetic/quadratic", "steps": 7, "batch_size": 3, "learning_rate": 1.0,
    }  # fmt: skip
    assert isinstance(resolved["learning_rate"], float)
    assert resolved["folder"] == Path("there")
    assert resolved["evaluate_every"] == 1, "defaults follow what the file says"


def test_the_command_line_wins(tmp_path: Path, resolved: dict[str, Any]) -> None:
    file = written(
        tmp_path,
        'workload = "synthetic/quadratic"\nsteps = 7\nseed = 3\nout = "there"\ncodec = "truncate16"\n',
    )
    train("--config", file, "--steps", "9", "--seed", "0", "--out", "here")
    assert (resolved["steps"], resolved["seed"], resolved["codec"]) == (9, 0, "truncate16")
    assert resolved["folder"] == Path("here")
    train("--config", file, "--recipe", "ring")
    assert (resolved["codec"], resolved["collective"]) == ("identity", "ring")


def test_the_command_line_switches_off_what_a_file_switches_on(
    tmp_path: Path, resolved: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    text = 'workload = "synthetic/quadratic"\nencrypt = true\nquiet = true\ndata_stays = true\n'
    file = written(tmp_path, text)
    train("--config", file)
    assert resolved["encrypt"] is True
    train("--config", file, "--no-encrypt")
    assert resolved["encrypt"] is False
    started: list[tuple[bool | None, bool | None]] = []

    def start(self: Train, run: object) -> int:
        started.append((self.quiet, self.data_stays))
        return 0

    monkeypatch.setattr(Train, "start", start)
    assert main(["train", "--config", file, "--no-quiet"]) == 0
    assert started == [(False, True)]


def test_a_stored_configuration_repeats_the_run(tmp_path: Path, resolved: dict[str, Any]) -> None:
    config = RunConfig.resolve(
        {
            "workload": "synthetic/quadratic",
            "workers": 3,
            "recipe": "ring",
            "partition": "iid",
            "encrypt": True,
        }
    )
    with RunFolder(tmp_path / "one").begin_run(config.to_json()):
        pass
    train("--config", str(tmp_path / "one" / "config.json"), "--out", str(tmp_path / "two"))
    assert {k: v for k, v in resolved.items() if k != "folder"} == config.to_json()


def test_a_file_beside_resume_changes_settings(tmp_path: Path) -> None:
    stored: dict[str, Json] = {
        "workload": "synthetic/quadratic",
        "steps": 5,
        "codec": "truncate16",
        "seed": 4,
    }
    filed: dict[str, Json] = {"steps": 6, "recipe": "ring"}
    config = RunConfig.resolve(stored, filed, {"steps": 8})
    assert (config.steps, config.seed, config.recipe.codec, config.recipe.collective) == (
        8,
        4,
        "identity",
        "ring",
    )


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("step = 3", "unknown key 'step'; did you mean steps?"),
        ("zzz = 3", "unknown key 'zzz'; known: advertise, batch_size, "),
        ('resume = "there"', "unknown key 'resume'"),
        ("[training]\nsteps = 3", "unknown key 'training'"),
        ('steps = "many"', "steps must be a whole number, not 'many'"),
        ("steps = 3.0", "steps must be a whole number, not 3.0"),
        ("steps = true", "steps must be a whole number, not True"),
        ("steps = [3]", "steps must be a whole number, not [3]"),
        ('learning-rate = "0.1"', "learning-rate must be a number, not '0.1'"),
        ("learning-rate = false", "learning-rate must be a number, not False"),
        ("codec = 16", "codec must be text, in quotes, not 16"),
        ("out = 1", "out must be a path, in quotes, not 1"),
        ('out = ""', "out must be a path, in quotes, not ''"),
        ("quiet = 1", "quiet must be true or false, not 1"),
        ("batch-size = 3\nbatch_size = 3", "'batch_size' is there twice, with - and with _"),
        ("steps = ", "not TOML ("),
    ],
)
def test_one_line_names_file_and_key(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, text: str, says: str
) -> None:
    file = written(tmp_path, text)
    assert refuse(capsys, "train", "--config", file).startswith(f"farflung: {file}: {says}")


def test_files_that_are_none(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "binary.toml").write_bytes(b"\xff\xfe")
    for path, says in [
        (tmp_path / "absent.toml", "cannot be read (No such file or directory)"),
        (tmp_path, "cannot be read (Is a directory)"),
        (tmp_path / "binary.toml", "not TOML ("),
        (Path(written(tmp_path, '{"steps": ', "cut.json")), "not JSON ("),
        (Path(written(tmp_path, "[1, 2]", "list.json")), "expected keys and values, found list"),
    ]:
        assert refuse(capsys, "train", "--config", path).startswith(f"farflung: {path}: {says}")


def test_what_is_out_of_range_is_said_as_for_options(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = written(tmp_path, "steps = 0")
    assert main(["train", "--config", path]) == 2
    assert capsys.readouterr().err == f"farflung: {path}: --steps 0: must be 1 or more\n"


def test_the_documented_example_has_every_key_and_can_be_read(tmp_path: Path) -> None:
    (example,) = re.findall(r"```toml\n(.*?)```", DOCUMENTED, re.DOTALL)
    whole = re.sub(r'^# (\w+ = ")', r"\1", example, flags=re.MULTILINE)
    settings = read_settings(Path(written(tmp_path, whole)), KNOWN)
    assert settings.keys() == KNOWN.keys()
    default = RunConfig.resolve({}).to_json()
    for line in example.splitlines():
        if "# the default" in line:
            name = line.split("=")[0].strip().replace("-", "_")
            assert settings[name] == default.get(name, False), line


def test_torchrun_says_how_many_workers(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "3")
    assert prepare_training({}, options=RunOptions(out=tmp_path)).config.workers == 3
    assert prepare_training({"workers": 3}, options=RunOptions(out=tmp_path)).config.workers == 3
    assert main(["train", "--workers", "2"]) == 2
    assert capsys.readouterr().err == "farflung: --workers 2: torchrun has started 3\n"
    of_a_file = prepare_training({"workers": 2}, {}, options=RunOptions(out=tmp_path))
    assert of_a_file.config.workers == 3, "a file is for any number"


@pytest.mark.parametrize("encrypt", [False, True])
def test_an_endpoint_that_encrypts_is_a_setting_of_the_run(tmp_path: Path, encrypt: bool) -> None:
    options = RunOptions(out=tmp_path, endpoint=Endpoint(encrypt=encrypt))
    assert prepare_training({"workers": 2}, options=options).config.encrypt is encrypt
