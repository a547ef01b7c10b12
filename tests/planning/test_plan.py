"""A plan chooses by real pilots, continues where it stopped, and refuses what it cannot tell in one line."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import farflung
from farflung.calibration import measure_step_nbytes
from farflung.cli.main import main
from farflung.errors import ConfigError, RunLost
from farflung.network import NetworkProfile
from farflung.planning import Plan, PlanRow, auto, plan_script, planner, time_recipe
from farflung.recipes.planned import REFERENCE
from farflung.report import render_text
from farflung.runs import SimulatedConfig
from farflung.wall import LaunchEnv

HOME = """
name = "home"
[[site]]
name = "all"
nodes = 2
inside = { latency_s = 0.001 }
"""
SETTINGS = {"workload": "synthetic/quadratic", "steps": 80, "workers": 2, "batch_size": 4}
RECIPES = ["local_sgd(sync_every=4)", "delayed"]


def make_plan(out: Path | None = None) -> Plan:
    return farflung.plan(networks=["wifi-10mbps", "lan-1g"], recipes=RECIPES, out=out, **SETTINGS)  # type: ignore[arg-type]


def test_plan_has_a_row_of_each_recipe_and_continues_where_it_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = make_plan(tmp_path)
    rows = {row.recipe: row for row in made.rows}
    assert rows.keys() == {*RECIPES, REFERENCE}
    assert rows["delayed"].reason == "what it learns depends on the network"
    assert made.choice in made.rows
    assert made.choice is not None
    assert made.choice.network == "wifi-10mbps"
    assert rows[REFERENCE].status == "reaches"
    assert rows["local_sgd(sync_every=4)"].gap is not None
    bounds = [bound for bound in rows[REFERENCE].loss_bounds if bound is not None]
    assert len(bounds) == 10
    assert bounds[0] > bounds[-1]
    assert json.loads((tmp_path / "plan.json").read_text())["choice"] == made.choice.recipe
    monkeypatch.setattr(planner, "train_pilot", None)
    monkeypatch.setattr(planner, "time_recipe", None)
    assert make_plan(tmp_path).to_json() == made.to_json()


@pytest.mark.parametrize("name", ["networks", "device", "faults"])
def test_an_edited_file_is_timed_as_it_is_now(tmp_path: Path, name: str) -> None:
    file, device = tmp_path / "own.toml", tmp_path / "device.toml"
    device.write_text('name = "slow"\nforward_s = 0.1\n')
    contents = {
        "networks": [HOME.replace("inside", f"up_bps = {up_bps}\ninside") for up_bps in (1e6, 1e3)],
        "device": [f'name = "own"\nforward_s = {forward_s}\n' for forward_s in (0.1, 0.2)],
        "faults": [
            f'[[fault]]\nkind = "slow"\nrank = 0\nat_step = 1\nfactor = {factor}\n' for factor in (2.0, 9.0)
        ],
    }[name]
    steps_s = []
    for content in (*contents, contents[0]):
        file.write_text(content)
        settings: dict[str, Any] = {**SETTINGS, "device": str(device), name: str(file)}
        made = farflung.plan(recipes=(), out=tmp_path / "out", **settings)
        steps_s.append(made.rows[0].step_s)
    assert steps_s[0] == steps_s[2] != steps_s[1]


def test_score_to_reach_trains_the_reference_whole_beyond_the_budget() -> None:
    made = farflung.plan(networks="wifi-10mbps", recipes=RECIPES[:1], target=-1e5, **SETTINGS)  # type: ignore[arg-type]
    assert made.pilots > 1
    assert {row.recipe: row.status for row in made.rows} == {RECIPES[0]: "reaches", REFERENCE: "reaches"}


def test_recipes_that_need_more_memory_or_samples_of_others_are_left_out() -> None:
    config = SimulatedConfig.resolve({**SETTINGS, "recipe": REFERENCE})
    (pace,), _ = time_recipe(config, ["lan-1g"])
    memory = (measure_step_nbytes(config.task, config.training) + pace.held_nbytes) / planner.GIB
    recipes = ["local_sgd(sync_every=4)", "mercury"]
    made = farflung.plan(recipes=recipes, max_memory=memory, data_stays=True, **SETTINGS)  # type: ignore[arg-type]
    reasons = {row.recipe: row.reason for row in made.rows}
    assert reasons == {
        REFERENCE: "",
        "local_sgd(sync_every=4)": reasons["local_sgd(sync_every=4)"],
        "mercury": "it needs samples of other replicas, and data stays",
    }
    assert reasons["local_sgd(sync_every=4)"].startswith("it needs ")
    assert "--data-stays " in made.command


def build_row(recipe: str, **figures: object) -> PlanRow:
    row = PlanRow(recipe, "4g", None, 5000.0, 1.25, 0.99, "misses", gap=0.113, noise=0.0212)
    return replace(row, **figures)  # type: ignore[arg-type]


def test_table_fits_80_columns_and_says_what_to_take() -> None:
    reaches = {"status": "reaches", "high_s": 99999.0, "low_s": 55555.0, "sent_nbytes": 97.1e6}
    rows = [
        build_row("diloco(codec=error_feedback(sign(bucket_size=1024)))"),
        build_row(
            "demo(optimizer=sign_sgd, learning_rate=0.001)", **reaches, step_s=0.1, uncharged=("demo",)
        ),
        build_row(REFERENCE, **{**reaches, "low_s": None, "high_s": 105000.0}),
        PlanRow("delayed", reason="what it learns depends on the network"),
    ]
    made = Plan(rows, rows[1], REFERENCE, 0.03, 4000, 1.3, {"workload": "own:task", "workers": 4}, True)
    lines = render_text(made.build_table()).splitlines()
    assert max(map(len, lines)) <= 80
    text = " ".join(" ".join(lines).split())
    for words in (
        "less 3 points",
        "11 ±2",
        "misses it",
        "at most 1 day, 5:10:00",
        f"12.5 steps in the time of one of {REFERENCE}",
        f"As fast, for all a simulation can say: {REFERENCE}.",
        "Not tried: delayed: what it learns depends on the network.",
        "no rate: demo.",
    ):
        assert words in text, text
    assert made.attach_line == 'farflung.attach(model, optimizer, "demo")  # with optimizer sign_sgd'
    assert made.command == (
        "farflung train --workload own:task --workers 4 "
        "--recipe 'demo(optimizer=sign_sgd, learning_rate=0.001)' --steps 4000"
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--within 1e-9", "this test set tells no less than"),
        ("--within much", "write it as 1% or 0.05"),
        ("--target 5", "the reference does not reach it in 80 steps"),
        ("--recipes diloco", "25% of it is shorter than two blocks of 50 steps of diloco"),
        ("--budget 0", "timing alone takes"),
        ("--max-memory 1e-9", f"{REFERENCE} alone needs"),
        ("--networks home.toml --workers 3", "it describes 2 nodes, and 3 are to run"),
        ("--workload tests.planning.own:random_width", "its model differs from seed to seed"),
        ("--share 2", "must be above 0 and at most 1"),
        ("--networks", "--networks: give at least one"),
        ("--networks 4g 4g", "--networks: one of them is there twice"),
        ("--seeds", "--seeds: give at least one"),
        ("--seeds 0 0", "--seeds: one of them is there twice"),
        ("--seeds -1", "--seeds -1: must be 0 or more"),
        ("--target nan", "--target nan: must be a finite number"),
        ("--budget nan", "--budget nan: must be a finite number"),
        ("--max-memory nan", "--max-memory nan: must be a finite number"),
        ("--networks -- train.py", "--networks: give at least one"),
        ("-- nowhere.py", "there is no such script"),
        ("--within 1% -- train.py", "a script is only timed"),
        ("--data-stays -- train.py", "--data-stays: a script is only timed"),
        ("--max-memory 2 -- train.py", "--max-memory: a script is only timed"),
        ("--target 0 -- train.py", "--target: a script is only timed"),
        ("--out plan -- train.py", "--out: a script is only timed"),
        ("--device cpu-core -- train.py", "--device: a script is only timed"),
        ("--optimizer adam -- train.py", "--optimizer: a script is only timed"),
        ("--batch-size 4 -- train.py", "--batch-size: a script is only timed"),
        ("--learning-rate 0.1 -- train.py", "--learning-rate: a script is only timed"),
        ("--partition iid -- train.py", "--partition: a script is only timed"),
        ("--data full -- train.py", "--data: a script is only timed"),
    ],
)
def test_bad_input_is_refused_in_one_line(
    options: str,
    message: str,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.syspath_prepend(Path(__file__).parents[2])
    monkeypatch.chdir(tmp_path)
    Path("home.toml").write_text(HOME)
    words = ["--quiet", "--steps", "80", "--recipes", "local_sgd(sync_every=4)", *options.split()]
    if "--workload" not in options and "--" not in options.split():
        words = ["--workload", "synthetic/quadratic", *words]
    assert main(["plan", *words]) == 2
    error = capsys.readouterr().err.strip()
    assert message in error
    assert error.count("\n") == 0


LOOP = """
import torch, farflung
model = torch.nn.Sequential(torch.nn.Linear(8, 64), torch.nn.Linear(64, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
{attach}
for step in range({steps}):
    optimizer.zero_grad()
    model(torch.randn(4, 8)).sum().backward()
    optimizer.step()
"""
ATTACH = "farflung.attach(model, optimizer, 'demo')"


def test_loop_with_attach_is_recorded_and_timed(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(LOOP.format(attach=ATTACH, steps=1000))
    own = "demo(optimizer=sign_sgd)"
    made = plan_script(
        [str(script)], "wifi-10mbps", recipes=["local_sgd", "mercury", own], workers=2, steps=100
    )
    rows = {row.recipe: row for row in made.rows}
    assert rows[own].reason == "the loop has its own optimizer: set that there, and name the recipe alone"
    assert made.choice is None
    assert made.command == made.attach_line == ""
    assert rows["mercury"].reason.startswith("attach cannot follow it")
    assert 0 < (rows["local_sgd"].duration_s or 0) < (rows[REFERENCE].duration_s or 0)


@pytest.mark.parametrize(
    ("attach", "steps", "message"),
    [
        ("", 3, "ended without 10 steps under farflung.attach"),
        (f"{ATTACH}.finish(); {ATTACH}", 3, "the script attaches two models"),
        ("farflung.attach(model, optimizer, elastic=1)", 3, "elastic"),
        ("raise SystemExit('no data')", 3, "ended with exit code 1 before its steps were recorded: no data"),
    ],
)
def test_loop_that_cannot_be_recorded_is_refused_by_name(
    attach: str, steps: int, message: str, tmp_path: Path
) -> None:
    script = tmp_path / "train.py"
    script.write_text(LOOP.format(attach=attach, steps=steps))
    with pytest.raises(ConfigError, match=r"^train\.py: ") as refused:
        plan_script([str(script)], recipes=[])
    assert message in str(refused.value)


def test_recipe_auto_plans_with_this_machine_and_trains_with_the_choice(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    planned: dict[str, Any] = {}

    def choose(workload: str, network: str, **settings: object) -> Plan:
        planned.update(settings, workload=workload, network=network)
        row = PlanRow("local_sgd(sync_every=2)")
        return Plan([row], row, REFERENCE, 0.1, 4, 0.0, {}, False)

    monkeypatch.setattr(auto, "plan", choose)
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    words = [
        "--workload",
        "synthetic/quadratic",
        "--recipe",
        "auto",
        "--steps",
        "4",
        "--out",
        str(tmp_path / "run"),
    ]
    assert main(["train", *words]) == 0
    assert "trains with local_sgd(sync_every=2)" in capsys.readouterr().err
    assert planned["workload"] == "synthetic/quadratic"
    assert planned["network"] == "loopback"
    assert planned["device"].forward_per_sample_s > 0
    assert json.loads((tmp_path / "run" / "config.json").read_text())["schedule"] == "local_sgd(sync_every=2)"
    assert main(["train", "--recipe", "auto", "--resume", str(tmp_path / "run")]) == 2
    capsys.readouterr()
    assert main(["train", *words, "--quiet", "--workers", "4"]) == 2
    assert "--workers 4: " in capsys.readouterr().err


@pytest.mark.parametrize("option", ["--codec int8", "--schedule delayed", "--sampler importance"])
def test_recipe_auto_refuses_components(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--workload", "synthetic/quadratic", "--recipe", "auto", *option.split()]
    assert main(["train", *words]) == 2
    assert f"{option.split(maxsplit=1)[0]}: --recipe auto chooses it" in capsys.readouterr().err


def test_recipe_that_diverges_is_ruled_out() -> None:
    wild = "local_sgd(sync_every=4, learning_rate=1e30)"
    made = farflung.plan(recipes=[wild], networks="wifi-10mbps", **SETTINGS)  # type: ignore[arg-type]
    assert {row.recipe: row.status for row in made.rows} == {wild: "misses", REFERENCE: "reaches"}


def choose_on_two_ranks(tmp_path: Path) -> list[str | BaseException]:
    """Runs both ranks in threads of this process, over real sockets."""

    def choose(rank: int) -> str | BaseException:
        env = LaunchEnv(rank, 2, rank, 2, rendezvous_file=tmp_path / "meeting")
        try:
            return auto.choose_recipe({"workload": "synthetic/quadratic", "steps": 4}, env)
        except (ConfigError, RunLost) as error:
            return error

    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(choose, range(2)))


def test_rank_0_plans_for_all_on_the_network_between_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    networks: list[NetworkProfile] = []

    def choose(workload: str, network: NetworkProfile, **settings: object) -> Plan:
        del workload, settings
        networks.append(network)
        row = PlanRow("diloco")
        return Plan([row], row, REFERENCE, 0.1, 4, 0.0, {}, False)

    monkeypatch.setattr(auto, "plan", choose)
    assert choose_on_two_ranks(tmp_path) == ["diloco", "diloco"]
    (network,) = networks
    assert (network.name, network.nodes) == ("probed", 2)


def test_plan_that_fails_ends_all_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> Plan:
        raise ConfigError("nothing to plan")

    monkeypatch.setattr(auto, "plan", refuse)
    first, second = choose_on_two_ranks(tmp_path)
    assert str(first) == "nothing to plan"
    assert isinstance(second, RunLost)
    assert "rank 0" in str(second)
