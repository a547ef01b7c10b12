"""Real processes and virtual time agree bit for bit, and both with DistributedDataParallel."""

from __future__ import annotations

import functools
import itertools
from pathlib import Path
from typing import Any

import pytest
import torch

from farflung.codecs import CODECS
from farflung.comm import COLLECTIVES
from farflung.loop import Checkpoints
from farflung.reducers import REDUCERS
from farflung.schedules import SCHEDULES
from farflung.workloads import create_workload
from tests.covering import covering
from tests.pool import Pool, digest
from tests.worlds import jobs

IDENTITY = {"codec": "identity", "reducer": "codec", "collective": "direct", "schedule": "synchronous"}
WAYS = ("codec", "codec(phases='gather')", "codec(phases='two')", "codec(phases='hops')")
"""How a codec may travel."""
WINDOWS = "gradiveq(warm_up=0, sample_steps=2, compress_steps=2)"
"""Of which a few steps see some."""
IN_BLOCKS = {
    "adacomm": "adacomm(2)",
    "diloco": "diloco(2)",
    "local_sgd": "local_sgd(2, 'averaged')",
    "post_local_sgd": "post_local_sgd(3, 2)",
    "streaming_diloco": "streaming_diloco(4, fragments=2, optimizer_state='reset')",
}
"""Schedules whose defaults exchange nothing in a few steps."""
OF_STEPS = ("gradients", "unused", "moments")
"""Kinds of bytes that a step counts as sent."""
FAMILIES = {
    "codec": sorted(CODECS),
    "reducer": [*WAYS, *sorted(set(REDUCERS) - {"codec", "gradiveq"}), WINDOWS],
    # The backend's own collectives have no virtual counterpart and add in an order of their own.
    "collective": sorted(set(COLLECTIVES) - {"native"}),
    "schedule": [
        *sorted(set(SCHEDULES) - set(IN_BLOCKS)),
        *IN_BLOCKS.values(),
        "delayed(3, pull='swap')",
    ],
}


PAIRED = ("by_role", "chain", "demo", "dgc", "error_feedback", "identity", "qsgd", "randomk")
"""Codecs that meet all members of other families: with parts, stages, memories, residuals, noise, sums of payloads.

The others are as some of these to whatever carries them; each is carried alone.
"""


def _possible(parts: dict[str, str]) -> bool:
    """Reducers of their own take no codec, and a codec with a memory is not cut in segments."""
    if parts["reducer"] not in WAYS:
        return parts["codec"] == "identity"
    return parts["codec"] not in ("demo", "dgc") or parts["reducer"] in WAYS[:2]


def _alone() -> list[tuple[str | int, ...]]:
    """Each member once, beside identities: collectives among four, the others among three."""
    found = {
        (*{**IDENTITY, family: member}.values(), 4 if family == "collective" else 3): None
        for family, members in FAMILIES.items()
        for member in members
    }
    return [*found]


@functools.cache
def _pairs() -> list[tuple[str | int, ...]]:
    """Whatever it takes that every possible pair of members has met, and each member 2 and 4 replicas."""
    possible = [
        (*members, size)
        for members in itertools.product(*(FAMILIES | {"codec": PAIRED}).values())
        if _possible(dict(zip(FAMILIES, members, strict=True)))
        for size in (2, 4)
    ]
    return [row for row in covering(possible, first=_alone()) if row not in _alone()]


def _late() -> list[tuple[str | int, ...]]:
    """For each schedule one row of the pairs, with a codec that is not the identity."""
    found: dict[str | int, tuple[str | int, ...]] = {}
    for codec, reducer, collective, schedule, size in _pairs():
        if schedule != IDENTITY["schedule"] and codec != IDENTITY["codec"]:
            found.setdefault(schedule, (codec, reducer, collective, schedule, size))
    return [*found.values()]


@pytest.mark.parametrize((*FAMILIES, "size"), [*_alone(), *_late()])
def test_real_equals_virtual(
    pool: Pool, codec: str, reducer: str, collective: str, schedule: str, size: int
) -> None:
    parts = {"codec": codec, "reducer": reducer, "collective": collective, "schedule": schedule}
    run: dict[str, Any] = {"parts": parts, "steps": 6, "batch_size": 8}
    real = pool.run(size, "tests.worlds.jobs.wall", **run)
    assert ends(real) == ends(jobs.virtual(size, **run))
    assert_alike(ends(real))


