"""Replicas in virtual time where members are lost: which go on, with what parameters and on which samples."""

from __future__ import annotations

import gc
import random
import re
import weakref
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import nn
from typing_extensions import override

from benchmarks.elastic.run import SCHEDULES
from farflung.comm import Purpose
from farflung.engine.flight import _pack_result, _unpack_result
from farflung.errors import ConfigError, ReplicaLeft, RunLost
from farflung.faults import Fault, FaultPlan
from farflung.loop import Replica
from farflung.loop.summary import Summary
from farflung.membership import PaxosMembership, View
from farflung.membership.agreement import Agreement
from farflung.membership.exchanges import ExchangeLog
from farflung.membership.joining import Joiner
from farflung.membership.roster import Roster
from farflung.membership.subgroup import Subgroup
from farflung.network import NetworkProfile, find_network
from farflung.recipes import RECIPES
from farflung.runs.config import SimulatedConfig
from farflung.runs.replicas import make_replica
from farflung.runs.simulation import run_replica
from farflung.sampling import UniformSampler
from farflung.sim import VirtualWorld
from farflung.state_trees import pack_tree
from farflung.tasks import Pending
from farflung.telemetry import Event, Telemetry
from farflung.types import CodecState, Draw, DrawContext, Payload, ReduceResult, State, Tag
from farflung.workloads.synthetic import Quadratic
from tests.covering import diagonal, thorough

STEPS, DEADLINE_S = 12, 2.0
LONG: dict[str, Any] = {"steps": 80, "deadline_s": 0.1, "evaluate_every": 80}
"""Of runs that are so long that replicas which were silent come back."""
CODECS = (
    "codec='identity'",
    "codec='int8'",
    "codec='error_feedback(topk(density=0.25))'",
    "reducer='shared_scale_qsgd(bits=4)'",
)
LEARNING = "reducer='powersgd(rank=1,min_ratio=1,dense_steps=0)'"
"""For schedules without late results."""
LATE = ("pipelined", "delayed", "streaming_diloco")


class Square(nn.Module):
    """A point whose parameters are a matrix."""

    def __init__(self, w: torch.Tensor) -> None:
        super().__init__()
        self.w = nn.Parameter(w.detach().view(8, -1).clone())

    @override
    def forward(self, centres: torch.Tensor) -> torch.Tensor:
        return self.w.flatten() - centres


class Squares(Quadratic):
    @override
    def build_model(self, generator: torch.Generator) -> nn.Module:
        return Square(next(super().build_model(generator).parameters()))


def large() -> Quadratic:
    """A model of 160 kB."""
    return Quadratic(dim=40_000, samples=16, groups=2)


