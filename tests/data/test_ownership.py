"""Samples that change owner beside training: held once, through crashes and resumes, and out of exchanges' way."""

from __future__ import annotations

import functools
import os
import random
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from farflung.comm.channel import Purpose
from farflung.config import Training
from farflung.data import IID, Holding, InMemory
from farflung.data.sharing import Resharding
from farflung.data.sharing.ownership import Ownership
from farflung.devices import DeviceProfile
from farflung.errors import CheckpointError, ConfigError, PeerLost, ProtocolError
from farflung.faults import FaultPlan
from farflung.loop import Checkpoints, Replica
from farflung.recipes import parse_recipe
from farflung.sampling import UniformSampler
from farflung.sim import LinkModel, VirtualWorld
from farflung.streams import RateLimited
from farflung.telemetry import Event, Telemetry
from farflung.types import Payload, SampleBatch, SampleIds, Tag
from farflung.workloads import Quadratic
from tests.carrying import Carrying
from tests.pool import digest

DIM, SAMPLES = 20, 48
SAMPLE_NBYTES = 8 + 4 * DIM + 8 + 4
"""Its id, its row with the label, its score."""
LATENCY_S, BANDWIDTH_BPS = 0.002, 4e5
LINK = LinkModel(LATENCY_S, BANDWIDTH_BPS)
pytestmark = pytest.mark.usefixtures("unframed")
PLAIN = "resharding(samples=5, every=5, within=4, piece_nbytes=220)"
LONG = "resharding(samples=9, every=5, piece_nbytes=220)"
"""Rounds of more pieces than there is time for in one backward pass."""


