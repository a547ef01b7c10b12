"""Bad input: one clear message, exit code 2, never a traceback."""

from __future__ import annotations

import errno
import json
import os
import shutil
from pathlib import Path

import pytest
import torch

from farflung.cli.main import COMMANDS, main
from farflung.comm.interface import check_host
from farflung.comm.keys import load_keys
from farflung.errors import ConfigError
from farflung.lab.stage import SUPPORTED_FAULTS
from farflung.runs import RunConfig, RunFolder, make_replica
from farflung.sim import VirtualWorld
from farflung.state_trees import load_tree, save_tree
from tests.refusals import refuse


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["train", "--pace", "nowhere"], "unknown device 'nowhere'"),
        (["train", "--network", "4g"], "farflung lab --network 4g train ..."),
        (
            ["train", "--data-stays", "--sharing", "injection"],
            "--sharing injection sends samples to other replicas: leave out --data-stays, or choose --sharing none",
        ),
        (
            ["train", "--data-stays", "--recipe", "mercury"],
            "--data-stays: --sharing resharding sends samples",
        ),
        (
            ["train", "--data-stays", "--sharing", "resharding(by='uniform')"],
            "--data-stays: --sharing resharding(by='uniform') sends samples",
        ),
        (["simulate", "--sharing", "resharding"], "UniformSampler knows nothing: choose another --sampler"),
        (
            ["simulate", "--sharing", "resharding(by='uniform')", "--stream", "rate(20)"],
            "leave out one of --sharing and --stream",
        ),
        (["train", "--keys", "here"], "--keys and --connections are for several machines"),
        (
            ["train", "--port", "7000"],
            "--interface, --port, --advertise, --keys and --connections are for several",
        ),
        (["train", "--device", "cuda"], "--device cuda: "),
        (["simulate", "--network", "nowhere"], "unknown network 'nowhere'"),
    ],
)
def test_nothing_is_said_before_a_refusal(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, args: list[str], says: str
) -> None:
    given = [
        "--workload",
        "synthetic/quadratic",
        "--partition",
        "labels(k=5)",
        "--out",
        str(tmp_path / "run"),
    ]
    said = refuse(capsys, *args, *given)
    assert says in said
    assert len(said.splitlines()) == 1
    assert not (tmp_path / "run").exists()