class Noted(UniformSampler):
    """Notes which positions are drawn, by step and rank."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.drawn: dict[int, list[int]] = {}

    def draw(self, context: DrawContext) -> Draw:
        draw = super().draw(context)
        taken, count = self._history[context.step]
        self.drawn[context.step] = _part(taken, context.rank * count, count)
        return draw


def _part(taken: list[range], first: int, count: int) -> list[int]:
    return [position for one in taken for position in one][first : first + count]


@dataclass
class Ended:
    """A run: the models and losses of those that came to its end, and all replicas."""

    replicas: list[Replica]
    steps: int = STEPS
    models: list[State] = field(default_factory=list)
    summaries: list[Summary] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    samples: set[int] = field(default_factory=set)
    error: RunLost | None = None
    events: list[Event] = field(default_factory=list)

    @property
    def survivors(self) -> list[Replica]:
        """Those that have done all steps and are in the newest view of these."""
        done: list[Any] = [replica for replica in self.replicas if replica.completed_steps == self.steps]
        done = [
            replica for replica in done if not replica.runtime.elastic.is_joining
        ]  # these have followed to the end
        newest = max((one.runtime.elastic.view_number for one in done), default=0)
        return [one for one in done if one.runtime.elastic.view_number == newest]


def note(elastic: Any, ended: Ended) -> None:
    """Note the step of each exchange of steps that is whole at a member, and the ranks that contributed, by number."""
    made: dict[int, tuple[int, set[int]]] = {}
    log = elastic.agreement.log
    hold, adopt = log._store_result, log._adopt_result

    def noted_hold(logged: Any, value: Any) -> None:
        if logged.exchange in (
            Purpose.STEP.build_exchange_id(logged.step),
            Purpose.FLUSH.build_exchange_id(logged.step),
        ):
            made[logged.number] = logged.step, set(elastic.roster.list_contributors(logged.begun_step))
        hold(logged, value)

    async def noted_adopt(logged: Any, view: View, giver: int) -> None:
        await adopt(logged, view, giver)
        others: list[Any] = [replica.runtime.elastic for replica in ended.replicas]
        of_others = [one.made for one in others if one is not elastic and logged.number in one.made]
        if of_others:
            made[logged.number] = of_others[0][logged.number]

    elastic.made, log._store_result, log._adopt_result = made, noted_hold, noted_adopt


def run(
    size: int,
    faults: FaultPlan,
    recipe: str = "synchronous",
    *,
    seed: int = 0,
    least: int = 1,
    quorum: str = "majority",
    returns: bool = True,
    steps: int = STEPS,
    deadline_s: float = DEADLINE_S,
    evaluate_every: int = 5,
    network: NetworkProfile | None = None,
    workload: str = "Squares",
    seconds_per_sample: float = 0.001,
) -> Ended:
    config = SimulatedConfig.resolve(
        {
            "workload": f"{__name__}:{workload}",
            "workers": size,
            "steps": steps,
            "recipe": recipe,
            "seed": seed,
        }
        | {"evaluate_every": evaluate_every, "batch_size": 4}
    )
    world = VirtualWorld(
        size,
        network=network or find_network("wifi-10mbps"),
        seconds_per_sample=seconds_per_sample,
        faults=faults,
        needs_all_members=False,
        count_evaluation=True,
        deadline_s=deadline_s,
    )
    ended, again = Ended([], steps), []
    for runtime in world.runtimes:
        rank = runtime.comm.rank
        telemetry = Telemetry(rank, ended.events.append, world.injector)

        drawn: dict[int, list[int]] = {}

        def make(
            runtime: Any = runtime, telemetry: Any = telemetry, rank: int = rank, drawn: Any = drawn
        ) -> Replica:
            replica = make_replica(runtime, config.task, config.recipe, config.training, telemetry)
            replica.components.sampler.__class__ = Noted
            replica.components.sampler.drawn = drawn  # type: ignore[attr-defined]
            ended.replicas[rank : rank + 1] = [replica]
            return replica

        again.append(make)
        reach = make().components.schedule.max_steps_ahead
        members = [rank for rank in range(size) if rank not in faults.joining_ranks]
        runtime.elastic = PaxosMembership(
            runtime,
            b"key",
            min_members=least,
            quorum=quorum,
            patience_s=deadline_s,
            can_return=returns,
            max_steps_ahead=reach,
            members=members,
        )
        note(runtime.elastic, ended)
    try:
        for summary, model in world.run(
            [run_replica(*each) for each in zip(ended.replicas, again, strict=True)]
        ):
            ended.models.append(model)
            ended.summaries.append(summary)
            ended.losses.append(summary.final_loss or 0.0)
            ended.samples.add(summary.samples)
    except RunLost as error:
        ended.error = error
    return ended


def check(ended: Ended) -> None:
    """The laws: one model among those that came to the end, each position trained once, or twice where one was lost."""
    if ended.error is not None:
        said = str(ended.error)
        assert "nothing is on its way" not in said, said
        assert "no agreement" in said or "view" in said or "cannot begin" in said, said
        return
    first = ended.models[0]
    for model in ended.models[1:]:
        assert all(torch.equal(model[name], tensor) for name, tensor in first.items())
    assert len(ended.samples) == len(set(ended.losses)) == 1
    survivors = ended.survivors
    shared = {
        bytes(pack_tree(replica.engine.reducer_states.state_dict()[0]).numpy()) for replica in survivors
    }
    assert len(shared) == 1, "states of the reducer that all share differ"
    elastic: Any = survivors[0].runtime.elastic
    sampler: Any = survivors[0].components.sampler
    known = [replica.components.sampler for replica in (*survivors, *ended.replicas)]
    counts = Counter(position for one in sampler._returned_ranges for position in one)
    for step in range(ended.steps):
        taken, count = next(one._history[step] for one in known if step in one._history)  # type: ignore[attr-defined]
        for place, rank in enumerate(elastic.find_change(step).ranks):
            positions = _part(taken, place * count, count)
            returned = any(
                rank in change.lost_ranks and step in change.repeated_steps and change.step < ended.steps
                for change in elastic.changes
            )
            counts.update([] if returned else positions)
            drawn: Any = ended.replicas[rank].components.sampler
            assert returned or ended.replicas[rank] not in survivors or drawn.drawn[step] == positions
    assert counts == Counter(range(sampler._cursor))
    assert ended.samples == {counts.total() - sum(map(len, sampler._returned_ranges))}
    contributed: dict[int, set[int]] = {}
    for replica in survivors:
        known_made: Any = replica.runtime.elastic
        for step, ranks in known_made.made.values():
            contributed[step] = contributed.get(step, ranks) & ranks
    begun = min(elastic.roster.first_steps.get(replica.runtime.comm.rank, 0) for replica in survivors)
    for step in range(begun, max(contributed, default=-1) + 1):
        lacking = (
            set(elastic.find_change(step).ranks) - contributed[min(at for at in contributed if at >= step)]
        )
        given_back = {
            rank for change in elastic.changes if step in change.repeated_steps for rank in change.lost_ranks
        }
        assert lacking <= given_back, f"batches of {lacking - given_back} at step {step} are in no update"


def partitions(draw: random.Random, size: int, lasts: list[float]) -> list[Fault]:
    """Connections that are reset, and links that are cut between two replicas or parts, perhaps one way."""
    faults = []
    for _ in range(draw.randint(1, 3)):
        rank, *others = draw.sample(range(size), size)
        group = tuple(others[: draw.randrange(size - 1)]) if draw.random() < 0.5 else ()
        of: dict[str, Any] = {
            "rank": rank,
            "peer": None if group else others[0],
            "group": group,
            "at_s": draw.uniform(0.0, 0.5),
        }
        if draw.random() < 0.6:
            faults.append(Fault("reset", **of))
        else:
            faults.append(Fault("cut", **of, for_s=draw.choice(lasts), one_way=draw.random() < 0.3))
    return faults


def plan_of(draw: random.Random, joins: bool, between: bool, lasts: list[float]) -> tuple[int, FaultPlan]:
    """Crashes, replicas that hang and links that are cut, of up to all but one of two to six replicas; others join."""
    size = draw.choice([2, 3, 3, 4, 4, 5, 6])
    faults = partitions(draw, size, lasts) if between else []
    for rank in draw.sample(range(size), draw.randint(0 if between else 1, size - 1)):
        kind = draw.choice(["crash", "crash", "leave", "hang", "cut"])
        at: dict[str, Any] = (
            {"at_step": draw.randrange(1, STEPS)} if draw.random() < 0.3 else {"at_s": draw.uniform(0.0, 0.5)}
        )
        for_s = None if kind in ("crash", "leave") else draw.choice(lasts)
        faults.append(Fault(kind, rank=rank, **at, for_s=for_s))
    for rank in range(size, size + (draw.randint(0, 2) if joins else 0)):
        faults.append(Fault("join", rank=rank, at_s=draw.uniform(0.0, 0.4)))
        if draw.random() < 0.2:
            faults.append(Fault("crash", rank=rank, at_s=draw.uniform(0.4, 0.6)))
        size += 1
    return size, FaultPlan(tuple(faults))


def plan(seed: int) -> tuple[int, FaultPlan, str, dict[str, Any]]:
    """Return the plan of a seed; every third run is so long that replicas which were silent come back."""
    draw, schedule = random.Random(seed), SCHEDULES[seed % len(SCHEDULES)]
    long = seed // len(SCHEDULES) % 3 == 0
    lasts = [0.05, 0.2, 0.4] if long else [0.3, 5.0, 30.0]
    size, faults = plan_of(draw, True, seed % 2 == 1, lasts)
    members = CODECS if schedule.startswith(LATE) else (*CODECS, LEARNING)
    how = {"steps": 80, "deadline_s": 0.1} if long else {}
    return size, faults, f"synchronous(schedule='{schedule}', {draw.choice(members)})", how


def checked(seed: int) -> Ended:
    """Run the plan of a seed and check the laws; where no replica is lost or suspended, no fault has changed a bit."""
    size, faults, recipe, how = plan(seed)
    ended = run(size, faults, recipe, seed=seed, **how)
    check(ended)
    changes = [one.runtime.elastic.changes for one in ended.replicas if one.runtime.elastic is not None]
    if len(ended.models) == size and not any(
        one.lost_ranks or one.joined_ranks for each in changes for one in each
    ):
        plain = run(size, FaultPlan(), recipe, seed=seed, **how).models[0]
        assert all(torch.equal(ended.models[0][name], tensor) for name, tensor in plain.items())
    return ended


PRESETS = (
    "synchronous", "ring", "powersgd", "parameter_server", "pipe_sgd", "dga", "local_sgd", "post_local_sgd", "diloco",
    "streaming_diloco", "sparse_loco", "demo", "synchronous(scaling=linear)",
)  # fmt: skip


@pytest.mark.parametrize("preset", thorough(*PRESETS))
def test_seeded_plans_of_each_preset(preset: str) -> None:
    for seed in range(9):
        draw = random.Random(seed)
        size, faults = plan_of(draw, True, seed % 2 == 1, [0.05, 0.2, 0.4])
        check(run(size, faults, preset, seed=seed, **{**LONG, "steps": 40}))


def test_the_learning_rate_follows_the_number_of_samples() -> None:
    plan = FaultPlan().crash(3, at_step=4).crash(2, at_step=5)
    ended = run(4, plan, "synchronous(scaling=linear)")
    check(ended)
    rates = [
        event["learning_rate"] for event in ended.events if event["event"] == "step" and event["rank"] == 0
    ]
    assert rates[-1] == pytest.approx(float(str(rates[0])) / 2)


@pytest.mark.parametrize("preset", sorted(set(RECIPES) - set(PRESETS)))
def test_all_other_presets_are_refused_by_name(preset: str) -> None:
    with pytest.raises(ConfigError, match=r"--elastic 1: (schedule|reducer|replicas)|--collective native"):
        SimulatedConfig.resolve({"workload": "synthetic/quadratic", "recipe": preset, "elastic": "1"}).check()


@pytest.mark.parametrize("seed", [*range(5), *thorough(*range(5, 60))])
def test_seeded_plans_end_in_one_model_or_by_name(seed: int) -> None:
    checked(seed)


def test_replica_that_has_just_begun_gives_the_state_to_those_that_return() -> None:
    """It began after an evaluation whose result it holds for others, and which it has never waited for itself."""
    faults = (
        Fault("hang", rank=0, at_s=0.152576, for_s=5.0),
        Fault("cut", rank=3, at_s=0.214329, for_s=5.0),
        Fault("join", rank=4, at_s=0.362058),
        Fault("cut", rank=2, peer=1, at_s=0.413127, for_s=5.0),
    )
    ended = run(5, FaultPlan(faults), "synchronous(schedule='delayed(delay=3)', codec='int8')", seed=4153)
    check(ended)
    assert len(ended.models) == 5
    events = [event for event in ended.events if event["event"] == "view"]
    assert {tuple(event["members"]) for event in events if event["view"] == 4} == {(0, 1, 4, 2, 3)}  # type: ignore[arg-type]
    assert max(int(str(event["view"])) for event in events) == 4


def test_an_exchange_is_made_again_from_the_state_that_its_codec_had() -> None:
    """A connection is closed at any moment of a step, before and after residuals have changed."""
    recipe = "synchronous(codec='error_feedback(topk(density=0.25))')"
    plain = run(3, FaultPlan(), recipe)
    for moment in range(6):  # a step takes 14 ms
        ended = run(3, FaultPlan().reset(0, 1, at_s=0.02 + 0.0024 * moment), recipe)
        assert len(ended.models) == 3
        assert all(torch.equal(ended.models[0][name], tensor) for name, tensor in plain.models[0].items())


def test_a_run_goes_on_and_ends_without_a_replica_that_hangs_for_ever() -> None:
    ended = run(3, FaultPlan().hang(2, at_step=5))
    assert len(ended.models) == len(ended.survivors) == 2
    check(ended)


@pytest.mark.parametrize(
    ("plan", "least", "reason"),
    [
        (FaultPlan().hang(2, at_step=5), 3, "view 2 has 2 members, and the run needs 3"),
        (
            FaultPlan().hang(0, at_step=5).hang(1, at_step=5).hang(2, at_step=5),
            1,
            "hang for ever.* rank 0, 1, 2",
        ),
    ],
    ids=["too few are left", "none is left"],
)
def test_a_run_that_a_hang_ends_says_why(plan: FaultPlan, least: int, reason: str) -> None:
    assert re.search(reason, str(run(3, plan, least=least).error))


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_without_a_fault_an_elastic_run_is_bit_identical(schedule: str) -> None:
    recipe = f"synchronous(schedule='{schedule}', codec='int8')"
    config = {
        "workload": f"{__name__}:Squares",
        "workers": 3,
        "steps": STEPS,
        "recipe": recipe,
        "batch_size": 4,
    }
    import farflung

    plain = farflung.simulate(**config, evaluate_every=5).state_dict()  # type: ignore[arg-type]
    elastic = run(3, FaultPlan(), recipe)
    assert all(torch.equal(elastic.models[0][name], tensor) for name, tensor in plain.items())


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_results_are_freed_without_the_garbage_collector(
    schedule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    hold, held = ExchangeLog._store_result, list[weakref.ref[torch.Tensor]]()

    def noted(self: ExchangeLog, logged: Any, value: Any) -> None:
        given = logged.make.__closure__ or ()
        held.extend(weakref.ref(cell.cell_contents) for cell in given if torch.is_tensor(cell.cell_contents))
        hold(self, logged, value)
        held.extend(map(weakref.ref, logged.stored_result))

    monkeypatch.setattr(ExchangeLog, "_store_result", noted)
    gc.disable()
    try:
        ended = run(3, FaultPlan(), f"synchronous(schedule='{schedule}')")
        alive = sum(tensor() is not None for tensor in held)
    finally:
        gc.enable()
    assert ended.error is None
    assert len(held) > 3 * 3
    assert alive <= 3 * 2, "of each replica's exchanges the last two"


def test_the_junior_of_two_stops_where_the_death_of_the_senior_is_not_certified() -> None:
    ended = run(2, FaultPlan((Fault("crash", rank=0, at_step=3),)))
    assert "may be alive: 0; needed: more than half of 2 members, or half with 0" in str(ended.error)


def test_with_a_quorum_of_one_parts_go_on_alone() -> None:
    cut = FaultPlan().cut(0, group=(1,), at_s=0.1)
    ended = run(5, cut, quorum="1")
    assert ended.error is None
    parts: list[Any] = [replica.runtime.elastic for replica in ended.replicas]
    assert [one.changes[-1].ranks for one in parts] == [(0, 1)] * 2 + [(2, 3, 4)] * 3
    first, _, _, other, _ = (model["w"] for model in ended.models)
    assert not torch.equal(first, other)
    for model, of in zip(ended.models, (first, first, other, other, other), strict=True):
        assert torch.equal(model["w"], of)


def views_of(ended: Ended) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Which ranks each view is without and which come to it, as a member of all views knows it."""
    elastics: list[Any] = [replica.runtime.elastic for replica in ended.survivors]
    return [
        (change.lost_ranks, change.joined_ranks)
        for change in max((one.changes for one in elastics), key=len)[1:]
    ]


