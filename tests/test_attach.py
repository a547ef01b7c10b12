"""farflung in a user's own loop does what DistributedDataParallel does there, bit for bit at two ranks."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import farflung
from farflung.attach_checks import describe_attach_support
from farflung.codecs import TopK, error_feedback
from farflung.errors import ConfigError
from farflung.recipes import RECIPES, Recipe
from farflung.state_trees import load_tree
from farflung.telemetry import Event
from farflung.types import CodecState, Payload, State
from tests import attach_jobs
from tests.helpers import same_tree
from tests.pool import Pool

STOPS = 16
"""Of a bucket from autograd's hook to the socket, at most."""
FUNCTIONS = 200
"""Of farflung's in one step, on both threads, at most; 186 where nothing is held up."""


def test_a_bucket_makes_few_stops_and_the_design_names_them(pool: Pool) -> None:
    design = (Path(__file__).parent.parent / "docs" / "design.md").read_text(encoding="utf-8")
    figure = design[design.index("```mermaid") : design.index("* A codec encodes")]
    for stops, functions in pool.run(2, "tests.attach_jobs.step_functions"):
        assert stops[0].startswith("GradientBuckets._create_hook")
        assert stops[-1] == "Connection.flush"
        assert len(stops) <= STOPS, stops
        assert not [stop for stop in stops if stop.rpartition(".")[2] not in figure]
        assert len(functions) <= FUNCTIONS, (
            f"{len(functions)}: a step has grown; merge what is called together"
        )


@pytest.mark.parametrize("loop", attach_jobs.LOOPS)
def test_a_loop_ends_as_under_ddp(pool: Pool, loop: str) -> None:
    ends = pool.run(2, "tests.attach_jobs.compare", loop=loop)
    assert {end["ours"] for end in ends} == {end["theirs"] for end in ends}
    assert len({end["ours"] for end in ends}) == 1


def test_a_compiled_model(pool: Pool) -> None:
    ends = pool.run(2, "tests.attach_jobs.compare", loop="plain", compiled=True)
    assert len({end["ours"] for end in ends}) == 1
    assert ends[0]["ours"] == ends[0]["theirs"]


def test_all_start_as_rank_0(pool: Pool) -> None:
    assert len(set(pool.run(2, "tests.attach_jobs.starts_alike"))) == 1


def test_running_statistics_are_averaged_for_evaluation_only(pool: Pool) -> None:
    one, other = pool.run(2, "tests.attach_jobs.averages_buffers")
    assert torch.equal(one["mean"], other["mean"])
    assert torch.allclose(one["mean"], (one["own"] + other["own"]) / 2)
    assert not torch.equal(one["own"], other["own"])
    assert one["kept"]
    assert other["kept"]


def test_nothing_waits_after_the_end(pool: Pool) -> None:
    for said in pool.run(2, "tests.attach_jobs.after_the_end"):
        assert len(said) == 2
        assert all("exchanges nothing after finish() or close()" in line for line in said)


def test_a_backward_pass_that_broke_off_is_named(pool: Pool) -> None:
    said = pool.run(2, "tests.attach_jobs.breaks_off")
    assert "broke off on rank 1" in said[0]
    assert "broke off on rank 1" in said[1]


@pytest.mark.parametrize("how", ["synchronous", "pipelined(width=3)", "local_sgd"])
@pytest.mark.parametrize(("lost", "end"), [(0, "fails"), (1, "fails"), (0, "leaves"), (2, "leaves")])
def test_a_loop_goes_on_without_a_lost_rank(pool: Pool, lost: int, end: str, how: str) -> None:
    job = "tests.attach_jobs.loses"
    ends = [found for found in pool.run(3, job, lost=lost, how=how, end=end) if found]
    assert len(ends) == 2
    assert ends[0] == ends[1]
    assert ends[0]["members"][0] == (0, 1, 2)
    assert ends[0]["members"][-1] == tuple({0, 1, 2} - {lost})


