"""A replica may be a group of processes: it trains as a plain one does, and all its processes do as one."""

from __future__ import annotations

import json
import socket
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.covering import thorough
from tests.forks import Fork
from tests.pool import Pool
from tests.sites import jobs

EXACT: list[dict[str, Any]] = [
    {"recipe": "synchronous", "weights": [[1.0, 1.0], [1.0, 3.0]]},
    {"recipe": "ring", "is_uneven": True},
    {"recipe": "diloco(schedule=diloco(sync_every=3))", "optimizer": "AdamW", "evaluate": 1},
    {"recipe": "local_sgd(4)", "optimizer": "AdamW", "evaluate": 4},
    {"recipe": "delayed(2)", "optimizer": "AdamW", "evaluate": 3},
    {"recipe": "dga(schedule=delayed(delay=3, period=2))", "optimizer": "AdamW", "steps": 8},
]
"""Without loss, so that shares do not change a bit."""
INT8 = {"recipe": "synchronous(codec=int8)", "width": 48, "steps": 4, "optimizer": "AdamW"}


def free_ports(count: int) -> list[int]:
    with ExitStack() as stack:
        servers = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [server.getsockname()[1] for server in servers]


def train(pool: Pool, cases: list[dict[str, Any]], **options: Any) -> list[list[dict[str, Any]]]:
    """What each process of two sites of two says of each case."""
    options = {"port": free_ports(1)[0], **options}
    results = pool.run(4, "tests.sites.jobs.train", cases=cases, **options)
    return [[process[number] for process in results] for number in range(len(cases))]


