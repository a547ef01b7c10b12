"""What examples/launch starts: its scripts, then their commands, with replicas of this machine for those of others."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from argparse import Namespace
from collections.abc import Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist
from torch.distributed.run import get_args_parser

from farflung.comm.keys import make_keys
from farflung.files import write_atomically
from farflung.loop.checkpoint import Checkpoints
from farflung.state_trees import load_tree
from tests.forks import Fork, command, of_torchrun
from tests.helpers import PATIENCE_S

LAUNCH = Path(__file__).parent.parent.parent / "examples" / "launch"
EVER = "--workload synthetic/quadratic --steps 100000 --evaluate-every 200"
LAUNCHED = "RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"
WORKLOAD = ["--workload", "synthetic/quadratic", "--steps", "20", "--checkpoint-every", "10", "--json"]
FAKES = {
    "torchrun": 'say "torchrun-$PET_NODE_RANK" "$@"',
    "farflung": 'say farflung "$@"; exit 2',
    "scontrol": 'say scontrol "$@"; [ "$1" != show ] || printf "127.0.0.1\\n192.0.2.20\\n"',
    "srun": 'say srun "$@"; until [ "$1" = bash ]; do shift; done\nSLURM_NODEID=0 "$@"; SLURM_NODEID=1 "$@"',
    "curl": "echo 127.0.0.1",
    "hostname": "echo 127.0.0.1",
}
"""Commands that scripts find in place of those of other machines, and what each does."""
SAY = """#!/bin/bash
say() { name=$SAID/$1; shift; printf '%s\\0' "$@" >"$name"; env -0 >"$name.env"; }
"""


class Scripts:
    """Runs scripts among :data:`FAKES`, which keep what they are told in the folder ``said``."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.said, path = folder, folder / "said", folder / "path"
        self.said.mkdir()
        path.mkdir()
        for name, does in FAKES.items():
            (path / name).write_text(f"{SAY}{does}\n")
            (path / name).chmod(0o755)
        (folder / "examples").symlink_to(LAUNCH.parent)
        self._environment = {"PATH": f"{path}:/usr/bin:/bin", "SAID": str(self.said), "HOME": str(folder)}

    def run(self, *words: object, expect: int, environment: Mapping[str, object]) -> None:
        told = {**self._environment, **{name: str(value) for name, value in environment.items()}}
        ended = subprocess.run(
            [str(word) for word in words], cwd=self.folder, env=told, timeout=PATIENCE_S, text=True, check=False,
            capture_output=True,
        )  # fmt: skip
        assert ended.returncode == expect, ended.stderr

    def told(self, name: str) -> tuple[list[str], dict[str, str]]:
        """The words that a fake was told last, and its environment."""
        words, environment = ((self.said / end).read_text().split("\0")[:-1] for end in (name, f"{name}.env"))
        return words, dict(entry.split("=", 1) for entry in environment)

    def torchrun(self, node: int) -> tuple[Namespace, list[str]]:
        """What torchrun makes of what it was told on a node, and the options of ``farflung train`` in it."""
        words, environment = self.told(f"torchrun-{node}")
        with mock.patch.dict(os.environ, environment):
            understood = get_args_parser().parse_args(words)
        assert understood.no_python
        assert understood.rdzv_backend == "static"
        assert understood.training_script == "farflung"
        assert understood.training_script_args[:4] == ["worker", "--", "farflung", "train"]
        return understood, understood.training_script_args[4:]


@pytest.fixture
def scripts(tmp_path: Path) -> Scripts:
    return Scripts(tmp_path)


def pet(node: int, *, nodes: int, each: int = 1) -> dict[str, object]:
    """The variables that torchrun reads on a node."""
    return {
        "PET_NNODES": nodes, "PET_NODE_RANK": node, "PET_NPROC_PER_NODE": each, "PET_MASTER_ADDR": "127.0.0.1",
        "PET_MASTER_PORT": 29500,
    }  # fmt: skip