def test_data_that_stays_is_not_computed_elsewhere(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    words = ["--workload", "synthetic/quadratic", "--sampler", "balanced", "--out", tmp_path / "run"]
    said = refuse(capsys, "train", "--data-stays", *words)
    assert "--data-stays: --sampler balanced has samples computed by other replicas" in said


def test_help_of_a_lab_names_all_its_faults(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["lab", "--help"])
    words = " ".join(capsys.readouterr().out.split())
    listed = words.partition("TOML file with faults: ")[2].partition(".")[0].replace("│", "")
    assert {*"".join(listed.split()).split(",")} == SUPPORTED_FAULTS


@pytest.mark.parametrize("count", ["65", "9" * 400, "9" * 5000])
def test_more_connections_than_a_replica_can_have(capsys: pytest.CaptureFixture[str], count: str) -> None:
    words = ["--workload", "synthetic/quadratic", "--connections", count]
    assert "must be from 1 to 64, or auto" in refuse(capsys, "simulate", *words)


@pytest.mark.parametrize("host", ["x..y", "x" * 70])
def test_host_whose_name_cannot_be_one(host: str) -> None:
    with pytest.raises(ConfigError, match="--peer: unknown host"):
        check_host(host, "--peer")


@pytest.mark.parametrize("command", COMMANDS)
def test_help_names_kinds_of_values_as_people_would(capsys: pytest.CaptureFixture[str], command: str) -> None:
    with pytest.raises(SystemExit):
        main([command, "--help"])
    said = capsys.readouterr().out
    assert "None" not in said
    assert ":mod:" not in said


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (
            ["--workload", "fashion-mnist/ccn"],
            "unknown workload 'fashion-mnist/ccn'; did you mean fashion-mnist/cnn?\n",
        ),
        (["--codec", "truncate15"], "unknown codec 'truncate15'; did you mean truncate16?\n"),
        (["--codec", "truncate16(bits=3)"], "codec 'truncate16(bits=3)': "),
        (["--codec", "topk(densty=0.1)"], "'densty'; did you mean density? topk takes density=0.01\n"),
        (
            ["--codec", "dgc(0.1, 2, 3, 4, 5)"],
            "dgc takes density=0.001, momentum=0.9, nesterov=False, warmup_steps=500\n",
        ),
        (["--codec", "truncate16("], "write it as name or name(option=value)"),
        (["--collective", "native", "--codec", "truncate16"], "'native' cannot carry a codec"),
        (["--reducer", "powersgd", "--codec", "int8"], "reducer powersgd takes no codec"),
        (["--reducer", "codec(phases='three')"], "phases 'three' must be "),
        (["--reducer", "codec(collective='ring')"], "collective is a setting of its own"),
        (["--reducer", "powersgd", "--collective", "native"], "'native' matches sums by their order"),
        (["--codec", "topk(density={[]: 1})"], "write it as name or name(option=value)"),
        (["--workers", "0"], "--workers 0: must be 1 or more"),
        (
            ["--workers", "10001", "--data", "packaged"],
            "--workers 10001: fashion-mnist/cnn has 10000 training samples",
        ),
        (["--steps", "0"], "--steps 0: must be 1 or more"),
        (["--seed", "-1"], "--seed -1: must be 0 or more"),
        (
            ["--batch-size", "10001", "--data", "packaged"],
            "--batch-size 10001: fashion-mnist/cnn has 10000 training samples",
        ),
        (
            ["--recipe", "dga", "--workers", "1"],
            "delayed averages replicas, and there is one: use --workers 2",
        ),
        (["--codec", "error_feedback(error_feedback(topk))"], "keeps the same residual twice: use one"),
        (["--out", ""], "--out: must be PATH, not ''; see farflung train --help"),
        (["--replay", "."], ".: cannot be read (Is a directory)"),
        (["--steps", "many"], "--steps: must be INT, not 'many'; see farflung train --help\n"),
        (["--stepps", "3"], "Unrecognized options: --stepps, 3; did you mean --steps?\n"),
        (["--learning-rate", "-1"], "--learning-rate -1.0: must be a number above 0"),
        (["--momentum", "1"], "--momentum 1.0: must be in [0, 1)"),
        (
            ["--optimizer", "sgd(nesterov=True)", "--momentum", "0"],
            "Nesterov's momentum needs a --momentum above 0",
        ),
        (["--bucket-nbytes", "0"], "bucket_nbytes 0 must be at least 1"),
        (["--device", "abacus"], "--device abacus: must be cpu, cuda "),
        (["--deadline", "0"], "--deadline 0.0: must be a number of seconds above 0"),
        (["--threads", "-1"], "--threads -1: must be 1 or more, or 0 to leave it to the machine"),
        (["--data", "elsewhere"], "elsewhere"),
        (["--resume", "nowhere"], "nowhere: no run there (config.json is missing)"),
        (["--stream", "rate(0)"], "stream rate(0): must be a number of samples per second above 0"),
        (["--stream", "kafka('', 'readings')"], "stream kafka: servers '' must be text"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_options(capsys: pytest.CaptureFixture[str], args: list[str], says: str) -> None:
    small = [] if {"--workload", "--data"} & {*args} else ["--workload", "synthetic/quadratic"]
    assert says in refuse(capsys, "train", *args, *small, lines=2)


@pytest.mark.thorough
@pytest.mark.parametrize("command", ["train", "simulate"])
def test_a_stream_that_brings_less_than_a_step_takes(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, command: str
) -> None:
    given = ["--workload", "synthetic/quadratic", "--workers", "1", "--out", str(tmp_path / "run")]
    said = refuse(capsys, command, *given, "--stream", "rate(4, window_s=1.0)")
    assert (
        "4 samples per second bring 4 in window_s=1, and a step takes at least 8: lengthen window_s" in said
    )


@pytest.mark.parametrize("command", ["simulate", "train"])
@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--workers", "1000000"], "--workers 1000000: synthetic/quadratic has "),
        (["--workers", "2", "--elastic", "1:1000000"], "--elastic 1:1000000: synthetic/quadratic has "),
    ],
)
def test_more_replicas_than_samples_are_refused_before_they_are_created(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    command: str,
    options: list[str],
    says: str,
) -> None:
    monkeypatch.setattr(VirtualWorld, "__init__", None)
    assert says in refuse(capsys, command, "--workload", "synthetic/quadratic", *options)