@pytest.mark.parametrize((*FAMILIES, "size"), [row for row in _pairs() if row not in _late()])
def test_pairs_end_alike_in_virtual_time(
    codec: str, reducer: str, collective: str, schedule: str, size: int
) -> None:
    parts = {"codec": codec, "reducer": reducer, "collective": collective, "schedule": schedule}
    assert_alike(ends(jobs.virtual(size, parts=parts, steps=6, batch_size=8)))


def ends(found: list[jobs.End]) -> list[dict[str, Any]]:
    """Without what was decided."""
    return [end for end, _ in found]


def assert_alike(found: list[dict[str, Any]]) -> None:
    """All replicas have the same parameters, and the bytes of steps add up."""
    assert len({end["parameters"] for end in found}) == 1
    for end in found:
        assert sum(sum(end["sent to"].get(kind, ())) for kind in OF_STEPS) == end["bytes"]


@pytest.mark.parametrize("schedule", ["synchronous", "delayed('auto')", "local_sgd(2, 'averaged')"])
def test_who_has_sent_what_to_whom_is_alike_in_both_worlds(pool: Pool, schedule: str, tmp_path: Path) -> None:
    """In whole runs, with evaluations and checkpoints; where a delay is decided by time, rank 0 tells the others."""
    run: dict[str, Any] = {
        "parts": {**IDENTITY, "collective": "parameter_server", "schedule": schedule},
        "steps": 4,
        "batch_size": 8,
        "settings": {"evaluate_every": 2, "checkpoint_every": 2},
    }
    found = pool.run(3, "tests.worlds.jobs.wall", folder=str(tmp_path / "wall"), **run)
    real, decided = ends(found), found[0][1]
    for counted in (False, True):
        folder = str(tmp_path / f"virtual-{counted}")
        simulated = jobs.virtual(3, folder=folder, count_evaluation=counted, replay=decided, **run)
        assert [end["bytes_sent_to"] for end in ends(simulated)] == [end["bytes_sent_to"] for end in real]
    served, *clients = (end["bytes_sent_to"] for end in real)
    assert served["gradients"][0] == 0 < served["gradients"][1] == served["gradients"][2]
    assert [sent["gradients"][1:] for sent in clients] == [[0, 0]] * 2, "to the server alone"
    assert {"evaluation", "checkpoint"} <= served.keys()
    assert ("decisions" in served) == ("auto" in schedule)
    for end in real:
        sent = end["bytes_sent_to"]
        assert sum(sum(sent.get(kind, ())) for kind in OF_STEPS) == end["bytes_sent_per_replica"]


@pytest.mark.parametrize("schedule", ["synchronous", "pipelined(width=2)"])
def test_batches_by_speed_are_alike_in_both_worlds(pool: Pool, schedule: str, tmp_path: Path) -> None:
    """Where each replica takes a share of the samples by what was measured on real ones."""
    sampler = "balanced(every=2, min_gain=0)"
    run: dict[str, Any] = {
        "parts": {**IDENTITY, "schedule": schedule, "sampler": sampler},
        "steps": 12,
        "batch_size": 8,
        "settings": {"evaluate_every": 0, "checkpoint_every": 6},
    }
    found = pool.run(3, "tests.worlds.jobs.wall", folder=str(tmp_path / "wall"), **run)
    real, decided = ends(found), found[0][1]
    shares = [decision.value for decision in decided if decision.name == "shares"]
    assert len(shares) > 4
    assert all(sum(each) == 24 and min(each) >= 1 for each in shares)
    folder = str(tmp_path / "virtual")
    simulated = ends(jobs.virtual(3, folder=folder, replay=decided, **run))
    for name in ("final_loss", "final_accuracy", "samples", "bytes_sent_to"):
        assert [end[name] for end in simulated] == [end[name] for end in real], name
    one, other = (
        Checkpoints(tmp_path / world, 0, 3, is_leader=True).load(12) for world in ("wall", "virtual")
    )
    assert digest(one[0]["model"]) == digest(other[0]["model"])