def train_plain(pool: Pool, cases: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What the first of two plain replicas says of each case; the other has the same bits."""
    one, other = pool.run(2, "tests.sites.jobs.train_plain", cases=cases)
    assert [case["bits"] for case in one] == [case["bits"] for case in other]
    return list(one)


def is_one(processes: list[dict[str, Any]], key: str = "bits") -> bool:
    return len({str(process[key]) for process in processes}) == 1


def check_equal(processes: list[dict[str, Any]], plain: dict[str, Any], tolerance: float = 0.01) -> None:
    """Sites end as plain replicas do, at the same bytes, half of them by each process."""
    assert [process["bits"] for process in processes] == [plain["bits"]] * 4
    assert [process["evaluated"] for process in processes] == [plain["evaluated"]] * 4
    assert [process["counts"] for process in processes] == [
        (site, 2, (share, 2), (0, 1)) for site in range(2) for share in range(2)
    ]
    assert sum(process["sent"] for process in processes) / 2 == pytest.approx(plain["sent"], rel=tolerance)
    assert max(process["sent"] for process in processes) < 0.52 * plain["sent"]


@pytest.mark.parametrize("layout", ["fsdp", "copies", *thorough("hsdp", "fsdp checkpoint")])
def test_a_site_trains_as_a_plain_replica(pool: Pool, layout: str) -> None:
    """Past each recipe's period, with the averaged model looked at between two steps."""
    plain = train_plain(pool, EXACT)
    for processes, one in zip(
        train(pool, [{**case, "layout": layout} for case in EXACT]), plain, strict=True
    ):
        check_equal(processes, one)


def test_one_launcher_may_have_started_all_sites(pool: Pool) -> None:
    (plain,), (processes,) = (
        train_plain(pool, EXACT[:1]),
        train(pool, [{**EXACT[0], "layout": "fsdp"}], port=0),
    )
    check_equal(processes, plain)


def test_copies_inside_a_site_stay_alike_under_a_lossy_codec(pool: Pool) -> None:
    """What tensor parallelism does not cut is held by several; each sends a part of it."""
    (plain,) = train_plain(pool, [INT8])
    layouts = "tp", "fsdp tp", "copies"
    for processes in train(pool, [{**INT8, "layout": layout} for layout in layouts]):
        assert is_one(processes)
        assert sum(process["sent"] for process in processes) / 2 == pytest.approx(plain["sent"], rel=0.01)


@pytest.mark.thorough
def test_sites_of_four_processes() -> None:
    """Three of them hold nothing of the smallest parameter, and tensor parallelism meets real shards."""
    pool, port = Pool(8), free_ports(1)[0]
    exact = EXACT[2]
    try:
        plain = pool.run(2, "tests.sites.jobs.train_plain", cases=[exact], per_site=4)[0][0]
        int8 = pool.run(2, "tests.sites.jobs.train_plain", cases=[INT8], per_site=2)[0][0]
        cases = [{**exact, "layout": "fsdp"}, {**exact, "layout": "hsdp"}, {**INT8, "layout": "fsdp tp"}]
        results = pool.run(8, "tests.sites.jobs.train", cases=cases, per_site=4, port=port)
    finally:
        pool.close()
    for number, one in enumerate((plain, plain, int8)):
        processes = [process[number] for process in results]
        assert is_one(processes)
        assert sum(process["sent"] for process in processes) / 2 == pytest.approx(one["sent"], rel=0.01)
    assert {process[number]["bits"] for process in results for number in (0, 1)} == {plain["bits"]}


def test_policies_of_fsdp2(pool: Pool) -> None:
    case = {"recipe": "synchronous", "layout": "fsdp"}
    (plain,) = train_plain(pool, [{"recipe": "synchronous"}])
    cases = [
        {**case, "policy": "offload"},
        {**case, "layout": "fsdp checkpoint"},
        {**case, "policy": "mixed precision"},
    ]
    offloaded, recomputed, mixed = train(pool, cases)
    check_equal(offloaded, plain)
    check_equal(recomputed, plain)
    assert is_one(mixed)
    assert mixed[0]["bits"] != plain["bits"]
    assert mixed[1]["losses"][-1] == pytest.approx(plain["losses"][-1], rel=0.01)


def test_gradients_accumulate_before_one_exchange(pool: Pool) -> None:
    case = {"recipe": "synchronous", "passes": 2}
    (plain,) = train_plain(pool, [case])
    cases = [
        {**case, "layout": "fsdp"},
        {**case, "layout": "fsdp", "switch": "FSDP2"},
        {**case, "layout": "copies"},
    ]
    ends = train(pool, cases)
    assert is_one([process for processes in ends for process in processes])
    for processes in ends:
        assert sum(process["sent"] for process in processes) / 2 == pytest.approx(plain["sent"], rel=0.01)
        assert processes[1]["losses"] == pytest.approx(plain["losses"], rel=1e-4)


def test_all_of_a_site_skip_a_step_that_one_of_them_sees_is_not_finite(pool: Pool) -> None:
    """One process alone has the row of the gradient that is NaN; clipping sums norms over the site."""
    poisoned = {"nonfinite": "skip", "poison": (2, 0)}
    local = {"recipe": "diloco(schedule=diloco(sync_every=3))", "optimizer": "AdamW", **poisoned}
    cases = [{"recipe": "synchronous", **poisoned}, local, {**local, "nonfinite": "exclude"}]
    plain = train_plain(pool, [*cases, {"recipe": "synchronous"}])
    assert plain[0]["bits"] != plain[3]["bits"]
    *ends, clipped, stopped = train(
        pool,
        [
            *({**case, "layout": "fsdp"} for case in cases),
            {**cases[0], "layout": "fsdp", "clip": 0.5},
            {"recipe": "synchronous", "layout": "fsdp", "nonfinite": "stop", "poison": (2, 1)},
        ],
    )
    for processes, one in zip(ends, plain, strict=False):
        check_equal(processes, one)
    assert is_one(clipped)
    assert is_one(clipped, "norms")
    assert is_one(stopped, "error")
    assert stopped[0]["error"].startswith("non-finite gradient at step 2 on rank 1")


def test_a_delay_by_measured_times_is_one_for_all_shares(pool: Pool) -> None:
    """Processes of a site that have measured unlike times merge at one step."""
    case = {"layout": "fsdp", "recipe": "delayed", "steps": 8, "optimizer": "AdamW"}
    (unlike,), (alike,) = (train(pool, [case], times=times) for times in ([1.0, 4.0], [1.0, 1.0]))
    assert is_one(unlike)
    assert unlike[0]["bits"] == alike[0]["bits"]


@pytest.mark.parametrize("recipe", ["synchronous", *thorough("diloco(schedule=diloco(sync_every=2))")])
@pytest.mark.parametrize("layout", ["copies", "body"])
def test_processes_of_a_site_may_use_unlike_parameters(pool: Pool, recipe: str, layout: str) -> None:
    """A gradient that one lacks counts as zeros, one that all lack does not exist. Plain heads stand beside a sharded
    body, and get their gradients before FSDP2 begins, in the same round of exchanges.
    """
    job = partial(pool.run, function="tests.sites.jobs.branch", recipe=recipe, port=free_ports(1)[0])
    plain = job(2, layout="plain", per_site=1)
    assert plain[0][1:] == (True, 5)
    assert job(4, layout=layout) == [plain[0]] * 4


@pytest.mark.parametrize(
    "recipe", ["delayed(2)", *thorough("synchronous(codec=error_feedback(topk(0.05)))", "local_sgd(3)")]
)
def test_a_site_resumes_from_its_distributed_checkpoint(pool: Pool, tmp_path: Path, recipe: str) -> None:
    """With exchanges in flight; on another number of shards farflung's part of it is refused."""
    for process in pool.run(
        4, "tests.sites.jobs.resume", recipe=recipe, port=free_ports(1)[0], folder=str(tmp_path)
    ):
        whole, half, resumed = process["ends"]
        assert whole == resumed != half
        assert "of 4, and this is share" in process["refusal"]


@pytest.mark.parametrize(
    ("sites", "victim", "options"), [(3, 0, {"elastic": 2}), *thorough((2, 3, {}), (3, 5, {"elastic": 3}))]
)
def test_a_site_that_loses_a_process_is_lost_whole(
    tmp_path: Path, sites: int, victim: int, options: dict[str, Any]
) -> None:
    """The run goes on with one site fewer, on which all agree at one step, or ends everywhere."""
    ports = free_ports(sites + 1)
    logs = [tmp_path / str(rank) for rank in range(2 * sites)]
    with ExitStack() as stack:
        for log in logs:
            log.touch()
        forks = [
            stack.enter_context(
                Fork(partial(jobs.lose, rank, sites, ports, "ring", victim, **options), log=log)
            )
            for rank, log in enumerate(logs)
        ]
        codes = [fork.wait() for fork in forks]
    assert codes[victim] == 7
    ends = [json.loads(log.read_text() or "{}") for log in logs]
    lost = victim // 2
    others = [end for rank, end in enumerate(ends) if rank // 2 != lost]
    assert ends[victim] == {}
    assert "error" in ends[victim ^ 1]
    if options.get("elastic") != sites - 1:
        assert all(end["error"] in ("PeerLost", "PeerFailed", "RunLost") for end in others)
        return
    assert is_one(others)
    assert is_one(others, "members")
    rest = [rank for rank in range(sites) if rank != lost]
    assert others[0]["members"][0] == [*range(sites)]
    assert others[0]["members"][-1] == rest


def test_what_a_site_cannot_do_is_refused_by_name(pool: Pool) -> None:
    first, second, third, fourth = pool.run(4, "tests.sites.jobs.refuse", port=free_ports(1)[0])
    assert "attach(site=...)" in first["no site"]
    assert "fully_shard" in first["FSDP1"]
    assert "parameter weight is on processes [0, 2], and the site is processes 0, 1" in first["both sites"]
    assert "process 0 is not in it" in first["another's"]
    assert "quorum='1'" in first["quorum"]
    assert "FARFLUNG_SITE=NUMBER/COUNT@HOST:PORT" in first["unnumbered"]
    assert "processes 0 and 1 of one site have different parameters: ['weight', [3, 4]" in first["unlike"]
    assert "give attach(site=...)" in first["told alone"]
    assert "disagree on a site's processes: 1 on rank 1, 2 on rank 0" in third["of unlike sizes"]
    assert {*second} == {*first}
    assert {*fourth} == {*first} - {"of unlike sizes"}