@pytest.mark.parametrize("fault", ["hang", *thorough("cut")])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_one_that_was_silent_is_suspended_and_comes_back(schedule: str, fault: str) -> None:
    plan = FaultPlan((Fault(fault, rank=1, at_s=0.2, for_s=0.3),))
    ended = run(3, plan, f"synchronous(schedule='{schedule}')", **LONG)
    check(ended)
    assert len(ended.models) == 3
    assert views_of(ended) == [((1,), ()), ((), (1,))]


def test_a_half_that_was_cut_off_comes_back() -> None:
    ended = run(4, FaultPlan().cut(3, group=(2,), at_s=0.2, for_s=0.3), **LONG)
    check(ended)
    assert len(ended.models) == 4
    lost, joined = map(set, zip(*views_of(ended), strict=True))
    assert (
        {rank for ranks in lost for rank in ranks} == {rank for ranks in joined for rank in ranks} == {2, 3}
    )


def test_without_the_wish_to_return_one_that_was_silent_ends() -> None:
    ended = run(3, FaultPlan().hang(1, at_step=3, for_s=10.0), returns=False)
    assert [replica.runtime.comm.rank for replica in ended.survivors] == [0, 2]
    check(ended)


def test_one_that_is_back_after_the_end_of_the_run_ends_by_name() -> None:
    ended = run(3, FaultPlan().hang(1, at_step=3, for_s=10.0))
    assert [replica.runtime.comm.rank for replica in ended.survivors] == [0, 2]
    elastic: Any = ended.replicas[1].runtime.elastic
    assert "no agreement on view 2" in str(elastic.agreement.error)
    assert elastic._runtime.read_clock() < 10 + 2 * DEADLINE_S + 2, (
        "it does not wait for processes that have ended"
    )