@pytest.mark.gpu
@pytest.mark.parametrize("schedule", ["synchronous", "delayed(2)"])
def test_processes_share_a_cuda_device(pool: Pool, schedule: str) -> None:
    """And end alike."""
    run: dict[str, Any] = {
        "parts": {**IDENTITY, "schedule": schedule},
        "steps": 4,
        "batch_size": 8,
        "device": "cuda:0",
    }
    one, other = ends(pool.run(2, "tests.worlds.jobs.wall", kind="parameters", **run))
    assert all(torch.equal(value, other[name]) for name, value in one.items())


def test_dropout_and_augmentation_differ_between_replicas_and_seeds(pool: Pool) -> None:
    """The comparison above means something only if the random state has a part in it."""
    one = jobs.virtual(1, parts=IDENTITY, steps=2, batch_size=8)
    train = create_workload(jobs.WORKLOAD, data="packaged").load_datasets()[0]
    ids = torch.arange(8)
    torch.manual_seed(0)
    first = train.take(ids, train=True).inputs
    assert not torch.equal(first, train.take(ids, train=True).inputs)
    assert ends(one)[0]["bytes"] == 0


@pytest.mark.parametrize("optimizer", sorted(jobs.OPTIMIZERS))
def test_equals_ddp_bit_for_bit_at_two_ranks(pool: Pool, optimizer: str) -> None:
    run = {"steps": 30 if optimizer == "sgd" else 6, "batch_size": 12}
    theirs = pool.run(2, "tests.worlds.jobs.ddp", optimizer=optimizer, **run)
    settings = {"optimizer": optimizer}
    ours = ends(
        pool.run(2, "tests.worlds.jobs.wall", kind="parameters", parts=IDENTITY, settings=settings, **run)
    )
    for name, value in theirs[0].items():
        assert torch.equal(value, ours[0][name]), name
        assert torch.equal(value, ours[1][name]), name


@pytest.mark.parametrize("schedule", ["synchronous", "delayed(2)"])
def test_buckets_of_any_size_in_both_worlds(pool: Pool, schedule: str) -> None:
    """One for each parameter, or one for all: as many exchanges, and the same sums."""
    parameters, sent = {}, set()
    for bucket_nbytes in (1, 2000, 25 << 20):
        run: dict[str, Any] = {
            "parts": {**IDENTITY, "schedule": schedule, "bucket_nbytes": bucket_nbytes},
            "steps": 4,
            "batch_size": 8,
            "settings": {"optimizer": "sgd(nesterov=True)", "learning_rate_schedule": "cosine(warmup=2)"},
        }
        real = ends(pool.run(2, "tests.worlds.jobs.wall", **run))
        assert real == ends(jobs.virtual(2, **run))
        parameters[bucket_nbytes] = [end["parameters"] for end in real]
        sent.add(real[0]["bytes"])
    assert parameters[1] == parameters[2000] == parameters[25 << 20]
    assert len(sent) == 3, "each exchange has metadata, so the size of buckets shows"


def test_equals_ddp_within_rounding_at_four_ranks(pool: Pool) -> None:
    theirs = pool.run(4, "tests.worlds.jobs.ddp", steps=5, batch_size=8)[0]
    for collective in ("direct", "ring", "native"):
        parts = {**IDENTITY, "collective": collective}
        run = {"parts": parts, "steps": 5, "batch_size": 8}
        ours = ends(pool.run(4, "tests.worlds.jobs.wall", kind="parameters", **run))[0]
        for name, value in theirs.items():
            distance = (value - ours[name]).norm() / value.norm().clamp_min(1e-12)
            assert distance <= 1e-6, (collective, name, float(distance))


SCADLES = {"reducer": "adaptive_topk(threshold=0.9)", "sharing": "injection", "scaling": "linear"}


