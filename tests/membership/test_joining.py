"""How a replica joins a run that goes on: what it is given, how long that takes, and how the others fare meanwhile."""

from __future__ import annotations

import itertools
import json
import random
import statistics
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.elastic.run import SCHEDULES
from farflung.faults import Fault, FaultPlan
from farflung.membership.connections import build_payload, read_payload
from farflung.membership.following import Follower
from farflung.membership.giving import NEWS, StatePublisher
from farflung.membership.member import Member
from farflung.network import Link, NetworkProfile, find_network
from farflung.sim import VirtualWorld
from farflung.trees import pack_tensors, unpack_tensors
from farflung.types import Payload, Tag
from tests.covering import thorough
from tests.membership.test_elastic import CODECS, Ended, check, run

SPARSE = "codec='error_feedback(topk(density=0.01))'"
BPS = 4e6


@pytest.fixture
def homes(tmp_path: Path) -> NetworkProfile:
    file = tmp_path / "homes.toml"
    file.write_text(
        'name = "homes"\n[[site]]\nname = "homes"\ninside = { latency_s = 0.01 }\n'
        f"up_bps = {BPS:g}\ndown_bps = {BPS:g}\n"
    )
    return find_network(str(file))


def joined(ended: Ended) -> dict[str, Any]:
    event: Any
    (event,) = (event for event in ended.events if event["event"] == "joined")
    return dict(event)


def slow_run(
    homes: NetworkProfile, schedule: str, faults: FaultPlan, size: int = 3, steps: int = 80
) -> Ended:
    how: dict[str, Any] = {
        "steps": steps,
        "network": homes,
        "workload": "large",
        "evaluate_every": 0,
        "seconds_per_sample": 0.05,
    }
    return run(size, faults, f"synchronous(schedule='{schedule}', {SPARSE})", **how)


@pytest.mark.parametrize(
    "schedule",
    [
        "synchronous",
        "diloco(sync_every=5)",
        *thorough("pipelined(width=2)", "delayed(delay=2)", "local_sgd(sync_every=5)"),
    ],
)
def test_others_go_on_while_a_replica_is_given_the_state(schedule: str, homes: NetworkProfile) -> None:
    ended = slow_run(homes, schedule, FaultPlan().join(2, at_s=0.3))
    check(ended)
    assert len(ended.models) == 3
    event = joined(ended)
    assert event["followed"] > 0
    assert event["nbytes"] > 160_000
    told: list[Any] = [one for one in ended.events if one["event"] == "step" and one["rank"] == 0]
    steps = [one["duration_s"] for one in told]
    # Under local steps, those that exchange are compared with each other.
    steps = [step for step in steps if step > max(steps) / 3]
    assert max(steps) <= 1.5 * statistics.median(steps), steps
    # The snapshot is made at the end of a step.
    assert event["state_s"] <= 1.3 * 8 * event["nbytes"] / BPS + steps[0]