def test_one_whose_first_step_is_beyond_the_last_of_the_run_leaves() -> None:
    ended = run(3, FaultPlan().join(2, at_step=STEPS - 1))
    assert [replica.runtime.comm.rank for replica in ended.survivors] == [0, 1]
    elastic: Any = ended.replicas[2].runtime.elastic
    assert isinstance(elastic.agreement.error, ReplicaLeft)
    assert str(elastic.agreement.error) == "the run has ended before this replica could begin"
    check(ended)


def test_one_that_is_busy_is_waited_for() -> None:
    """Its computation takes eight times the patience; its thread that carries exchanges answers meanwhile."""
    slow = FaultPlan().slow(1, factor=200.0, at_step=5, for_s=0.1)
    ended, plain = run(3, slow, **LONG), run(3, FaultPlan(), **LONG)
    assert max(float(str(one["duration_s"])) for one in ended.events if one["event"] == "step") > 0.7
    assert views_of(ended) == []
    assert all(torch.equal(ended.models[0][name], tensor) for name, tensor in plain.models[0].items())


def test_one_that_makes_steps_is_waited_for_however_long_the_block() -> None:
    """Its block of local steps takes 20 times the patience, and each step less than 10 times."""
    slow = FaultPlan().slow(1, factor=100.0, at_step=4, for_s=3.0)
    how = {**LONG, "recipe": "synchronous(schedule='local_sgd(sync_every=8)')"}
    ended, plain = run(3, slow, **how), run(3, FaultPlan(), **how)
    times = sorted(
        float(str(one["t"])) for one in ended.events if one["event"] == "step" and one["rank"] == 1
    )
    assert times[7] - times[3] > 1.5
    assert views_of(ended) == []
    assert all(torch.equal(ended.models[0][name], tensor) for name, tensor in plain.models[0].items())