@pytest.mark.parametrize(
    ("recipe", "says"),
    [
        (replace(RECIPES["powersgd"], reducer="gradiveq"), "reducer .* needs all replicas: choose a codec"),
        (
            RECIPES["delayed"].with_components(schedule="delayed(delay='auto')"),
            "schedule .* needs all replicas: choose synchronous, ",
        ),
        (replace(RECIPES["powersgd"], schedule="pipelined"), "learns from results in order"),
    ],
)
def test_a_loop_that_needs_all_ranks_is_refused(
    recipe: Recipe, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    model = attach_jobs.Net()
    with pytest.raises(ConfigError, match=says):
        farflung.attach(model, torch.optim.SGD(model.parameters(), lr=0.1), recipe, elastic=1)


def test_one_replica_needs_no_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    handle = farflung.attach(model := attach_jobs.Net(), torch.optim.SGD(model.parameters(), lr=0.1))
    attach_jobs.plain(model, handle._optimizer, handle.no_sync, 0)
    assert handle.step == attach_jobs.STEPS
    handle.finish()


def test_nothing_is_encoded_before_the_first_step(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    steps: list[int] = []

    @dataclass(frozen=True)
    class Watched(TopK):
        def encode(
            self, state: CodecState, grad: Tensor, *, step: int, count: int
        ) -> tuple[Payload, CodecState]:
            steps.append(step)
            return TopK.encode(self, state, grad, step=step, count=count)

    model = attach_jobs.Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    recipe = Recipe(codec=error_feedback(Watched(0.1)), collective="auto")
    with farflung.attach(model, optimizer, recipe) as handle:
        assert steps == []
        attach_jobs.plain(model, optimizer, handle.no_sync, 0)
        assert set(steps) == set(range(attach_jobs.STEPS))


@pytest.mark.filterwarnings("ignore:.*and there is one")
@pytest.mark.parametrize("how", ["synchronous", "dga"])
def test_each_step_is_told_of(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    told: list[Event] = []
    model = attach_jobs.Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with farflung.attach(model, optimizer, how, sink=told.append) as handle:
        attach_jobs.plain(model, optimizer, handle.no_sync, 0)
        now = handle._runtime.read_clock()
    assert [event["event"] for event in told] == ["begin", *["step"] * attach_jobs.STEPS]
    steps = told[1:]
    assert [event["step"] for event in steps] == list(range(attach_jobs.STEPS))
    assert sum(event["duration_s"] for event in steps) == pytest.approx(steps[-1]["t"] - told[0]["t"])  # type: ignore[operator, misc]
    assert told[0]["t"] <= steps[0]["t"] <= steps[-1]["t"] <= now  # type: ignore[operator]
    assert {"rank", "exposed_s", "bytes_sent", "in_flight"} <= steps[0].keys()


PIPELINED = ["pipelined(2)", "pipelined(3, warmup=2, correction=0.1)"]
DELAYED = [
    "delayed(2)",
    "delayed(3, 2)",
    "delayed('auto')",
    "delayed(2, pull='swap')",
    "streaming_diloco(4, fragments=2)",
]
LATE = [
    *itertools.product(PIPELINED, ["plain", "accumulated", "caught"]),
    *itertools.product(DELAYED, ["plain", "accumulated", "two_backwards", "caught", "scaled_alone"]),
    *itertools.product(["local_sgd(4, 'averaged')"], ["plain", "accumulated", "caught", "scaled_alone"]),
]


def test_replicas_plan_alike_where_one_of_them_skips_its_step(pool: Pool) -> None:
    """It waits with what has arrived until its parameters may change, but knows what the others know."""
    ends = pool.run(2, "tests.attach_jobs.delayed", how="observed(0)", loop="scaled_alone")
    assert ends[0]["own"] != ends[1]["own"]
    assert ends[0]["averaged"] == ends[1]["averaged"]
    assert ends[0]["end"] == ends[1]["end"]


@pytest.mark.parametrize(("how", "loop"), LATE)
def test_late_schedules_in_a_loop_of_ones_own(pool: Pool, how: str, loop: str) -> None:
    ends = pool.run(2, "tests.attach_jobs.delayed", how=how, loop=loop)
    assert ends[0]["end"] == ends[1]["end"]
    assert ends[0]["averaged"] == ends[1]["averaged"]
    if "auto" not in how:  # that depends on the clock, and may be no delay
        assert (ends[0]["own"] == ends[1]["own"]) == how.startswith("pipelined")
    for end in ends:
        assert end["own"] == end["after"]


UNDER_WAY = [
    "synchronous",
    "pipelined(3)",
    "delayed(3, 2)",
    "delayed(3, 2, pull='swap')",
    "diloco(2)",
    "streaming_diloco(3, fragments=1, delay=1)",
]


@pytest.mark.parametrize("first", ["attach", "load"])
@pytest.mark.parametrize("how", UNDER_WAY)
def test_a_loop_goes_on_with_exchanges_under_way(pool: Pool, how: str, first: str) -> None:
    """Whichever comes first when it goes on: the model's and optimizer's own state, or attach."""
    whole = pool.run(2, "tests.attach_jobs.delayed", how=how, loop="plain")
    parts = pool.run(2, "tests.attach_jobs.delayed", how=how, loop="plain", cut=3, first=first)
    for what in ("own", "buffers", "end"):
        assert [end[what] for end in parts] == [end[what] for end in whole], what


def test_passes_before_a_loop_goes_back_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    model = nn.Linear(12, 5)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def look_twice() -> None:
        for _ in range(2):
            model(torch.ones(2, 12)).sum().backward()
            optimizer.zero_grad()

    with farflung.attach(model, optimizer, attach_jobs.recipe_of("local_sgd(4)")) as handle:
        state = handle.state_dict()
        look_twice()
        with torch.no_grad():
            model.weight.zero_()
        handle.load_state_dict(state)
        look_twice()
        assert handle.step == 0


@pytest.mark.parametrize("how", [*UNDER_WAY, "local_sgd(4)"])
def test_a_loop_goes_back_to_an_earlier_state(pool: Pool, how: str) -> None:
    for once, again in pool.run(2, "tests.attach_jobs.goes_back", how=how):
        assert once == again


@pytest.mark.parametrize("how", ["synchronous", "local_sgd(4)"])
@pytest.mark.parametrize(
    ("steps", "remedy"),
    [
        ((1, 2), "load the checkpoint of step 1, or an earlier one, on all"),
        ((0, 2), "begin without checkpoints"),
    ],
)
def test_ranks_that_resume_at_different_steps_are_told_the_newest_common_one(
    pool: Pool, how: str, steps: tuple[int, int], remedy: str
) -> None:
    said = pool.run(2, "tests.attach_jobs.resumes_apart", how=how, steps=steps)
    listed = f"rank 0 at step {steps[0]}, rank 1 at step {steps[1]}"
    assert said == [f"replicas start from different steps, {listed}: {remedy}"] * 2


@pytest.mark.filterwarnings("ignore:.*and there is one")
@pytest.mark.parametrize(
    "how",
    ["synchronous", "pipelined(3, correction=0.1)", "delayed(3)", "delayed(3, pull='swap')", "diloco(3)"],
)
def test_a_state_comes_to_the_device_of_the_model(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a file read to the host does where the model is on another device; ``meta`` stands for that one."""
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    recipe = farflung.Recipe(schedule=how, codec="error_feedback(topk(0.5))", bucket_nbytes=100)
    state: State = {}
    for device in ("cpu", "meta"):
        model = nn.Linear(12, 5, device=device)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with farflung.attach(model, optimizer, recipe) as handle:
            if state:
                handle.load_state_dict(state)
            for _ in range(4):
                model(torch.ones(2, 12, device=device)).sum().backward()
                optimizer.step()
            state = handle.state_dict()
    assert devices_in(state["exchanges"]) == {"meta"}


def devices_in(state: State) -> set[str]:
    """Those of its tensors, metadata apart, which stay on the host."""
    found: set[str] = set()
    for name, leaf in state.items():
        if isinstance(leaf, dict):
            found |= devices_in(leaf)
        elif isinstance(leaf, torch.Tensor) and name != "metadata":
            found.add(leaf.device.type)
    return found


def test_the_example_of_a_checkpoint_goes_on_to_the_bit(pool: Pool, tmp_path: Path) -> None:
    script = str(Path(__file__).parent.parent / "examples" / "attach_checkpoint.py")
    for number, (folder, steps) in enumerate([("whole", 7), ("parts", 4), ("parts", 3)]):
        options = ["--folder", str(tmp_path / folder), "--steps", str(steps)]
        pool.run(
            2,
            "tests.attach_jobs.example",
            script=script,
            options=options,
            port=pool.store.port,
            attempt=f"{tmp_path}/{number}",
        )
    for rank in range(2):
        whole, parts = (
            load_tree(tmp_path / folder / f"rank-{rank}.safetensors") for folder in ("whole", "parts")
        )
        assert whole["handle"]["step"] == parts["handle"]["step"] == 7
        for what in ("model", "optimizer"):
            assert same_tree(whole[what], parts[what])


def test_a_state_that_is_not_ones_own_is_refused(pool: Pool) -> None:
    for rank, said in enumerate(pool.run(2, "tests.attach_jobs.states_of_others")):
        another, model, none, codec, schedule = said
        assert f"that of rank {1 - rank} of 2, and this is rank {rank} of 2" in another
        assert "another model" in model
        assert "lacks buckets, exchanges, rank, recipe, share, size, step" in none
        assert "another recipe, codec other in place of identity" in codec
        assert "another recipe, schedule other in place of synchronous" in schedule


# --- what is refused, and what is said ---------------------------------------------------------------------------


def test_models_and_optimizers_that_cannot_be_carried_are_refused_by_name(pool: Pool) -> None:
    one, other = pool.run(2, "tests.attach_jobs.refusals")
    assert one == other
    for name, says in {
        "ddp": "model.module",
        "ddp inside": "farflung.ddp_hook",
        "another's optimizer": "none of the model's parameters",
        "foreign parameters": "2 parameters of the optimizer are not the model's",
        "sparse": "layer 0 has sparse gradients: use sparse=False",
        "lazy": "1.weight is lazy and has no shape yet: run a batch through the model before",
        "lazy buffer": "1.running_mean is lazy",
        "complex": "parameter weight is complex",
        "closure": "LBFGS computes gradients inside its step, which schedule pipelined cannot follow",
        "closure, delayed": "which schedule delayed(delay=2) cannot follow",
        "nonfinite": "must be None or one of stop, skip, exclude",
        "no values": "1.weight is on the meta device and has no values",
        "expanded": "mask is expanded, so that several elements share one place in memory: clone() it",
        "sparse buffer": "graph has layout torch.sparse_coo",
        "twice": "attached already",
        "again": "nothing",
    }.items():
        assert says in one[name], name
        assert "\n" not in one[name]


def test_a_fragment_on_several_devices_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    spread = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, device="meta"))
    recipe = attach_jobs.recipe_of("streaming_diloco(4, fragments=1)")
    with pytest.raises(ConfigError, match="fragment 0 holds parameters on cpu and meta: choose a schedule"):
        farflung.attach(spread, torch.optim.SGD(spread.parameters(), lr=0.1), recipe)


@pytest.mark.parametrize("how", ["synchronous", "local_sgd(2)"])
def test_a_model_of_many_tensors_of_any_type(pool: Pool, how: str) -> None:
    """As many as ResNet-50 has, in types that messages have not, with state that is no tensor."""
    one, other = pool.run(2, "tests.attach_jobs.many_tensors", how=how)
    assert one == other
    assert one["start"] != one["end"]


@pytest.mark.parametrize(
    "how", [name for name in RECIPES if not describe_attach_support(RECIPES[name]).startswith("no")]
)
def test_presets_carry_parameters_of_any_floating_type(pool: Pool, how: str) -> None:
    one, other = pool.run(2, "tests.attach_jobs.of_types", how=how)
    assert one == other
    assert all(one.values())


@pytest.mark.parametrize(
    ("kind", "says"),
    [
        ("unfrozen", ["inner.weight, inner.bias; finish() and attach() again after unfreezing"]),
        (
            "replaced",
            ["made after attach() and differ between ranks: inner.weight, inner.bias; finish() and"],
        ),
        ("added", ["given parameters after attach()"]),
        ("added, no_sync", ["given parameters after attach()"]),
        ("grad", ["followed no exchange since step 1"]),
        ("no_sync", ["followed no exchange since step 1"]),
        ("finished", ["trains on after finish()"]),
        ("again", []),
    ],
)
def test_what_would_train_apart_is_said_once(pool: Pool, kind: str, says: list[str]) -> None:
    for said in pool.run(2, "tests.attach_jobs.said_once", kind=kind):
        assert len(said) == len(says)
        assert all(words in line for words, line in zip(says, said, strict=True))


def test_what_trains_is_looked_through_once_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    looked = []
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with farflung.attach(model, optimizer) as handle:
        monkeypatch.setattr(handle._checks, "check_all_exchanged", lambda: looked.append(handle.step))
        for _ in range(3):
            model(torch.ones(2)).sum().backward()
            optimizer.step()
    assert looked == [0, 1, 2]


# --- parameters that no loss reached ------------------------------------------------------------------------------


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_unused_parameters_are_left_alone_as_under_ddp(pool: Pool, optimizer: str) -> None:
    theirs = pool.run(2, "tests.attach_jobs.unused", optimizer=optimizer)
    ours = pool.run(2, "tests.attach_jobs.unused", how="synchronous", optimizer=optimizer)
    for one, other in zip(ours, theirs, strict=True):
        assert one["without"] == other["without"]
        assert one["end"] == other["end"]
        assert one["never"]


@pytest.mark.parametrize("how", ["synchronous", "pipelined(2)"])
@pytest.mark.parametrize("codec", ["identity", "int8", "error_feedback(topk(0.1))"])
def test_replicas_ask_once_a_step_what_none_has_used(pool: Pool, how: str, codec: str) -> None:
    """Though each parameter is in a bucket of its own, and what is used changes with each step."""
    one, other = pool.run(2, "tests.attach_jobs.unused", how=how, codec=codec, bucket_nbytes=1)
    assert one["end"] == other["end"]
    assert one["without"] == other["without"]
    assert one["asked"] == other["asked"]
    assert len(one["asked"]) == len({*one["asked"]}) > 1
    if (how, codec) == ("synchronous", "identity"):
        theirs, _ = pool.run(2, "tests.attach_jobs.unused")
        assert (one["end"], one["without"]) == (theirs["end"], theirs["without"])


@pytest.mark.parametrize(
    "codec", ["identity", "error_feedback(topk(0.1))", "dgc(density=0.1, warmup_steps=0)"]
)
def test_a_layer_that_is_frozen_later_stays_as_it_is(pool: Pool, codec: str) -> None:
    """Though a codec has held back gradients of it."""
    one, other = pool.run(2, "tests.attach_jobs.freezes", codec=codec)
    assert one == other
    frozen, frozen_end, others, others_end = one
    assert frozen == frozen_end
    assert others != others_end


@pytest.mark.parametrize("how", ["pipelined(2)", "delayed(2)", "delayed(2, pull='swap')"])
def test_late_results_leave_unused_parameters_alone_too(pool: Pool, how: str) -> None:
    one, other = pool.run(2, "tests.attach_jobs.unused", how=how)
    assert one["end"] == other["end"]
    assert one["never"]
    assert other["never"]


# --- autograd ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["synchronous", "delayed(2)"])
@pytest.mark.parametrize("places", ["-cc-", "cccc", "cc-cs", "ccccs", "-ncn", "nnnns"])
def test_reentrant_checkpoints_change_no_bit(pool: Pool, places: str, how: str) -> None:
    for ends in pool.run(2, "tests.attach_jobs.checkpointed", places=places, how=how):
        assert ends["with"] == ends["without"]


def test_a_gradient_in_two_parts_is_refused(pool: Pool) -> None:
    for said in pool.run(2, "tests.attach_jobs.shared_by_checkpoints"):
        assert "in two parts" in said
        assert "use_reentrant=False" in said


@pytest.mark.parametrize("how", ["local_sgd(4)", "delayed(2)", "synchronous"])
def test_what_does_not_train_does_not_travel(pool: Pool, how: str) -> None:
    """As of an adapter on a base in whole numbers, with a mask of the lowest number there is."""
    for end in pool.run(2, "tests.attach_jobs.trains_an_adapter", how=how):
        assert end["inside"]["base"].tolist() == [200] * 4096
        assert torch.equal(end["inside"]["mask"], attach_jobs.MASK)
        assert end["names"] <= {"statistic", "adapter.weight", "adapter.bias"}
        assert end["start"] < 1024
        assert end["evaluation"] < 2048


@pytest.mark.parametrize("how", ["local_sgd(4)", "synchronous"])
def test_what_does_not_train_is_averaged_where_it_has_changed(pool: Pool, how: str) -> None:
    """Its sum over the replicas may be more than its type holds; a table that has grown on one has no mean."""
    ends = pool.run(2, "tests.attach_jobs.trains_an_adapter", how=how, changed=True)
    for rank, end in enumerate(ends):
        assert end["inside"].pop("table").tolist() == [0, 1, 2, 3, 4][: 4 + rank]
        assert end["inside"]["statistic"].tolist() == [torch.finfo(torch.float16).max - 1024] * 3
        assert end["inside"]["inner.bias"].tolist() == [0.5] * 1000
        assert torch.equal(end["inside"]["mask"], attach_jobs.MASK)
        assert end["restored"]
        assert end["evaluation"] < 2 * 4000 + 2048
    assert all(torch.equal(ends[1]["inside"][name], value) for name, value in ends[0]["inside"].items())


def test_the_start_sends_what_differs(pool: Pool) -> None:
    """Rank 0's weights, and neither the base nor the mask, which are alike."""
    one, other = pool.run(2, "tests.attach_jobs.trains_an_adapter", how="synchronous", seed_step=1)
    weights = 4 * (13 * 1000 + 13 * 5)
    assert weights < one["start"] < weights + 1024
    assert other["start"] < 1024
    assert torch.equal(one["inside"]["inner.weight"], other["inside"]["inner.weight"])


def test_buffers_of_any_kind(pool: Pool) -> None:
    one, other = pool.run(2, "tests.attach_jobs.odd_buffers")
    assert all(torch.equal(one["start"][name], other["start"][name]) for name in one["start"])
    for rank, end in enumerate((one, other)):
        assert torch.equal(end["mean"], torch.full((3,), complex(0.5, 1.0)))
        assert torch.equal(end["own"], torch.full((3,), complex(rank, 2 * rank)))


def test_a_compiled_step_of_the_optimizer(pool: Pool) -> None:
    for ends in pool.run(2, "tests.attach_jobs.compiled_step", how="delayed(2)"):
        assert ends["plain"] == ends["compiled"]


def test_a_sampler_learns_from_all_ranks_when_to_draw_by_scores(pool: Pool) -> None:
    one, other = pool.run(2, "tests.attach_jobs.sampled")
    assert one == other
    assert one["told"][98] == "uniform"
    assert one["told"][100] in ("pool", "two")
    assert one["learned"]["steps"]["uniform"] >= 100
    late = pool.run(2, "tests.attach_jobs.sampled", how="local_sgd")
    assert [end["learned"]["steps"] for end in late] == [{"uniform": 150, "pool": 0, "two": 0}] * 2


# --- words, figures, and ranks that run out ------------------------------------------------------------------------


def test_who_averages_alone_is_told_what_for(pool: Pool) -> None:
    alone, _ = pool.run(2, "tests.attach_jobs.alone")
    assert "lost rank 1" in alone
    assert "averaging or scoring the model at step 6" in alone
    assert "deadline_s" in alone


@pytest.mark.parametrize("how", ["synchronous", "delayed(2)", "delayed(2, pull='swap')"])
def test_a_gradient_that_is_no_number(pool: Pool, how: str) -> None:
    for said in pool.run(2, "tests.attach_jobs.nonfinite", what="stop", how=how):
        assert "non-finite gradient at step 2 on rank 1" in said["said"]
    for what in ("skip", "exclude"):
        one, other = pool.run(2, "tests.attach_jobs.nonfinite", what=what, how=how)
        assert one["end"] == other["end"]
        assert one["finite"]
        assert not one["said"]
        if (what, how) == ("skip", "synchronous"):
            assert one["trail"][1] == one["trail"][2] != one["trail"][3]


def test_unlike_numbers_of_batches_name_join(pool: Pool) -> None:
    assert pool.run(2, "tests.attach_jobs.uneven") == [
        "nothing",
        "lost rank 0: it had left the run; if ranks have different numbers of batches, put the loop inside "
        "handle.join()",
    ]


@pytest.mark.parametrize("size", [2, 4])
def test_replicas_that_run_out_answer_the_others(pool: Pool, size: int) -> None:
    """Means are over those that have data, though what the loop does besides, clipping, is theirs alone."""
    ends = pool.run(size, "tests.attach_jobs.joins")
    wanted = attach_jobs.joined_alone([3, 6, 0, 5][:size])
    for rank, end in enumerate(ends):
        assert end["step"] == ends[0]["step"] == 12
        assert end["sent"] > 0
        sent = end["sent to"]
        assert all(to[rank] == 0 for to in sent.values())
        assert sum(sum(sent.get(kind, ())) for kind in ("gradients", "unused", "moments")) == end["sent"]
        assert sum(sent["start"]) < 2048  # the seeds are alike
        assert end["waited"] > 0
        for name, value in end["end"].items():
            assert torch.equal(value, ends[0]["end"][name])
            torch.testing.assert_close(value, wanted[name])
        assert end["momentum"].keys() == ends[0]["momentum"].keys()
        for name, value in end["momentum"].items():
            assert torch.equal(value, ends[0]["momentum"][name])