def test_an_exchange_that_lasts_holds_up_who_joins_for_half_of_the_patience(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It takes six seconds, and the view that it is made in ends meanwhile."""
    worlds, asked_s, ended_s = list[VirtualWorld](), list[float](), list[float]()
    patience_s, settle = 3.0, Member.process_events

    def make(*args: Any, **options: Any) -> VirtualWorld:
        worlds.append(VirtualWorld(*args, **options))
        return worlds[-1]

    def noted(self: Member, **how: bool) -> None:
        waits = self.has_candidates and not self.is_frozen
        settle(self, **how)
        if waits:
            (ended_s if self.is_frozen else asked_s).append(worlds[0].clock.time())

    monkeypatch.setattr("tests.membership.test_elastic.VirtualWorld", make)
    monkeypatch.setattr(Member, "process_events", noted)
    how: dict[str, Any] = {"network": NetworkProfile.create_uniform(Link(0.01, 2e5)), "evaluate_every": 0}
    ended = run(3, FaultPlan().join(2, at_s=0.5), workload="large", steps=3, deadline_s=patience_s, **how)
    check(ended)
    assert joined(ended)
    assert min(ended_s) - min(asked_s) == pytest.approx(patience_s / 2)


def test_a_cut_goes_on_where_it_was(homes: NetworkProfile) -> None:
    plain = joined(slow_run(homes, "synchronous", FaultPlan().join(2, at_s=0.3)))
    faults = FaultPlan().join(2, at_s=0.3)
    for peer in (0, 1):
        faults = faults.reset(2, peer, at_s=0.75)
    ended = slow_run(homes, "synchronous", faults)
    check(ended)
    event = joined(ended)
    assert event["state_s"] > plain["state_s"]
    assert event["nbytes"] < 1.5 * plain["nbytes"]


@pytest.mark.parametrize("lost", [0, *thorough(1)])
def test_others_go_on_with_what_one_has_begun_to_give(lost: int, homes: NetworkProfile) -> None:
    plain = joined(slow_run(homes, "synchronous", FaultPlan().join(3, at_s=0.3), 4))
    ended = slow_run(homes, "synchronous", FaultPlan().join(3, at_s=0.3).crash(lost, at_s=0.75), 4)
    check(ended)
    assert [replica.runtime.comm.rank for replica in ended.survivors] == sorted({0, 1, 2, 3} - {lost})
    assert joined(ended)["nbytes"] < 1.5 * plain["nbytes"]


@pytest.mark.parametrize("codec", ["error_feedback(topk(density=0.1))", *thorough("identity")])
def test_a_member_tells_late_of_results_that_are_being_fetched(codec: str, homes: NetworkProfile) -> None:
    faults = FaultPlan().join(2, at_s=0.3).cut(1, 2, at_s=0.6, for_s=3.0)
    how: dict[str, Any] = {"network": homes, "evaluate_every": 0, "seconds_per_sample": 0.01}
    ended = run(3, faults, f"synchronous(codec='{codec}')", workload="large", steps=60, deadline_s=5.0, **how)
    check(ended)
    told: list[Any] = [one for one in ended.events if one["event"] == "step" and one["rank"] == 0]
    assert max(one["duration_s"] for one in told) < 5.0
    assert len(ended.models) == 3


@pytest.mark.parametrize("schedule", ["synchronous", "delayed(delay=4)"])
def test_one_that_is_too_far_behind_is_waited_for(
    schedule: str, homes: NetworkProfile, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Results are longer than the state, and come faster than the link carries them.

    With delayed results the members tell of some after later ones.
    """
    monkeypatch.setattr("farflung.membership.giving._BACKLOG_NBYTES", 0)
    faults = FaultPlan().join(2, at_s=0.3).throttle(2, at_s=0.0, for_s=60.0, bandwidth_bps=2e5)
    how: dict[str, Any] = {"steps": 30, "network": homes, "evaluate_every": 0, "deadline_s": 20.0}
    ended = run(3, faults, f"synchronous(schedule='{schedule}')", workload="large", **how)
    check(ended)
    assert len(ended.models) == 3
    assert joined(ended)["followed"] == 0


@pytest.mark.parametrize(
    "news",
    [
        "[]",
        *thorough(
            "no JSON", '{"offer": {}}', '{"offer": {"step": 1, "parts": [[1]], "needed": 0, "started": 0}}'
        ),
    ],
)
def test_malformed_news_lose_their_sender(
    news: str, homes: NetworkProfile, monkeypatch: pytest.MonkeyPatch
) -> None:
    tell = StatePublisher._send_news

    def forged(self: StatePublisher, rank: int, told: Any) -> None:
        if self._comm.rank == 1:
            self._comm.send(build_payload(news.encode()), rank, NEWS, -1)
        else:
            tell(self, rank, told)

    monkeypatch.setattr(StatePublisher, "_send_news", forged)
    ended = slow_run(homes, "synchronous", FaultPlan().join(3, at_s=0.3), 4)
    assert ended.error is None
    joiner: Any = ended.replicas[3].runtime.elastic
    assert joiner.agreement.connections.malformed_names == {"1"}


def plan_of(seed: int) -> tuple[int, int, FaultPlan, str, str]:
    """Returns how many replicas there are in the end and at first, faults, schedule and codec.

    One to three replicas join, and others crash, hang, leave or are cut off meanwhile.
    """
    draw = random.Random(f"joins {seed}")
    first = size = draw.choice([3, 3, 4, 4, 5])
    faults, begin_s = FaultPlan(), draw.uniform(0.05, 0.4)
    for rank in range(first, first + draw.randint(1, 3)):
        faults = faults.join(rank, at_s=begin_s + draw.uniform(0, 0.08))
        size += 1
    for _ in range(draw.randint(1, 2)):
        kind = draw.choice(["crash", "crash", "hang", "cut", "reset", "leave"])
        rank, at_s = draw.randrange(first), begin_s + draw.uniform(-0.02, 0.25)
        peer = draw.choice([other for other in range(size) if other != rank])
        more: dict[str, Any] = {}
        if kind in ("hang", "cut"):
            more["for_s"] = draw.choice([0.05, 0.2, 0.5])
        if kind in ("cut", "reset"):
            more["peer"] = peer
        faults = FaultPlan((*faults.faults, Fault(kind, rank=rank, at_s=at_s, **more)))
    if draw.random() < 0.4:
        faults = faults.crash(draw.randrange(first, size), at_s=begin_s + draw.uniform(0.1, 0.4))
    return size, first, faults, draw.choice(SCHEDULES), draw.choice(CODECS)


def joins_under_faults(seed: int) -> None:
    """Runs a plan: one model, or a stop by name; and all begin that join and do not crash, or the run had ended."""
    size, first, faults, schedule, codec = plan_of(seed)
    recipe = f"synchronous(schedule='{schedule}', {codec})"
    ended = run(size, faults, recipe, seed=seed, steps=60, deadline_s=0.15, evaluate_every=60)
    check(ended)
    gone = {fault.rank for fault in faults.faults if fault.kind in ("crash", "leave")}
    for rank in range(first, size) if ended.error is None else ():
        elastic: Any = ended.replicas[rank].runtime.elastic
        over = "the run has ended" in str(elastic.agreement.error) if elastic is not None else False
        assert rank in gone or over or ended.replicas[rank].completed_steps == 60, (
            f"rank {rank}: {elastic.agreement.error}"
        )


@pytest.mark.parametrize("seed", [*range(8), *thorough(*range(8, 60))])
def test_replicas_join_while_others_fail(seed: int) -> None:
    joins_under_faults(seed)


DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int64, torch.uint8, torch.bool]