def test_one_that_is_busy_for_too_long_is_left_out_by_name(caplog: pytest.LogCaptureFixture) -> None:
    ended = run(3, FaultPlan().slow(1, factor=400.0, at_step=5, for_s=0.1), **{**LONG, "steps": 200})
    check(ended)
    assert views_of(ended) == [((1,), ()), ((), (1,))]
    assert "rank 1 counts as lost: it answers, but has neither reached that exchange" in caplog.text


def test_a_run_in_which_nothing_moves_though_all_answer_ends_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fault of the program, for which no member is left out; one is lost later, so that the run ends anyway."""
    recv = Subgroup.recv

    def stall(self: Subgroup, src: int, tag: Tag, *expect: Any) -> Pending[Payload]:
        is_stalled = tag.exchange == Purpose.STEP.build_exchange_id(3)
        return Pending() if is_stalled else recv(self, src, tag, *expect)

    monkeypatch.setattr(Subgroup, "recv", stall)
    ended = run(2, FaultPlan().crash(1, at_s=30.0), deadline_s=0.1)
    said = (
        r"^exchange \d+ is not complete after 10 s, and nothing has moved for 10 s, but all members answer$"
    )
    assert re.search(said, str(ended.error))


@pytest.mark.thorough
def test_one_that_flaps_comes_back_later_each_time() -> None:
    plan = FaultPlan()
    for number in range(3):
        plan = plan.hang(2, at_s=0.5 + 5 * number, for_s=0.5)
    ended = run(3, plan, **{**LONG, "steps": 1500})
    check(ended)
    elastic: Any = ended.survivors[0].runtime.elastic
    back = [change.time_s for change in elastic.changes if change.joined_ranks]
    delays = [t - (1.0 + 5 * number) for number, t in enumerate(back)]
    assert len(delays) == 3
    assert delays[0] < 0.2
    assert delays[1] == pytest.approx(1.0, abs=0.2)
    assert delays[2] == pytest.approx(2.0, abs=0.2)


@diagonal("schedule, members", SCHEDULES, CODECS[1:])
def test_a_replica_joins(schedule: str, members: str) -> None:
    ended = run(3, FaultPlan().join(2, at_s=0.2), f"synchronous(schedule='{schedule}', {members})")
    assert len(ended.models) == 3
    (change,) = ended.replicas[0].runtime.elastic.changes[1:]  # type: ignore[union-attr]
    assert change.ranks == (0, 1, 2)
    assert change.joined_ranks == (2,)
    check(ended)


def test_one_that_is_connected_is_admitted_once_its_replica_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    given = Joiner.receive_state

    async def late(self: Joiner) -> list[torch.Tensor]:
        await self._runtime.sleep_until(0.5)
        return await given(self)

    monkeypatch.setattr(Joiner, "receive_state", late)
    ended = run(3, FaultPlan().join(2, at_s=0.1), **LONG)
    (change,) = ended.replicas[0].runtime.elastic.changes[1:]  # type: ignore[union-attr]
    assert (change.joined_ranks, len(ended.models)) == ((2,), 3)
    assert change.time_s > 0.5
    assert change.step > 5  # the others have gone on
    check(ended)


def test_one_that_joins_exchanges_by_the_collectives_that_the_others_have_chosen(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """They agree on them before the run; one that took the usual ones would wait for messages that nobody sends."""
    init, chosen = PaxosMembership.__init__, dict.fromkeys(range(4, 1024, 4), "ring")

    def choose(self: PaxosMembership, runtime: Any, *options: Any, members: list[int], **more: Any) -> None:
        if runtime.comm.rank in members:
            runtime.comm.auto_collectives = chosen
        init(self, runtime, *options, members=members, **more)

    monkeypatch.setattr(PaxosMembership, "__init__", choose)
    ended = run(3, FaultPlan().join(2, at_s=0.2), "synchronous(collective=auto)")
    assert len(ended.models) == 3
    assert ended.replicas[2].runtime.comm.auto_collectives == chosen
    check(ended)


def test_one_that_joins_a_resumed_run_has_sent_nothing_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """The state that it gets is of another replica, which counts its bytes itself."""

    make = make_replica

    def resumed(*parts: Any) -> Replica:
        replica = make(*parts)
        if replica.runtime.comm.rank < 2:
            replica._earlier_sent = {"gradients": [10**6] * 3}
        return replica

    monkeypatch.setattr("tests.membership.test_elastic.make_replica", resumed)
    ended = run(3, FaultPlan().join(2, at_s=0.2))
    check(ended)
    sent = [sum(sum(each) for each in (summary.sent or {}).values()) for summary in ended.summaries]
    assert [nbytes > 3 * 10**6 for nbytes in sent] == [True, True, False]


@pytest.mark.parametrize("schedule", [one for one in SCHEDULES if "sync_every" in one])
def test_one_that_joins_within_a_block_has_no_updates_of_the_one_that_gave_the_state(
    schedule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    join, states = Replica._join, list[tuple[bool, torch.Tensor | None, torch.Tensor]]()

    async def noted(self: Replica) -> None:
        await join(self)
        for merge, _, state in self.engine._merge_states:
            if merge.average_target == "gradient":
                continue
            assert state.anchor is not None
            states.append((state.has_updates, state.local.get("base"), state.anchor.clone()))

    monkeypatch.setattr(Replica, "_join", noted)
    for at_s in (0.2, 0.25, 0.3, 0.35):
        check(run(3, FaultPlan().join(2, at_s=at_s), f"synchronous(schedule='{schedule}')"))
    assert states
    for has_updates, given, anchor in states:
        assert not has_updates
        assert given is None or torch.equal(given, anchor)


@pytest.mark.parametrize("lost", [0, *thorough(1)])
@pytest.mark.parametrize("schedule", [one for one in SCHEDULES if one.startswith(LATE)])
def test_a_replica_joins_while_another_is_lost(schedule: str, lost: int) -> None:
    """At any moment from before it is let in to after it has begun, with residuals."""
    recipe = f"synchronous(schedule='{schedule}', {CODECS[2]})"
    for moment in range(0, 8, 2):
        faults = FaultPlan().join(3, at_s=0.2).crash(lost, at_s=0.19 + 0.05 * moment)
        ended = run(4, faults, recipe)
        assert [replica.runtime.comm.rank for replica in ended.survivors] == sorted({0, 1, 2, 3} - {lost})
        check(ended)


def test_batches_are_given_back_at_the_earliest_change_where_a_later_view_begins_at_an_earlier_step() -> None:
    """A member that alone holds exchanges is lost before it hands them over, after the view that counts on them."""
    faults = FaultPlan().join(4, at_s=0.115).crash(2, at_s=0.372).crash(0, at_s=0.389)
    for peer in (1, 3):
        faults = faults.cut(0, peer, at_s=0.326, for_s=3.0, one_way=True)
    ended = run(5, faults, "synchronous(schedule='delayed(delay=3)')")
    assert [replica.runtime.comm.rank for replica in ended.survivors] == [1, 3, 4]
    elastic: Any = ended.survivors[0].runtime.elastic
    assert [change.step for change in elastic.changes] == [0, 11, 13, 11]
    check(ended)


@pytest.mark.parametrize(
    ("schedule", "joined_s"),
    [("synchronous", 0.632), ("delayed(delay=3)", 1.176)],
)
def test_one_that_has_joined_hands_over_what_the_one_before_it_alone_held(
    schedule: str, joined_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A replica's last results do not arrive at another one; it gives them to one that joins, and crashes."""
    hand, handed = Agreement.send_handovers, list[tuple[str, int]]()

    def noted(self: Agreement, view: View) -> None:
        handed.extend((x.giver, x.exchange) for x in view.list_handovers() if x.receiver in view.holders[0])
        hand(self, view)

    monkeypatch.setattr(Agreement, "send_handovers", noted)
    for before_ms in range(10, 30, 4):
        cut_s = joined_s - before_ms / 1000
        faults = FaultPlan().join(2, at_s=0.2).cut(0, 1, at_s=cut_s, for_s=3.0, one_way=True)
        ended = run(3, faults.crash(0, at_s=joined_s), f"synchronous(schedule='{schedule}')")
        assert [replica.runtime.comm.rank for replica in ended.survivors] == [1, 2]
        check(ended)
    assert "2" in {giver for giver, _ in handed}


