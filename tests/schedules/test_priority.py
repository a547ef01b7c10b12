"""Updates before buckets are used: the bits of synchronous SGD, the instants of uses, orders, and what is refused."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from farflung import attach
from farflung.attach_checks import describe_attach_support
from farflung.comm import ExchangeChannel
from farflung.comm.channel import PHASE_PRIORITY
from farflung.devices import DeviceProfile, LayerProfile
from farflung.engine import GradientBuckets
from farflung.engine.forward import ForwardWatcher, trace_forward
from farflung.errors import ConfigError, Unsupported
from farflung.loop import Replica
from farflung.recipes import parse_recipe
from farflung.schedules import Priority
from farflung.schedules.orders import rank_by_tac, rank_by_tic
from farflung.sim import LinkModel, VirtualWorld
from farflung.tasks import Pending
from farflung.types import Payload, Runtime, Tag
from farflung.wall import WallRuntime
from farflung.workloads import Quadratic
from tests.helpers import same_bits
from tests.pool import Pool
from tests.schedules.runs import APART, InPieces, Run, pieces
from tests.worlds import jobs

LINK = LinkModel(0.05, 1e5)
CODECS = [
    "identity",
    "int8",
    "qsgd",
    "error_feedback(topk(density=0.2))",
    "dgc(density=0.5, warmup_steps=4)",
    "truncate16",
]
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "sgd": {"momentum": 0.9, "weight_decay": 0.01, "learning_rate": 0.02, "learning_rate_schedule": "cosine"},
    "adamw": {"optimizer": "adamw", "learning_rate": 0.01},
}


def run(schedule: str, settings: dict[str, Any], size: int = 3, **parts: Any) -> Run:
    return Run(schedule, size, {**APART, **parts}, LINK, 0.002, workload=pieces, settings=settings)


# --- bits -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("codec", CODECS)
def test_parameters_and_evaluations_are_those_of_synchronous_sgd(codec: str, optimizer: str) -> None:
    settings = {**OPTIMIZERS[optimizer], "evaluate_every": 3}
    ours, theirs = (run(schedule, settings, codec=codec).whole() for schedule in ("priority", "synchronous"))
    for rank in range(3):
        assert same_bits(ours.weights(rank), theirs.weights(rank))
    told = [
        [(one["step"], one["loss"]) for one in each.events[0] if one["event"] == "evaluation"]
        for each in (ours, theirs)
    ]
    assert len(told[0]) == 7
    assert told[0] == told[1]


@pytest.mark.parametrize(("codec", "optimizer"), [*zip(CODECS, itertools.cycle(OPTIMIZERS), strict=False)])
def test_real_processes_end_with_the_bits_of_synchronous_sgd(pool: Pool, codec: str, optimizer: str) -> None:
    named = "adamw" if optimizer == "adamw" else "sgd"
    found = [
        pool.run(
            3,
            "tests.worlds.jobs.wall",
            parts={"codec": codec, "schedule": schedule, "bucket_nbytes": 1024},
            steps=5,
            batch_size=8,
            settings={"optimizer": named},
        )
        for schedule in ("priority(order='tac')", "synchronous")
    ]
    ours, theirs = ([end["parameters"] for end, _ in each] for each in found)
    assert ours == theirs
    assert len(set(ours)) == 1


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_resumed_run_has_the_bits_of_one_that_was_never_stopped(optimizer: str, tmp_path: Path) -> None:
    settings = {**OPTIMIZERS[optimizer], "steps": 12, "checkpoint_every": 5}

    def make(schedule: str, folder: Path | None = None) -> Run:
        parts = {**APART, "codec": "error_feedback(topk(density=0.2))"}
        return Run(schedule, 2, parts, LINK, 0.002, workload=pieces, settings=settings, folder=folder)

    whole = make("priority", tmp_path).whole()
    resumed = make("priority", tmp_path)
    for replica in resumed.replicas:
        replica.resume(5)
    resumed.whole()
    assert same_bits(resumed.weights(), whole.weights())
    assert same_bits(resumed.weights(), make("synchronous").whole().weights())


def test_a_loss_that_is_not_finite_skips_the_step_it_belongs_to() -> None:
    class Once(InPieces):
        def compute_losses(self, model: nn.Module, batch: Any) -> Tensor:
            losses = super().compute_losses(model, batch)
            if not model.training:
                return losses
            self.passes = getattr(self, "passes", 0) + 1
            return losses * torch.nan if self.passes == 6 else losses

    ours, theirs = (
        Run(
            schedule,
            2,
            APART,
            LINK,
            workload=lambda: Once(dim=12, samples=64),
            settings={"on_nonfinite": "skip"},
        )
        for schedule in ("priority", "synchronous")
    )
    ours.replicas[0].workload.passes = 0  # type: ignore[attr-defined]
    ours.replicas[1].workload.passes = 0  # type: ignore[attr-defined]
    assert same_bits(ours.whole().weights(), theirs.whole().weights())


# --- instants ---------------------------------------------------------------------------------------------------


def test_a_layer_begins_when_its_own_mean_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    layers = tuple(LayerProfile(3, 0.25, 0.5) for _ in range(4))
    one = Run(
        "priority(order='forward')", 2, APART, LinkModel(0.0625, 1024.0), workload=pieces,
        settings={"steps": 3, "batch_size": 1}, around={"device": DeviceProfile(layers=layers)},
    )  # fmt: skip
    replica, update = one.replicas[0], Replica._update_bucket
    uses: list[tuple[int, float, float, float]] = []

    async def watched(self: Replica, index: int) -> None:
        begin_s = self.runtime.read_clock()
        flights = [flight for flight in self.engine.flights if flight.unit.number == index]
        await update(self, index)
        if self is replica and flights:
            assert flights[0].end_s is not None
            uses.append((index, begin_s, flights[0].end_s, self.runtime.read_clock()))

    monkeypatch.setattr(Replica, "_update_bucket", watched)
    one.steps(3)
    assert [index for index, *_ in uses] == [3, 2, 1, 0] * 2, "the last bucket has the first parameters"
    for step in range(2):
        ready_s = 0.0
        for place, (_, begin_s, arrived_s, end_s) in enumerate(uses[4 * step : 4 * step + 4]):
            assert end_s == max(begin_s, arrived_s), (
                "it goes on at the instant of its mean, not before or after"
            )
            assert not place or begin_s == ready_s + 0.25, "each layer takes its own time"
            ready_s = end_s
        arrivals_s = [arrived_s for _, _, arrived_s, _ in uses[4 * step : 4 * step + 4]]
        assert uses[4 * step][1] < arrivals_s[0], "the first layer waits"
        assert arrivals_s[3] < arrivals_s[0] < arrivals_s[1] < arrivals_s[2], (
            "the last bucket's message had begun"
        )


def test_waits_in_the_forward_pass_count_as_exposed() -> None:
    one = run("priority", {"steps": 4}).whole()
    for event in one.step_events()[1:]:
        assert event["compute_s"] == pytest.approx(4 * 3 * 0.002)
        assert event["exposed_s"] > 0  # type: ignore[operator]


def test_later_phases_of_an_exchange_are_less_urgent(monkeypatch: pytest.MonkeyPatch) -> None:
    priorities: list[int] = []

    async def body(runtime: Runtime) -> None:
        send = runtime.comm.send

        def record(payload: Payload, dst: int, tag: Tag, priority: int = 0) -> Pending[None]:
            priorities.append(priority)
            return send(payload, dst, tag, priority)

        monkeypatch.setattr(runtime.comm, "send", record)
        for priority in (5, None):
            channel = ExchangeChannel(runtime.comm, 0 if priority else 1, 0, priority)
            first, second = channel.reserve_hops(2), channel.reserve_hops(1)
            for hop in (first, first + 1, second):
                channel.send(Payload((torch.zeros(1),)), 1 - runtime.comm.rank, hop)

    world = VirtualWorld(2)
    world.run([body(world.runtimes[0]), body(world.runtimes[1])])
    assert priorities[:6] == [5, 5, 5 + PHASE_PRIORITY, 0, 0, 0]


# --- uses -------------------------------------------------------------------------------------------------------


class Parts(nn.Module):
    """What a module uses of another, what no gradient flows through, and what no module is called for."""

    def __init__(self) -> None:
        super().__init__()
        self.outside = nn.Parameter(torch.ones(8))
        self.head = nn.Linear(8, 2)
        self.unused = nn.Linear(2, 2)
        self.frozen_use = nn.Linear(8, 8)
        self.rnn = nn.LSTM(8, 8)
        self.attention = nn.MultiheadAttention(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = x.to(self.head.weight.dtype).view(-1, 1, self.head.weight.shape[1])  # reads no values
        x, _ = self.attention(x, x, x)
        with torch.no_grad():
            shift = self.frozen_use(x)
        x, _ = self.rnn(x + shift)
        return F.linear(x * self.outside, self.head.weight.t().contiguous().t(), self.head.bias)


def test_all_kinds_of_uses_are_found() -> None:
    model = Parts()
    buckets = GradientBuckets(model.named_parameters(), 1)
    trace = trace_forward(buckets, lambda: model(torch.randn(3, 8)))
    used = [buckets[index].names[0] for index in trace.order]
    assert [name.split(".")[0] for name in used] == (
        ["attention"] * 4 + ["frozen_use"] * 2 + ["rnn"] * 4 + ["outside"] + ["head"] * 2
    )
    assert {"attention.out_proj.weight", "head.weight"} <= set(used)
    assert trace.dependencies[-1] == {bucket.index for bucket in buckets if "unused" not in bucket.names[0]}
    assert sum(trace.flops) > 0


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_a_use_that_cannot_be_seen_is_refused() -> None:
    layer = torch.jit.trace(nn.Linear(2, 2), torch.ones(1, 2))
    buckets = GradientBuckets(layer.named_parameters(), 1)
    with ForwardWatcher(buckets, lambda index: None) as watcher:
        loss = layer(torch.ones(1, 2)).sum()
    buckets.run_backward(loss, lambda index: None)
    with pytest.raises(Unsupported, match=r"step 7: parameter bias is used by compiled or scripted code"):
        watcher.check_gradients(7)


class Swapping(nn.Module):
    """Pieces whose order changes at a training pass."""

    def __init__(self, at: int) -> None:
        super().__init__()
        self.pieces = nn.ParameterList(torch.zeros(3) for _ in range(4))
        self.at, self.passes = at, 0

    def forward(self, x: Tensor) -> Tensor:
        pieces = list(self.pieces)
        if self.training:
            if self.passes == self.at:
                pieces.reverse()
            self.passes += 1
        total = x
        for piece in pieces:
            total = total - piece.repeat(4)
        return total


@pytest.mark.parametrize("at", [1, 10, 100])
def test_another_order_of_use_is_refused_at_its_step(at: int) -> None:
    class Swapped(InPieces):
        def build_model(self, generator: torch.Generator) -> nn.Module:
            return Swapping(at)

    def workload() -> Quadratic:
        return Swapped(dim=12, samples=64)

    settings = {"steps": 120, "evaluate_every": 7, "batch_size": 1}
    one = Run("priority", 2, APART, LINK, workload=workload, settings=settings)
    words = rf"step {at}: the forward pass uses parameter pieces.3 at another place"
    with pytest.raises(Unsupported, match=words):
        one.whole()
    assert one.replicas[0].completed_steps == at


def test_another_order_of_use_is_refused_on_the_wall_clock() -> None:
    runtime = WallRuntime(0, 1, None)
    try:
        replica = jobs.replica(runtime, {"schedule": "priority", "bucket_nbytes": 1}, 3, 4)
        replica._use_order = [*replica._use_order[1:], replica._use_order[0]]
        with pytest.raises(Unsupported, match=r"step 0: the forward pass uses parameter 0.weight"):
            runtime.run(replica.run())
    finally:
        runtime.close()


# --- orders, by hand --------------------------------------------------------------------------------------------

A, B, C, D = range(4)


def test_orders_of_two_branches_that_join() -> None:
    """The branch a, b and the branch c join in an operation that needs d too."""
    operations = [
        frozenset({A}), frozenset({A, B}), frozenset({C}), frozenset({A, B, C}), frozenset({A, B, C, D})
    ]  # fmt: skip
    assert rank_by_tic(operations, [A, B, C, D]) == {A: 0, B: 0, C: 2, D: 3}
    # Alone, a unlocks 1 and c unlocks 5: c first; then a (1) over b (0); then b unlocks its own 1 and the joint 1.
    assert rank_by_tac(operations, [1, 1, 5, 1, 1], {A: 2, B: 2, C: 2, D: 2}) == {C: 0, A: 1, B: 2, D: 3}


def test_orders_of_a_residual_block() -> None:
    """x = a(in); y = c(b(x)) + x: the shortcut needs no transfer, so it comes with the first."""
    operations = [frozenset({A}), frozenset({A, B}), frozenset({A, B, C}), frozenset({A, B, C})]
    assert rank_by_tic(operations, [A, B, C]) == {A: 0, B: 0, C: 2}
    assert rank_by_tac(operations, [3, 3, 3, 0], {A: 1, B: 1, C: 1}) == {A: 0, B: 1, C: 2}


def test_orders_of_a_tower_on_either_side() -> None:
    """a and b are used apart, each by an operation that needs nothing else; c and d are used together."""
    operations = [frozenset({A}), frozenset({B}), frozenset({C, D})]
    # A transfer that no operation needs together with others comes last.
    assert rank_by_tic(operations, [A, B, C, D]) == {A: 2, B: 2, C: 0, D: 0}
    # By min(P_B, M_A) < min(P_A, M_B): b unlocks 4, a 1; c and d unlock nothing until one of them is there.
    assert rank_by_tac(operations, [1, 4, 9], {A: 3, B: 3, C: 3, D: 3}) == {B: 0, A: 1, C: 2, D: 3}


def test_a_chain_is_ranked_from_its_input() -> None:
    operations = [frozenset(range(count + 1)) for count in range(5)]
    assert rank_by_tic(operations, range(5)) == {0: 0, 1: 0, 2: 2, 3: 3, 4: 4}
    assert rank_by_tac(operations, [1.0] * 5, dict.fromkeys(range(5), 1)) == {n: n for n in range(5)}


@pytest.mark.parametrize(
    ("order", "priorities"), [("tic", [3, 2, 0, 0]), ("tac", [3, 2, 1, 0]), ("forward", [3, 2, 1, 0])]
)
def test_a_schedule_ranks_buckets_by_a_trace(order: Any, priorities: list[int]) -> None:
    model = nn.Sequential(*(nn.Linear(4, 4, bias=False) for _ in range(4)))
    buckets = GradientBuckets(model.named_parameters(), 1)
    trace = trace_forward(buckets, lambda: model(torch.ones(2, 4)))
    schedule = Priority(order)
    state = schedule.record_trace(schedule.init(), buckets.buckets, trace)
    assert [transfer.priority for transfer in schedule.plan(state, buckets.buckets, 0)] == priorities


# --- refusals ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("parts", "says"),
    [
        ({"collective": "native"}, "the backend's own collectives"),
        ({"scaling": "linear"}, "--scaling"),
        ({"stream": "rate(20)"}, "--sampler, --stream and --sharing"),
        ({"sampler": "grouped_importance"}, "--sampler, --stream and --sharing"),
        ({"sharing": "resharding(by='uniform')"}, "--sampler, --stream and --sharing"),
    ],
    ids=str,
)
def test_parts_that_need_all_means_at_once_are_refused(parts: dict[str, str], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        parse_recipe("tictac").with_components(**parts).build_components(0)


def test_clipping_and_unknown_optimizers_are_refused() -> None:
    with pytest.raises(ConfigError, match="leave out --clip-norm"):
        run("priority", {"clip_norm": 1.0})
    with pytest.raises(ConfigError, match=r"Joint may not support: use an optimizer of torch\.optim"):
        run("priority", {"optimizer": "tests.schedules.test_priority:JointSettings"})


class Joint(torch.optim.SGD):
    """An optimizer of one's own."""


class JointSettings:
    """Makes it."""

    def make(self, parameters: Any, *, learning_rate: float, momentum: float, weight_decay: float) -> Joint:
        return Joint(parameters, lr=learning_rate)


def test_an_elastic_run_is_refused_with_what_can_do_it() -> None:
    reason = parse_recipe("tictac").build_components(0).reason_all_needed
    assert "Priority" in reason
    assert "choose synchronous" in reason


def test_attach_names_the_nearest_recipe() -> None:
    assert describe_attach_support(parse_recipe("p3")).startswith("no: ")
    model = nn.Linear(2, 1)
    with pytest.raises(Unsupported, match=r"with_components\(schedule='synchronous'\), which comes nearest"):
        attach(model, torch.optim.SGD(model.parameters(), lr=0.1), "tictac")