@pytest.fixture(autouse=True)
def unsynced(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is replicas that crash here, not machines: nobody waits for the disk."""
    monkeypatch.setattr(os, "fsync", lambda file: None)


class Resharded:
    """Replicas that train a small quadratic on shares of their own, and swap samples.

    Args:
      size: number of replicas.
      folder: of checkpoints.
      shares: of each; equal random ones when not given.
      plan: of what goes wrong.
      steps: how many.
      stop: the step after which somebody asks to stop.
      seconds_per_sample: of each replica's forward pass; a backward pass takes twice that.
      link: of every pair.
      device: of each replica, in place of that.
      dim: numbers of a sample.
      members: of the recipe.
    """

    def __init__(
        self,
        size: int = 4,
        folder: Path | None = None,
        *,
        shares: Sequence[SampleIds] | None = None,
        plan: FaultPlan | None = None,
        steps: int = 23,
        stop: int | None = None,
        seconds_per_sample: float = 2e-3,
        link: LinkModel = LINK,
        device: Sequence[DeviceProfile] | None = None,
        dim: int = DIM,
        **members: Any,
    ) -> None:
        work = Quadratic(dim=dim, samples=SAMPLES)
        assert isinstance(link.bandwidth_bps, float)
        self.bandwidth_bps = link.bandwidth_bps
        self.world = VirtualWorld(
            size,
            link,
            0.0 if device else seconds_per_sample,
            device=device,
            faults=plan,
        )
        shares = shares or IID().split(work.load_datasets()[0], size, seed=3)
        chosen = parse_recipe("synchronous").with_components(
            **{"sharing": PLAIN, "sampler": Carrying, **members}
        )
        self.events: list[list[Event]] = [[] for _ in range(size)]
        self.replicas = [
            Replica(
                runtime,
                work,
                Training(steps, 4, 0.05, momentum=0.5, seed=3, checkpoint_every=3),
                chosen.build_components(3, rank),
                Telemetry(rank, self.events[rank].append, self.world.injector),
                None if folder is None else Checkpoints(folder, rank, size, is_leader=rank == 0),
                lambda: stop is not None and self.replicas[0].completed_steps >= stop,
                shares[rank],
                should_trace=True,
            )
            for rank, runtime in enumerate(self.world.runtimes)
        ]

    def run(self) -> Resharded:
        self.summaries = self.world.run([replica.run() for replica in self.replicas])
        return self

    def watched(self) -> Iterator[list[list[int]]]:
        """What each replica holds after each step, while it runs."""

        async def go(replica: Replica) -> None:
            await replica.step()

        for _ in range(self.replicas[0].training.steps):
            self.world.run([go(replica) for replica in self.replicas])
            yield self.held()

    def resumed(self) -> Resharded:
        step = Checkpoints(self.folder(), 0, len(self.replicas), is_leader=False).find_newest()
        for replica in self.replicas:
            replica.resume(step)
        return self.run()

    def folder(self) -> Path:
        assert self.replicas[0].checkpoints is not None
        return self.replicas[0].checkpoints.folder

    def held(self) -> list[list[int]]:
        found = []
        for replica in self.replicas:
            assert isinstance(replica._train_set, Holding)
            found.append(replica._train_set.ids.tolist())
        return found

    def ends(self) -> list[Any]:
        """What must not depend on what happened on the way."""
        return [
            (
                digest(dict(replica.model.state_dict())),
                ids,
                plain(replica.components.sampler.state_dict()),
                replica.sent_nbytes,
                [sent_to(events, kind) for kind in ("gradients", "sharing")],
            )
            for replica, ids, events in zip(self.replicas, self.held(), self.events, strict=True)
        ]


def plain(state: Any) -> Any:
    """Gives the state of a sampler without tensors, and without measured times, so that two can be compared."""
    if isinstance(state, dict):
        return {name: plain(value) for name, value in state.items() if name != "bacc"}
    return state.tolist() if isinstance(state, torch.Tensor) else state


def sent_to(events: Sequence[Event], kind: str) -> list[int]:
    """Bytes to each rank, as a replica says at its end."""
    sent = events[-1]["bytes_sent_to"]
    assert isinstance(sent, dict)
    counts = sent.get(kind, [])
    assert isinstance(counts, list)
    return [count for count in counts if isinstance(count, int)]


def once(held: Sequence[Sequence[int]]) -> bool:
    return sorted(one for each in held for one in each) == list(range(SAMPLES))


# --- one owner --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("schedule", ["synchronous", "pipelined(width=2)", "delayed(2)", "local_sgd(2)"])
def test_each_sample_is_held_once_at_every_step(size: int, schedule: str) -> None:
    run = Resharded(size, schedule=schedule)
    found = [run.held(), *run.watched()]
    assert all(map(once, found))
    changes = [step for step in range(1, 24) if found[step] != found[step - 1]]
    assert changes == [10, 15, 20], (
        "rounds begin at 5, 10, 15, and take effect before the batch 4 steps later"
    )
    sizes = [[len(ids) for ids in held] for held in found]
    assert all(each == sizes[0] for each in sizes)
    for replica in run.replicas:
        (ownership,) = (each for each in replica._extensions if isinstance(each, Ownership))
        assert ownership._round is None, "none begins that would take effect after the last step"


def test_an_odd_replica_rests() -> None:
    run = Resharded(3)
    found = [run.held(), *run.watched()]
    for before, after in ((9, 10), (14, 15), (19, 20)):
        moved = [found[before][rank] != found[after][rank] for rank in range(3)]
        assert sorted(moved) == [False, True, True]


def test_unlike_shares_keep_their_sizes() -> None:
    whole = torch.randperm(SAMPLES, generator=torch.Generator().manual_seed(1))
    run = Resharded(shares=[whole[:2], whole[2:20], whole[20:23], whole[23:]])
    for held in run.watched():
        assert once(held)
        assert [len(ids) for ids in held] == [2, 18, 3, 25]
    assert held[0] != whole[:2].tolist()


def test_one_replica_keeps_its_samples() -> None:
    run = Resharded(1).run()
    assert run.held() == [IID().split(Quadratic(samples=SAMPLES).load_datasets()[0], 1, seed=3)[0].tolist()]
    assert run.summaries[0].bytes_sent == 0


def test_what_is_known_goes_along_as_it_was_when_the_round_began() -> None:
    run = Resharded(2)
    own, other = (replica.components.sampler for replica in run.replicas)
    assert isinstance(own, Carrying)
    assert isinstance(other, Carrying)
    found = run.watched()
    for _ in range(5):
        before = next(found)
    other.known += torch.arange(100.0, 100.0 + len(other.known))
    known = dict(zip(before[1], other.known.tolist(), strict=True))
    next(found)
    other.known += 1000.0
    for _ in range(4):
        after = next(found)[0]
    came = [place for place, one in enumerate(after) if one != before[0][place]]
    assert {after[place] for place in came} == set(sorted(known, key=known.__getitem__)[-5:]), "the first"
    # The step since then may have drawn them.
    assert all(0 <= own.known[place] - known[after[place]] <= 1 for place in came)


@pytest.mark.parametrize("sampler", ["uniform", Carrying])
def test_the_baseline_moves_as_many_samples_at_random(sampler: Any) -> None:
    sharing = PLAIN.replace("samples", "by='uniform', samples")
    run = Resharded(sharing=sharing, sampler=sampler)
    plain = Resharded(sharing="none", sampler=sampler)
    assert all(map(once, run.watched()))
    list(plain.watched())
    score = 4 if sampler is Carrying else 0
    nbytes = 3 * (8 + 5 * (SAMPLE_NBYTES - 4 + score))
    assert [a.sent_nbytes - b.sent_nbytes for a, b in zip(run.replicas, plain.replicas, strict=True)] == [
        nbytes
    ] * 4


def test_training_sees_what_came() -> None:
    """And with equal numbers of samples, so only which ones may differ."""
    run, plain = Resharded().run(), Resharded(sharing="none").run()
    assert run.summaries[0].samples == plain.summaries[0].samples
    assert run.ends()[0][0] != plain.ends()[0][0]
    taken = {e["step"]: e["loss"] for e in run.events[0] if e["event"] == "step"}
    before = {e["step"]: e["loss"] for e in plain.events[0] if e["event"] == "step"}
    assert [taken[step] == before[step] for step in range(9)] == [True] * 9
    assert taken != before


# --- beside exchanges -------------------------------------------------------------------------------------------


class Sent(NamedTuple):
    """A message of a swap.

    Args:
      src: its sender.
      began_s: when it was sent.
      behind_s: when its link had let go what was sent there before.
      there_s: when it was there.
      nbytes: its size.
    """

    src: int
    began_s: float
    behind_s: float
    there_s: float
    nbytes: int


class Ahead(NamedTuple):
    """What a message of an exchange has found on its link.

    Args:
      src: its sender.
      began_s: when it was sent.
      swapping_s: seconds for which samples are still to leave there.
    """

    src: int
    began_s: float
    swapping_s: float


def swaps_of(run: Resharded, ahead: list[Ahead] | None = None) -> list[Sent]:
    """Notes the messages of swaps from now on, and what others find on their links."""
    found: list[Sent] = []
    swapping: dict[tuple[int, int], list[tuple[float, float]]] = defaultdict(list)
    under_way: dict[tuple[int, Tag], tuple[float, float, int]] = {}
    free_s: dict[tuple[int, int], float] = defaultdict(float)
    carry = run.world.network.send

    def noted(src: int, dst: int, tag: Tag, payload: Payload, priority: int = 0) -> Any:
        now = run.world.clock.time()
        behind = max(now, free_s[src, dst])
        free_s[src, dst] = behind + 8 * payload.nbytes / run.bandwidth_bps
        if tag.exchange >> 56 == Purpose.SHARING:
            under_way[src, tag] = now, behind, payload.nbytes
            swapping[src, dst].append((behind, free_s[src, dst]))
        elif ahead is not None:
            left_s = sum(max(0.0, end - max(begin, now)) for begin, end in swapping[src, dst])
            ahead.append(Ahead(src, now, left_s))
        return carry(src, dst, tag, payload, priority)

    def noting(deliver: Any) -> Any:
        def arrived(src: int, tag: Tag, payload: Payload, view: int) -> None:
            if (src, tag) in under_way:
                began_s, behind_s, nbytes = under_way.pop((src, tag))
                found.append(Sent(src, began_s, behind_s, run.world.clock.time(), nbytes))
            deliver(src, tag, payload, view)

        return arrived

    run.world.network.send = noted  # type: ignore[method-assign]
    for mailbox in run.world.network.mailboxes:
        mailbox.deliver = noting(mailbox.deliver)  # type: ignore[method-assign]
    return found


def aggregations(events: Sequence[Event]) -> list[tuple[float, float]]:
    """From when to when a replica's exchanges of each step were under way."""
    found: dict[Any, tuple[float, float]] = {}
    for event in events:
        if event["event"] == "exchange":
            step, began_s, t = event["step"], float(event["began_s"]), float(event["t"])  # type: ignore[arg-type]
            first, last = found.get(step, (began_s, t))
            found[step] = min(first, began_s), max(last, t)
    return list(found.values())


@pytest.mark.parametrize("collective", ["direct", "ring", "parameter_server"])
@pytest.mark.parametrize("schedule", ["synchronous", "local_sgd(2)"])
def test_no_swap_sets_out_during_an_aggregation_and_none_takes_longer_than_stated(
    schedule: str, collective: str
) -> None:
    run = Resharded(
        schedule=schedule,
        collective=collective,
        bucket_nbytes=16,
        steps=40,
        sharing=LONG,
    )
    sent = swaps_of(run)
    run.run()
    assert len(sent) == 6 * 4 * (1 + 5), "rounds, replicas, a number and pieces of 2, 2, 2, 2 and 1 samples"
    windows = [aggregations(events) for events in run.events]
    assert all(len(each) == (40 if schedule == "synchronous" else 20) for each in windows)
    assert not [one for one in sent for begin, end in windows[one.src] if begin <= one.began_s < end]
    assert {one.nbytes for one in sent} == {8, SAMPLE_NBYTES, 2 * SAMPLE_NBYTES}
    for one in sent:
        assert one.nbytes <= 220
        assert one.there_s - one.behind_s == pytest.approx(LATENCY_S + 8 * one.nbytes / BANDWIDTH_BPS)
    behind = {one.src for one in sent if one.behind_s > one.began_s}
    # Whoever is through first may still send sums to others, which goes before.
    assert behind <= {"direct": set(), "ring": {*range(4)}, "parameter_server": {0}}[collective]


DIM_LARGE = 2000
LARGE_NBYTES = 8 + 4 * DIM_LARGE + 8 + 4
"""Of a sample; a gradient has about as many."""
SPEEDS = {
    "alike": (1.0, 1.0, 1.0, 1.0),
    "a straggler": (1.0, 4.0, 1.0, 1.0),
    "all unlike": (1.0, 1.3, 2.1, 0.4),
}


def resharded_over(mbps: float, speeds: str, **members: Any) -> Resharded:
    """Samples that take about as long as a gradient, in rounds of ten pieces that follow each other."""
    devices = [DeviceProfile(forward_s=times * 2e-4, optimizer_s=0.0) for times in SPEEDS[speeds]]
    sharing = f"resharding(samples=10, every=12, piece_nbytes={LARGE_NBYTES})"
    members = {"sharing": sharing, "bucket_nbytes": 1 << 20, "steps": 40, **members}
    return Resharded(link=LinkModel(LATENCY_S, mbps * 1e6), device=devices, dim=DIM_LARGE, **members)


@pytest.mark.parametrize("speeds", SPEEDS)
@pytest.mark.parametrize("collective", ["ring", "direct"])
@pytest.mark.parametrize("mbps", [10.0, 200.0])
def test_at_any_speed_an_aggregation_waits_for_the_rest_of_one_piece_at_most(
    mbps: float, collective: str, speeds: str
) -> None:
    run = resharded_over(mbps, speeds, collective=collective)
    ahead: list[Ahead] = []
    sent = swaps_of(run, ahead)
    run.run()
    assert len(sent) == 2 * 4 * (1 + 10)
    assert once(run.held())
    windows = [aggregations(events) for events in run.events]
    assert not [one for one in sent for begin, end in windows[one.src] if begin <= one.began_s < end]
    piece_s = 8 * LARGE_NBYTES / (mbps * 1e6)
    for one in sent:
        assert one.there_s - one.behind_s == pytest.approx(LATENCY_S + 8 * one.nbytes / (mbps * 1e6))
        assert one.nbytes in (8, LARGE_NBYTES)
    assert max(one.swapping_s for one in ahead) <= piece_s * (1 + 1e-9)
    ends = {end for each in windows for _, end in each}
    assert [one for one in sent if one.began_s in ends], "some were held back"


@pytest.mark.parametrize(
    ("share", "schedule"), [(0.25, "pipelined(width=2)"), (0.5, "delayed(2)"), (0.1, "delayed(3)")]
)
def test_beside_exchanges_that_overlap_samples_take_a_share_of_the_time(share: float, schedule: str) -> None:
    run = Resharded(
        2,
        schedule=schedule,
        sharing=f"resharding(samples=5, every=100, piece_nbytes=220, share={share})",
        steps=201,
        # An exchange takes longer than a step computes, so that one is always under way.
        link=LinkModel(0.03, BANDWIDTH_BPS),
    )
    sent = swaps_of(run)
    run.run()
    assert len(sent) == 1 * 2 * (1 + 3), "a round, replicas, a number and pieces"
    asked = sorted(one.began_s for one in sent if one.src == 0)
    answered = sorted(one.there_s for one in sent if one.src == 1)
    busy_s = [back_s - began_s for began_s, back_s in zip(asked, answered, strict=True)]
    # From the first message until the last sets out, with the rest behind each.
    assert sum(busy_s[:-1]) <= share * (asked[-1] - asked[0]) * (1 + 1e-9)
    for busy, began_s, following_s in zip(busy_s, asked, asked[1:], strict=False):
        assert busy >= 2 * 0.03
        assert busy <= share * (following_s - began_s) * (1 + 1e-9)


def test_the_gate_has_something_to_hold_back() -> None:
    """Otherwise the test above would show nothing."""
    run = Resharded(steps=40, sharing=LONG)
    for replica in run.replicas:
        replica.engine.gate.close = lambda: None  # type: ignore[method-assign]
    sent = swaps_of(run)
    run.run()
    windows = [aggregations(events) for events in run.events]
    assert [one for one in sent for begin, end in windows[one.src] if begin <= one.began_s < end]


def test_a_round_that_is_late_is_waited_for() -> None:
    slow, quick = (
        Resharded(sharing=f"resharding(samples=10, every=5, within={within}, piece_nbytes=1)", steps=12)
        for within in (1, 5)
    )
    waits = []
    for run in (slow, quick):
        run.run()
        assert once(run.held())
        waits.append([e["data_s"] for e in run.events[0] if e["event"] == "step"])
    assert [step for step, s in enumerate(waits[0]) if s] == [6, 11]
    assert waits[0][6] > 5 * LATENCY_S  # type: ignore[operator]
    assert not waits[1][6]


# --- crashes and resumes ----------------------------------------------------------------------------------------


@functools.cache
def undisturbed(**members: Any) -> tuple[list[Any], float]:
    """The ends of a run that nothing happens to, and how long it takes."""
    run = Resharded(**members).run()
    return run.ends(), run.summaries[0].duration_s


def under_way(kept: Checkpoints) -> bool:
    """Whether the newest checkpoint holds a round."""
    _, own = kept.load(kept.find_newest())
    return bool(own["extensions"]["ownership"]["round"])


@pytest.mark.thorough
@pytest.mark.parametrize(
    "sampler",
    [
        Carrying,
        *(
            f"grouped_importance(groups=2, rule={rule!r}, scored_by='loss')"
            for rule in ("auto", "two", "half")
        ),
    ],
    ids=["carrying", "auto", "two", "half"],
)
def test_after_a_hundred_crashes_each_sample_is_held_once(tmp_path: Path, sampler: Any) -> None:
    ends, duration_s = undisturbed(sampler=sampler)
    draws = random.Random(str(sampler))
    with_a_round = 0
    for number in range(25):
        folder = tmp_path / str(number)
        plan = FaultPlan().crash(draws.randrange(4), at_s=draws.uniform(0, duration_s))
        crashed = Resharded(folder=folder, plan=plan, sampler=sampler)
        with pytest.raises(PeerLost):
            crashed.run()
        again = Resharded(folder=folder, sampler=sampler)
        kept = Checkpoints(folder, 0, 4, is_leader=False)
        begun = bool(kept.list_complete())
        with_a_round += begun and under_way(kept)
        again.resumed() if begun else again.run()
        assert once(again.held())
        assert again.ends() == ends, plan
    assert with_a_round > 4


@pytest.mark.parametrize("schedule", ["delayed(2)", "pipelined(width=2)"])
@pytest.mark.parametrize("stop", [4, 6, 8, 9, 12, 16])
def test_who_is_stopped_goes_on_as_if_nothing_had_been(tmp_path: Path, stop: int, schedule: str) -> None:
    ends, _ = undisturbed(schedule=schedule)
    first = Resharded(folder=tmp_path, stop=stop, schedule=schedule).run()
    assert first.summaries[0].is_stopped
    for events in first.events:
        total = sum(sent_to(events, "gradients")) + sum(sent_to(events, "sharing"))
        assert total == events[-1]["bytes_sent_per_replica"], "without exchanges that were under way"
    assert once(first.held())
    for replica in first.replicas:
        (ownership,) = (each for each in replica._extensions if isinstance(each, Ownership))
        assert ownership._round is None, "nothing is left under way"
    again = Resharded(folder=tmp_path, schedule=schedule).resumed()
    assert once(again.held())
    assert again.ends() == ends


def test_a_checkpoint_belongs_to_the_share_that_a_run_began_with(tmp_path: Path) -> None:
    Resharded(folder=tmp_path).run()
    other = IID().split(Quadratic(samples=SAMPLES).load_datasets()[0], 4, seed=4)
    with pytest.raises(CheckpointError, match="another share of the data"):
        Resharded(folder=tmp_path, shares=other, steps=30).resumed()


@pytest.mark.parametrize(("before", "after"), [(PLAIN, "none"), ("none", PLAIN)])
def test_samples_that_have_moved_are_not_forgotten(tmp_path: Path, before: str, after: str) -> None:
    Resharded(folder=tmp_path, sharing=before).run()
    with pytest.raises(CheckpointError, match="not of this recipe"):
        Resharded(folder=tmp_path, sharing=after, steps=30).resumed()


# --- what cannot be ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("id_", [-1, SAMPLES])
def test_what_is_no_sample_of_the_training_set_is_refused(id_: int) -> None:
    run = Resharded(2)
    sharing = run.replicas[1].components.sharing
    assert isinstance(sharing, Resharding)
    swap = sharing.swap

    async def wrong(*arguments: Any) -> SampleBatch:
        came = await swap(*arguments)
        return replace(came, ids=torch.full_like(came.ids, id_))

    sharing.swap = wrong  # type: ignore[method-assign, assignment]
    with pytest.raises(
        ProtocolError, match=f"swapped at step .* are none of the {SAMPLES} of the training set"
    ):
        run.run()


def test_samples_that_come_and_go_have_no_owner() -> None:
    chosen = parse_recipe("synchronous").with_components(sharing=PLAIN, sampler=Carrying, stream="rate(20)")
    with pytest.raises(ConfigError, match=r"leave out one of --sharing and --stream"):
        chosen.build_components(3)
    parts = parse_recipe("synchronous").with_components(sharing=PLAIN, sampler=Carrying).build_components(3)
    with pytest.raises(ConfigError, match="those of stream RateLimited come and go"):
        replace(parts, stream=RateLimited(20.0))
    assert isinstance(parts.stream, InMemory)


def test_a_sampler_that_knows_nothing_cannot_choose() -> None:
    with pytest.raises(
        ConfigError, match=r"UniformSampler knows nothing: choose another --sampler, or .*by='uniform'"
    ):
        parse_recipe("synchronous").with_components(sharing="resharding").build_components(3)
    parts = (
        parse_recipe("synchronous").with_components(sharing="resharding(by='uniform')").build_components(3)
    )
    assert isinstance(parts.sampler, UniformSampler)
    assert parts.needs_shares
    assert not parse_recipe("synchronous").build_components(3).needs_shares


def test_samples_of_all_have_no_owner() -> None:
    world = VirtualWorld(1)
    parts = parse_recipe("synchronous").with_components(sharing=PLAIN, sampler=Carrying).build_components(3)
    with pytest.raises(ConfigError, match="give each a share"):
        Replica(world.runtimes[0], Quadratic(), Training(5, 4, 0.05), parts, Telemetry(0))