WITHOUT_STATE = {
    "before it comes": FaultPlan().crash(0, at_s=0.1).crash(1, at_s=0.1),
    "one before it comes": FaultPlan().crash(0, at_s=0.19),
    "while it is let in": FaultPlan().crash(0, at_s=0.256).crash(1, at_s=0.256),
    "in silence": FaultPlan().hang(0, at_s=0.25, for_s=60.0).hang(1, at_s=0.25, for_s=60.0),
}


@diagonal("name, schedule", WITHOUT_STATE, ["synchronous", "pipelined(width=2)", "delayed(delay=3)"])
def test_one_that_joins_ends_by_name_where_none_has_the_state(name: str, schedule: str) -> None:
    ended = run(3, WITHOUT_STATE[name].join(2, at_s=0.25), f"synchronous(schedule='{schedule}')")
    check(ended)
    elastic: Any = ended.replicas[2].runtime.elastic
    assert elastic.is_joining
    assert str(elastic.agreement.error) == "rank 2 cannot begin: members 0, 1 are lost or silent"


LEAVES: dict[str, tuple[FaultPlan, list[int]]] = {
    "the senior": (FaultPlan().leave(0, at_step=4), [1, 2, 3]),
    "two at once": (FaultPlan().leave(3, at_s=0.15).leave(0, at_s=0.15), [1, 2]),
    "beside a crash": (FaultPlan().leave(1, at_step=3).crash(2, at_step=3), [0, 3]),
    "all but one": (FaultPlan().leave(0, at_step=4).leave(1, at_step=4).leave(3, at_step=4), [2]),
}