@pytest.mark.parametrize(
    ("stream", "parts"),
    [
        *((stream, {"schedule": "synchronous"}) for stream in sorted(jobs.STREAMS)),
        ("fed", {"schedule": "delayed(delay=2)"}),
        ("rate limited", {"schedule": "delayed(delay=2, pull='swap')"}),
        ("truncated", {"schedule": "pipelined(width=2)"}),
        ("fed", SCADLES),
        ("rate limited", {**SCADLES, "schedule": "pipelined(width=2)"}),
        ("truncated", {**SCADLES, "schedule": "delayed(delay=2)", "scaling": "none"}),
        ("fed", {"sampler": "grouped_importance(rule='paper', groups='bacc', chunk=2, every=2)"}),
        ("truncated", {"sampler": "grouped_importance(rule='pool', groups='bacc', chunk=2, every=2)"}),
    ],
    ids=str,
)
def test_what_a_real_run_made_of_its_arrivals_is_made_again(
    pool: Pool, stream: str, parts: dict[str, str]
) -> None:
    run: dict[str, Any] = {"stream": stream, "parts": parts, "steps": 12}
    first = pool.run(2, "tests.worlds.jobs.wall", kind="streamed", **run)
    decided = [decision for _, decisions in first for decision in decisions]
    assert {(d.rank, d.step) for d in decided} == {(rank, step) for rank in range(2) for step in range(12)}
    assert pool.run(2, "tests.worlds.jobs.wall", kind="streamed", replay=decided, **run) == first
    assert jobs.virtual(2, kind="streamed", replay=decided, **run) == first


BACC = "grouped_importance(groups='bacc', chunk=8, every=2, rule="


@pytest.mark.parametrize(
    "parts",
    [
        {"sampler": f"{BACC}'paper', scored_by='gradient_bound')"},
        {"sampler": f"{BACC}'pool')", "schedule": "pipelined(width=2)", "codec": "int8"},
        {"sampler": f"{BACC}'two')", "schedule": "delayed(delay=2)", "codec": "error_feedback(topk(0.1))"},
        {"sampler": f"{BACC}'fill')"},
        {"sampler": f"{BACC}'half')", "codec": "int8"},
        {"sampler": f"{BACC}'paper')", "schedule": "local_sgd(sync_every=2)"},
    ],
    ids=str,
)
def test_scores_by_each_replicas_clock_are_taken_again(pool: Pool, parts: dict[str, str]) -> None:
    run: dict[str, Any] = {"parts": parts, "steps": 8}
    first = pool.run(3, "tests.worlds.jobs.wall", kind="scored", **run)
    decided = [decision for _, decisions in first for decision in decisions]
    assert {d.rank for d in decided} == {0, 1, 2}
    assert pool.run(3, "tests.worlds.jobs.wall", kind="scored", replay=decided, **run) == first
    assert jobs.virtual(3, kind="scored", replay=decided, **run) == first


def test_scores_are_turned_on_alike_in_both_worlds(pool: Pool) -> None:
    """As all replicas have learned from each other's gradients and scores."""
    parts = {"sampler": "grouped_importance(groups='bacc', chunk=8, every=2)"}
    run: dict[str, Any] = {"parts": parts, "steps": 12, "choosing": jobs.AT_ONCE}
    first = pool.run(3, "tests.worlds.jobs.wall", kind="scored", **run)
    decided = [decision for _, decisions in first for decision in decisions]
    assert [(d.step, d.value, d.rank) for d in decided if d.name == "sampling"] == [(4, "pool", None)]
    assert jobs.virtual(3, kind="scored", replay=decided, **run) == first


@pytest.mark.parametrize("by", ["importance", "uniform"])
@pytest.mark.parametrize("schedule", ["synchronous", "delayed(2)", "local_sgd(2)"])
def test_samples_change_owner_alike_in_both_worlds(pool: Pool, schedule: str, by: str) -> None:
    sharing = f"resharding(samples=6, every=4, within=3, by={by!r}, piece_nbytes=100)"
    run: dict[str, Any] = {"parts": {"schedule": schedule, "sharing": sharing}, "count": 20}
    real = ends(pool.run(4, "tests.worlds.jobs.wall", kind="resharded", **run))
    assert real == ends(jobs.virtual(4, kind="resharded", **run))
    assert sorted(one for end in real for one in end["held"]) == list(range(64))
    plain = ends(jobs.virtual(4, kind="resharded", parts={"schedule": schedule}, count=20))
    assert real[0]["parameters"] != plain[0]["parameters"]
    rounds, each = 4, 8 + 6 * (8 + 6 * 4 + 8 + 4)
    assert [end["sent"] - end["bytes"] for end in real] == [rounds * each] * 4
    assert [sum(end["sent to"]["sharing"]) for end in real] == [rounds * each] * 4