def test_a_fault_at_a_step_of_a_program_that_tells_of_none(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    plan = tmp_path / "plan.toml"
    plan.write_text('[[fault]]\nkind = "crash"\nrank = 1\nat_step = 5\n')
    said = refuse(capsys, "lab", "--faults", str(plan), "--", "true")
    assert f"{plan}: crash of rank 1 at step 5: at_step requires farflung train" in said


def test_a_cuda_device_that_is_not_there(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert "--device cuda: torch sees no CUDA device on this machine" in refuse(
        capsys, "train", "--device", "cuda"
    )


def test_a_truncated_data_file(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "fashion-mnist"
    folder.mkdir()
    for name in ("train-images-idx3", "train-labels-idx1", "t10k-images-idx3", "t10k-labels-idx1"):
        (folder / f"{name}-ubyte.gz").write_bytes(b"\x1f\x8b\x08")
    monkeypatch.setenv("FARFLUNG_DATA", str(tmp_path))
    said = refuse(capsys, "train", "--data", "full")
    assert str(folder) in said


def test_a_folder_that_holds_a_run_already(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert "holds a run already" in refuse(capsys, "train", "--workers", "1", "--out", str(tmp_path))


@pytest.fixture(scope="module")
def finished_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a small run: two steps of one replica."""
    config = RunConfig.resolve(
        {"workload": "fashion-mnist/mlp", "workers": 1, "steps": 2, "data": "packaged"}
    )
    folder = RunFolder(tmp_path_factory.mktemp("finished") / "run")
    with folder.begin_run(config.to_json()):
        pass
    world = VirtualWorld(1)
    replica = make_replica(
        world.runtimes[0],
        config.task,
        config.recipe,
        config.training,
        checkpoints=folder.get_checkpoints(0, 1, is_leader=True),
    )
    world.run([replica.run()])
    return folder.path


@pytest.fixture
def run(finished_run: Path, tmp_path: Path) -> Path:
    """A copy of it, to be broken."""
    shutil.copytree(finished_run, tmp_path / "run")
    return tmp_path / "run"


def test_a_checkpoint_of_another_model(capsys: pytest.CaptureFixture[str], run: Path) -> None:
    said = refuse(capsys, "train", "--resume", str(run), "--steps", "4", "--workload", "fashion-mnist/cnn")
    assert "the checkpoint is of another model, trained as fashion-mnist/mlp" in said


@pytest.mark.parametrize("name", ["shared", "rank-0-of-1"])
@pytest.mark.parametrize("kept", [0.0, 0.5, 0.99])
def test_a_checkpoint_cut_short(
    capsys: pytest.CaptureFixture[str], run: Path, name: str, kept: float
) -> None:
    (file,) = run.glob(f"checkpoints/step-00000002/{name}.safetensors")
    file.write_bytes(file.read_bytes()[: int(file.stat().st_size * kept)])
    said = refuse(capsys, "train", "--resume", str(run), "--steps", "4")
    assert f"{file}: cut short or damaged" in said


def test_a_checkpoint_of_more_replicas(capsys: pytest.CaptureFixture[str], run: Path) -> None:
    said = refuse(capsys, "train", "--resume", str(run), "--steps", "4", "--workers", "2")
    assert "saved by another number of replicas than 2" in said


@pytest.mark.parametrize(
    "args",
    [
        *(["traffic", "{}"], ["trace", "{}"], ["report", "{}"], ["watch", "{}"], ["join", "{}"]),
        ["join", ".", "--key", "{}"],
        ["retime", "{}", "--network", "4g"],
        *(["train", "--resume", "{}"], ["simulate", "--resume", "{}"], ["simulate", "--replay", "{}"]),
        *(["calibrate", "--out", "{}"], ["calibrate", "--out", "{}/x.toml"], ["probe", "--out", "{}"]),
        ["plan", "--quiet", "--", "{}"],
    ],
    ids=" ".join,
)
@pytest.mark.parametrize("problem", ["File name too long", "Permission denied"])
def test_a_path_that_cannot_be_looked_up(
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    args: list[str],
    problem: str,
) -> None:
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}.items():
        if args[0] == "probe":
            monkeypatch.setenv(name, value)
    monkeypatch.chdir(tmp_path)
    path = "x" * 300
    if problem == "Permission denied":
        path, stat = "closed/run", Path.stat

        def refuse_stat(self: Path, *, follow_symlinks: bool = True) -> os.stat_result:
            if "closed" in self.parts:
                raise PermissionError(errno.EACCES, problem)
            return stat(self, follow_symlinks=follow_symlinks)

        monkeypatch.setattr(Path, "stat", refuse_stat)
    said = refuse(capsys, *(arg.format(path) for arg in args))
    assert f"cannot be read ({problem})" in said
    with pytest.raises(ConfigError, match=r"--keys .*: cannot be read"):
        load_keys(Path(path))


def test_a_run_without_checkpoints(capsys: pytest.CaptureFixture[str], run: Path) -> None:
    shutil.rmtree(run / "checkpoints")
    assert "no complete checkpoint to resume from" in refuse(
        capsys, "train", "--resume", str(run), "--steps", "4"
    )


def test_a_run_that_is_over(capsys: pytest.CaptureFixture[str], run: Path) -> None:
    assert "has done 2 already" in refuse(capsys, "train", "--resume", str(run), "--steps", "2")


@pytest.mark.parametrize(
    ("name", "entry", "says"),
    [
        ("shared", ("recipe",), "KeyError: 'recipe'"),
        ("shared", ("recipe", "codec"), "KeyError: 'codec'"),
        ("rank-0-of-1", ("optimizer",), "KeyError: 'optimizer'"),
        ("rank-0-of-1", ("optimizer", "kind"), "KeyError: 'kind'"),
    ],
)
def test_a_checkpoint_of_another_version(
    capsys: pytest.CaptureFixture[str], run: Path, name: str, entry: tuple[str, ...], says: str
) -> None:
    (file,) = run.glob(f"checkpoints/step-00000002/{name}.safetensors")
    tree = load_tree(file)
    part = tree
    for key in entry[:-1]:
        part = part[key]
    del part[entry[-1]]
    save_tree(file, tree)
    said = refuse(capsys, "train", "--resume", str(run), "--steps", "4")
    assert "step 2: not a checkpoint of this version of farflung" in said
    assert says in said


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"threads": None}, "it lacks threads"),
        ({"new": 1}, "it has unknown new"),
        ({"threads": None, "new": 1}, "it lacks threads and has unknown new"),
        (dict.fromkeys("abcdefgh", 1), "it has unknown a, b, c, d, e, 3 more"),
    ],
)
def test_a_configuration_of_another_version(
    capsys: pytest.CaptureFixture[str], run: Path, changes: dict[str, int | None], says: str
) -> None:
    config = {**json.loads((run / "config.json").read_text()), **changes}
    config = {name: value for name, value in config.items() if changes.get(name, value) is not None}
    (run / "config.json").write_text(json.dumps(config))
    said = refuse(capsys, "train", "--resume", str(run), "--steps", "4")
    assert f"not of a run that farflung train of this version has made: {says}\n" in said


def test_a_damaged_configuration(capsys: pytest.CaptureFixture[str], run: Path) -> None:
    (run / "config.json").write_text('{"steps": ')
    assert "config.json: damaged" in refuse(capsys, "train", "--resume", str(run))


@pytest.mark.parametrize("option", ["--logs", "--report"])
def test_the_lab_names_an_output_that_cannot_be_written_before_it_starts(
    option: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = "/dev/null/logs" if option == "--logs" else "/dev/null/report/links.json"
    assert "/dev/null" in refuse(capsys, "lab", option, path, "--", "true")