@diagonal("name, schedule", LEAVES, SCHEDULES)
def test_the_others_go_on_where_some_leave(name: str, schedule: str) -> None:
    faults, survivors = LEAVES[name]
    ended = run(4, faults, f"synchronous(schedule='{schedule}', codec='int8')")
    assert ended.error is None
    assert [replica.runtime.comm.rank for replica in ended.survivors] == survivors
    for fault in faults.faults:
        elastic: Any = ended.replicas[fault.rank].runtime.elastic
        assert isinstance(elastic.agreement.error, ReplicaLeft) == (fault.kind == "leave")
    check(ended)


def test_an_exchange_is_made_once_where_a_view_ends_as_soon_as_it_is_installed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    install, under_way = Agreement.install_view, list[int]()

    def twice(self: Agreement, view: View) -> None:
        install(self, view)
        under_way.append(sum(logged.stored_result is None for logged in self.log._exchanges.values()))
        self.freeze()
        install(self, view._replace(number=view.number + 1))

    monkeypatch.setattr(Agreement, "install_view", twice)
    ended = run(2, FaultPlan().crash(1, at_s=0.05))
    assert ended.error is None
    assert under_way == [1]
    check(ended)


def test_one_that_cannot_leave_by_a_view_has_not_left() -> None:
    """The junior of two, without a majority once the senior is gone."""
    ended = run(2, FaultPlan().crash(0, at_step=3).leave(1, at_step=3))
    assert "no agreement on view 2" in str(ended.error)
    elastic: Any = ended.replicas[1].runtime.elastic
    assert type(elastic.agreement.error) is RunLost
    assert elastic.agreement.leave_result.error is elastic.agreement.error