@given(
    st.lists(
        st.tuples(
            st.sampled_from(DTYPES),
            st.lists(st.integers(0, 12), max_size=3),
            st.integers(0, 99),
            st.booleans(),
        ),
        max_size=4,
    )
)
def test_packed_tensors_keep_their_bits(layouts: list[tuple[torch.dtype, list[int], int, bool]]) -> None:
    tensors = []
    for dtype, shape, seed, is_sparse in layouts:
        drawn = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
        if is_sparse:
            drawn = torch.where(drawn.abs() > 2, drawn, torch.where(drawn > 1.5, torch.tensor(-0.0), 0.0))
        tensors.append(drawn.to(dtype))
    found = unpack_tensors(pack_tensors(tensors))
    assert len(found) == len(tensors)
    for tensor, one in zip(tensors, found, strict=True):
        assert (one.dtype, one.shape) == (tensor.dtype, tensor.shape)
        assert bytes(one.flatten().view(torch.uint8).numpy()) == bytes(
            tensor.flatten().view(torch.uint8).numpy()
        )


def test_what_is_mostly_zeros_takes_its_other_values() -> None:
    tensor = torch.zeros(10_000)
    tensor[[3, 5_000]] = torch.tensor([1.5, -0.0])
    assert pack_tensors([tensor]).nbytes < 200


@pytest.mark.parametrize(
    ("schedule", "models"),
    [("delayed(delay=3)", 1), *thorough(("pipelined(width=3)", 1), ("streaming_diloco(sync_every=8)", 2))],
)
def test_nothing_travels_of_what_others_have_given(schedule: str, models: int, homes: NetworkProfile) -> None:
    """Beside results: parameters or an anchor, and the outer momentum."""
    ended = slow_run(homes, schedule, FaultPlan().join(2, at_s=2.0))
    check(ended)
    event, model_nbytes = joined(ended), 4 * 40_000
    of_a_result = 2 * 0.01 * 40_000 * 8 + 1_000
    assert event["nbytes"] < (models + 0.2) * model_nbytes + (event["followed"] + 8) * of_a_result


class Giver:
    """Answers requests for pieces of one tensor, late."""

    def __init__(self, content: torch.Tensor) -> None:
        self.content, self.requests, self.rank = content, list[list[Any]](), 0

    def send(self, payload: Payload, rank: int, tag: Tag, priority: int) -> None:
        self.requests.append(json.loads(read_payload(payload)))

    def answer(self, follower: Follower, request: list[Any]) -> None:
        _, _, name, begin, nbytes = request
        head = json.dumps([name, begin]).encode()
        follower.receive_piece(self.rank, head, self.content[begin : begin + nbytes])


def test_an_answer_to_a_request_that_was_made_again_with_another_size_is_no_forgery() -> None:
    giver, clock = Giver(torch.randint(0, 256, (1 << 24,), dtype=torch.uint8)), itertools.count(0.0, 0.01)
    runtime: Any = SimpleNamespace(comm=giver, read_clock=clock.__next__)
    follower = Follower(runtime, *(lambda *_: None,) * 4)
    offer = {"step": 1, "parts": [["d", len(giver.content)]], "needed": [], "started": 0, "view": 1}
    news = json.dumps({"offer": offer}).encode()
    follower.handle_news(giver.rank, news)
    for number in range(40):
        giver.answer(follower, giver.requests[number])
    lost = len(giver.requests)
    follower.retry_requests(giver.rank)  # the connection is made again here
    again = giver.requests[lost:]
    follower.handle_news(giver.rank, news)  # and there, with the offer from its beginning
    assert {nbytes for *_, nbytes in giver.requests[lost + len(again) :]} != {nbytes for *_, nbytes in again}
    for number in itertools.count(lost):
        if number == len(giver.requests):
            break
        giver.answer(follower, giver.requests[number])
    assert torch.equal(follower._parts["d"].data, giver.content)