def trained(*options: list[str]) -> None:
    """Trains with replicas that torchrun would have started, one with each of these options."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    size = len(options)
    with ExitStack() as stack:
        replicas = [
            stack.enter_context(
                Fork(
                    partial(command, "train", *told),
                    environment=of_torchrun(rank, size, "127.0.0.1", store.port, machines=size),
                )
            )
            for rank, told in enumerate(options)
        ]
        for replica in replicas:
            _, err = replica.finished()
            assert replica.returncode == 0, "\n".join(err)


def test_machines_begin_a_run_go_on_with_it_and_let_it_be_once_it_has_ended(scripts: Scripts) -> None:
    folder = scripts.folder / "run"

    def start(*options: str, expect: int) -> None:
        for node in range(2):
            told = pet(node, nodes=2)
            scripts.run("sh", LAUNCH / "start.sh", folder, *options, expect=expect, environment=told)

    start(*WORKLOAD, expect=1)  # the fake torchrun has trained nothing
    for node in range(2):
        understood, _ = scripts.torchrun(node)
        assert (understood.nnodes, understood.nproc_per_node, int(understood.node_rank)) == ("2", "1", node)
        assert (understood.master_addr, int(understood.master_port)) == ("127.0.0.1", 29500)
    trained(*(scripts.torchrun(node)[1] for node in range(2)))
    assert Checkpoints(folder / "checkpoints", 0, 2, is_leader=False).find_newest() == 20
    assert len(list((folder / "telemetry").iterdir())) == 2

    for said in scripts.said.iterdir():
        said.unlink()
    start(expect=0)
    assert not list(scripts.said.iterdir())

    (folder / "summary.json").unlink()
    start("--steps", "30", "--json", expect=1)
    words, _ = scripts.told("farflung")  # the run may go on
    assert words == ["worker", "--", "farflung", "join", str(folder), "--device", "cpu"]
    trained(*(scripts.torchrun(node)[1] for node in range(2)))
    assert json.loads((folder / "summary.json").read_text())["steps"] == 30


def test_a_run_without_a_checkpoint_is_put_aside_by_the_first_machine(scripts: Scripts) -> None:
    folder = scripts.folder / "run"
    folder.mkdir()
    for node in (1, 0):
        assert folder.exists()
        scripts.run("sh", LAUNCH / "start.sh", folder, expect=1, environment=pet(node, nodes=2))
        assert scripts.torchrun(node)[1][-2:] == ["--out", str(folder)]
    assert [path.name.startswith("run.cut-off-") for path in scripts.folder.glob("run*")] == [True]


def test_slurm(scripts: Scripts) -> None:
    of_slurm = {
        "SLURM_JOB_ID": 12345, "SLURM_JOB_NODELIST": "gpu[1-2]", "SLURM_JOB_NUM_NODES": 2, "SLURM_GPUS_ON_NODE": 4,
    }  # fmt: skip
    scripts.run("bash", LAUNCH / "slurm.sbatch", expect=0, environment=of_slurm)
    words, _ = scripts.told("srun")
    assert words[: words.index("bash")] == ["--no-kill", "--kill-on-bad-exit=0", "--label"]
    for node in range(2):
        understood, options = scripts.torchrun(node)
        assert (understood.nnodes, understood.nproc_per_node, int(understood.node_rank)) == ("2", "4", node)
        assert (understood.master_addr, int(understood.master_port)) == ("127.0.0.1", 15000 + 2345)
        assert options[:4] == ["--elastic", "1:64", "--device", "cuda"]
        assert options[4:6] == ["--out", str(scripts.folder / "runs" / "12345")]
    assert scripts.told("scontrol")[0] == ["requeue", "12345"]  # nothing has been trained

    (scripts.said / "scontrol").unlink()
    scripts.run(
        "bash", LAUNCH / "slurm.sbatch", expect=0, environment={**of_slurm, "SLURM_RESTART_COUNT": 20}
    )
    assert scripts.told("scontrol")[0] == ["show", "hostnames", "gpu[1-2]"]


def documents(name: str) -> list[dict[str, Any]]:
    """What a file of YAML holds."""
    return list(pytest.importorskip("yaml").safe_load_all((LAUNCH / name).read_text()))


def starts_pods(scripts: Scripts, words: list[str], environment: dict[str, object], nodes: int) -> None:
    """Runs the command of a pod as each of several."""
    words = [word.replace("/runs/fashion", str(scripts.folder / "run")) for word in words]
    for node in range(nodes):
        told = {**environment, "JOB_COMPLETION_INDEX": node}
        if "PET_NNODES" not in environment:
            told |= pet(node, nodes=nodes)
        scripts.run(*words, expect=1, environment=told)
        understood, options = scripts.torchrun(node)
        assert (understood.nnodes, understood.nproc_per_node, int(understood.node_rank)) == (
            str(nodes),
            "1",
            node,
        )
        assert options[:4] == ["--elastic", "1:64", "--device", "cuda:0"]
        assert options[-4:] == ["--workload", "fashion-mnist/cnn", "--steps", "2000"]


def test_jobset(scripts: Scripts) -> None:
    (jobs,) = documents("jobset.yaml")
    (replicated,) = jobs["spec"]["replicatedJobs"]
    job = replicated["template"]["spec"]
    (container,) = job["template"]["spec"]["containers"]
    environment = {entry["name"]: entry["value"] for entry in container["env"]}
    starts_pods(scripts, [*container["command"], *container["args"]], environment, job["parallelism"])
    name = jobs["metadata"]["name"]
    assert environment["PET_MASTER_ADDR"] == f"{name}-{replicated['name']}-0-0.{name}"
    assert int(environment["PET_NNODES"]) == job["parallelism"] == job["completions"]


def test_trainjob(scripts: Scripts) -> None:
    runtime, job = documents("trainjob.yaml")
    trainer = job["spec"]["trainer"]
    environment = {entry["name"]: entry["value"] for entry in trainer["env"]}
    starts_pods(scripts, [*trainer["command"], *trainer["args"]], environment, trainer["numNodes"])
    assert job["spec"]["runtimeRef"]["name"] == runtime["metadata"]["name"]


def line_with(text: str, process: Fork) -> str:
    """The next line that a process says with this text in it."""
    said = []
    for line in process.stderr:
        said.append(line)
        if text in line:
            return line
    raise AssertionError("".join(said))


def test_regions_of_skypilot(scripts: Scripts) -> None:
    (task,) = documents("sky.yaml")
    homes = {region: scripts.folder / region for region in ("west", "east")}
    with ExitStack() as probes:
        ports = [probes.enter_context(socket.create_server(("127.0.0.1", 0))).getsockname()[1] for _ in homes]
    for region, home in homes.items():
        make_keys(home / "farflung-keys", region)
    for one, other in (("west", "east"), ("east", "west")):
        public = f"farflung-keys/{one}.public"
        (homes[other] / public).write_bytes((homes[one] / public).read_bytes())

    def launched(region: str, port: int, **environment: str) -> Fork:
        run = task["run"].replace("--port 7000", f"--port {port}").replace('7000"\n', f'{port}"\n')
        run = run.replace("$PEER:7000", f"$PEER:{ports[0]}").replace("--device cuda", "")
        told = {
            **task["envs"],
            **task["secrets"],
            **environment,
            "REGION": region,
            "HOME": str(homes[region]),
        }
        scripts.run("bash", "-c", run, expect=2, environment=told)  # the fake farflung ends with 2
        words, environment = scripts.told("farflung")
        assert words[:3] == ["worker", "--", "farflung"]
        known = {name: environment[name] for name in LAUNCHED if name in environment}
        return Fork(partial(command, *words[3:]), cwd=homes[region], environment=known)

    with launched("west", ports[0], OPTIONS=EVER) as west:
        line_with("step", west)
        key = (homes["west"] / "run" / "run.key").read_text()
        assert json.loads(key)["encrypted"]
        with launched("east", ports[1], PEER="127.0.0.1", RUN_KEY=key) as east:
            line_with("step", east)
            east.send_signal(signal.SIGINT)
            _, said = east.finished()
            assert (east.returncode, said[-1]) == (0, "farflung: left with view 3")
        west.send_signal(signal.SIGKILL)


@pytest.mark.slow
def test_ray_train(tmp_path: Path) -> None:
    pytest.importorskip("ray")
    options = [
        "--workload",
        "synthetic/quadratic",
        "--steps",
        "4",
        "--every",
        "2",
        "--storage",
        str(tmp_path),
    ]
    subprocess.run([sys.executable, LAUNCH / "ray_train.py", *options], check=True, timeout=10 * PATIENCE_S)
    newest = max(tmp_path.glob("*/checkpoint_2*"))
    assert [load_tree(newest / f"rank-{rank}.safetensors")["handle"]["step"] for rank in range(2)] == [4, 4]


def test_files_of_processes_that_are_numbered_alike_are_whole(tmp_path: Path) -> None:
    file = tmp_path / "shared"

    def write(partial: Path) -> None:
        partial.write_text("of one container")
        write_atomically(file, lambda partial: partial.write_text("of another"))

    write_atomically(file, write)
    assert file.read_text() == "of one container"
    assert list(tmp_path.iterdir()) == [file]