def test_a_result_that_is_given_teaches_what_all_share() -> None:
    q, metadata = {"8x8": torch.ones(1, 8, 1)}, torch.zeros(3, dtype=torch.float64)
    given = _unpack_result(_pack_result(ReduceResult(torch.ones(4), 2.0, metadata, shared_delta={"q": q})))
    assert given.update_state is not None
    learned = given.update_state(CodecState({"q": {}, "seed": 5}, {"residual": {"8x8": q["8x8"]}}))
    assert torch.equal(learned.shared["q"]["8x8"], q["8x8"])
    assert learned.shared["seed"] == 5
    assert learned.local.keys() == {"residual"}


@pytest.mark.parametrize("lost", [False, True])
@pytest.mark.parametrize(
    ("members", "cut_s"), [("codec='int8'", 0.1), (LEARNING, 0.084)], ids=["int8", "powersgd"]
)
def test_one_that_leaves_hands_over_what_it_alone_holds(
    members: str, cut_s: float, lost: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where it is lost before that, the exchange is made again without it."""
    hand, handed = Agreement.send_handovers, Counter[str]()

    def noted(self: Agreement, view: View) -> None:
        handed.update(one.giver for one in view.list_handovers())
        if not lost:
            hand(self, view)

    monkeypatch.setattr(Agreement, "send_handovers", noted)
    faults = FaultPlan().cut(0, 1, at_s=cut_s, for_s=0.5, one_way=True).leave(0, at_s=cut_s + 0.02)
    ended = run(3, faults, f"synchronous(collective='ring', {members})")
    assert handed == {"0": 2}
    elastic: Any = ended.survivors[0].runtime.elastic
    assert elastic.view_number == 2 + lost
    assert [replica.runtime.comm.rank for replica in ended.survivors] == [1, 2]
    check(ended)


@pytest.mark.parametrize(
    ("faults", "survivors", "views"),
    [
        (FaultPlan().reset(1, 2, at_s=0.2), {0, 1, 2, 3, 4}, 2),
        (FaultPlan().reset(0, group=(1,), at_s=0.2), {0, 1, 2, 3, 4}, 2),
        (FaultPlan().reset(0, at_step=2).reset(1, at_step=8), {0, 1, 2, 3, 4}, 3),
        (FaultPlan().cut(1, 2, at_s=0.2), {0, 1, 2, 3, 4}, 2),
        (FaultPlan().cut(1, 2, at_s=0.2, one_way=True), {0, 1, 2, 3, 4}, 2),
        (FaultPlan().cut(0, group=(1,), at_s=0.2), {2, 3, 4}, 2),
        (FaultPlan().cut(0, group=(1,), at_s=0.2, for_s=0.5), {0, 1, 2, 3, 4}, 1),
        (FaultPlan().cut(1, 2, at_step=2).crash(0, at_step=8), {1, 2, 3, 4}, 3),
        (FaultPlan().cut(1, 2, at_step=2).cut(1, 0, at_step=8), {0, 1, 2, 3, 4}, 3),
    ],
    ids=[
        "a pair is reset",
        "parts are reset",
        "two resets",
        "a pair is cut",
        "a pair is cut one way",
        "parts are cut",
        "a short cut",
        "the relay crashes",
        "the relay is cut off",
    ],
)
def test_broken_connections_are_made_again(faults: FaultPlan, survivors: set[int], views: int) -> None:
    ended = run(5, faults, "synchronous(codec='int8')")
    assert {replica.runtime.comm.rank for replica in ended.survivors} == survivors
    first: Any = ended.survivors[0].runtime.elastic
    assert first.view_number == views
    check(ended)


@pytest.mark.parametrize(
    ("size", "pair", "breaks"), [(2, (0, 1), 12), (3, (1, 2), 6), *thorough((3, (0, 2), 6), (5, (2, 4), 6))]
)
def test_a_pair_whose_connection_breaks_again_and_again_stays(
    size: int, pair: tuple[int, int], breaks: int
) -> None:
    """From the sixth time within a minute on it is relayed, where a third reaches both."""
    plan = FaultPlan()
    for number in range(12):
        plan = plan.reset(*pair, at_s=0.3 + 0.3 * number)
    ended = run(size, plan, **{**LONG, "steps": 300, "deadline_s": 2.0})
    check(ended)
    assert [replica.runtime.comm.rank for replica in ended.survivors] == list(range(size))
    elastic: Any = ended.replicas[pair[0]].runtime.elastic
    assert [change.lost_ranks for change in elastic.changes] == [()] * (breaks + 1)


def test_a_run_ends_by_name_where_the_agreement_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> None:
        raise ValueError("what nothing expects")

    monkeypatch.setattr(Roster, "record_change", fails)
    with pytest.raises(RunLost, match="the agreement on members failed: ValueError: what nothing expects"):
        raise run(3, FaultPlan().crash(1, at_s=0.1)).error or AssertionError
