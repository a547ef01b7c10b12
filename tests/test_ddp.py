"""Any codec or reducer as DDP's communication hook: through its rebuilt buckets, and through a checkpoint."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import farflung
from farflung.errors import ConfigError, UnknownName, Unsupported
from farflung.reducers import REDUCERS
from tests.pool import Pool

WHOLE = "adaptive_topk(rule='released')"
"""Takes a gradient in one bucket, and the model here has two."""

CARRIED = ("by_role", "demo", "dgc", "error_feedback", "identity", "qsgd", "randomk")
"""Codecs with parts, memories, residuals, noise and sums of payloads; the hook knows no more of them than that."""

RECIPES: dict[str, dict[str, str]] = {
    **{codec: {"codec": codec} for codec in CARRIED},
    **{reducer: {"reducer": reducer} for reducer in sorted(set(REDUCERS) - {"codec"})},
    "gradiveq(warm_up=0, sample_steps=2)": {"reducer": "gradiveq(warm_up=0, sample_steps=2)"},
    "codec(qsgd(), phases='two')": {"codec": "qsgd", "reducer": "codec(phases='two')"},
    "codec(qsgd(), 'ring', phases='hops')": {
        "codec": "qsgd",
        "collective": "ring",
        "reducer": "codec(phases='hops')",
    },
}


@pytest.mark.parametrize("how", RECIPES)
def test_the_hook_does_what_attach_does(pool: Pool, how: str) -> None:
    """Bit for bit, though DDP has other buckets than attach, and others after the first step."""
    results = pool.run(2, "tests.ddp_jobs.beside_attach", how=how, recipe=RECIPES[how])
    assert len({result["attach"] for result in results}) == 1
    for result in results:
        assert result["hook"]["parameters"] == result["attach"]
        assert 0 < result["hook"]["bytes"] <= result["attach_bytes"]  # which votes beside it


def test_what_wants_the_whole_gradient_is_refused_in_buckets(pool: Pool) -> None:
    with pytest.raises(
        AssertionError, match="ConfigError: adaptive_topk: rule='released' needs the whole gradient"
    ):
        pool.run(2, "tests.ddp_jobs.beside_attach", how=WHOLE, recipe={"reducer": WHOLE})


def test_buckets_of_another_size_are_those_of_attach(pool: Pool) -> None:
    """Top-k takes its share of each bucket, so the size decides what is sent."""
    job = {"how": "topk(0.1)", "recipe": {"codec": "topk(0.1)"}}
    small, plain = (
        pool.run(2, "tests.ddp_jobs.beside_attach", **job, bucket_nbytes=nbytes)[0]
        for nbytes in (2000, 25 << 20)
    )
    for result in (small, plain):
        assert result["hook"]["parameters"] == result["attach"]
    assert small["attach"] != plain["attach"]


def test_messages_go_on_while_a_codec_learns(pool: Pool) -> None:
    hook, attach = (pool.run(2, "tests.ddp_jobs.learns_slowly", how=how) for how in ("hook", "attach"))
    assert len({*hook, *attach}) == 1


@pytest.mark.parametrize("find_unused", [False, True])
def test_identity_is_ddp(pool: Pool, find_unused: bool) -> None:
    for result in pool.run(2, "tests.ddp_jobs.beside_ddp", find_unused=find_unused):
        assert result["hook"] == result["ddp"]


@pytest.mark.parametrize(("faster", "stays"), [(0, False), (3, False), (4, True), (5, True)])
def test_it_falls_back_on_ddp_unless_it_is_clearly_faster(pool: Pool, faster: int, stays: bool) -> None:
    """All ranks alike, by what they measured together; steps take turns until then, and none changes a bit."""
    results = pool.run(2, "tests.ddp_jobs.falls_back", faster=faster)
    for result in results:
        assert result["carried"] == [True, True, False, *([True, False] * 5), *([stays] * 3)]
        assert result["hook"] == result["ddp"]
        assert result["models_sent"] == pytest.approx(sum(result["carried"]), rel=0.05)


@pytest.mark.parametrize("how", ["error_feedback(topk(0.02))", "codec(error_feedback(sign()), phases='two')"])
def test_rebuilt_buckets_lose_nothing(pool: Pool, how: str) -> None:
    """What was given is what came and what is left, parameter by parameter, whatever DDP's buckets are."""
    results = pool.run(4, "tests.ddp_jobs.telescopes", how=how)
    first, second, *others = results[0]["layouts"]
    assert first != second, "the buckets are rebuilt"
    assert len(second) > 1
    assert all(layout == second for layout in others)
    for name in results[0]["given"]:
        given = torch.stack([result["given"][name] for result in results]).mean(dim=0)
        left = torch.stack([result["left"][name] for result in results]).mean(dim=0)
        assert results[0]["came"][name].norm() > 0
        assert left.norm() > 0.01 * given.norm()
        for result in results:
            torch.testing.assert_close(result["came"][name] + left, given, rtol=0.0, atol=1e-5)


STATEFUL = [
    "error_feedback(topk(0.02))",
    "dgc",
    "gradiveq(warm_up=0, sample_steps=2)",
    "powersgd",
    "qsgd",
    "codec(error_feedback(sign()), phases='hops')",
]


@pytest.mark.parametrize("how", STATEFUL)
def test_a_checkpoint_changes_no_bit(pool: Pool, tmp_path: Path, how: str) -> None:
    for result in pool.run(2, "tests.ddp_jobs.resumes", how=how, folder=str(tmp_path)):
        assert result["whole"] == result["resumed"]


def test_unlike_settings_are_found_out_by_name(pool: Pool) -> None:
    for said in pool.run(2, "tests.ddp_jobs.failure", kind="unlike"):
        assert "ddp_hook" in said
        assert "TopK" in said
        assert "Int8" in said


def test_a_rank_that_left_is_named(pool: Pool) -> None:
    waiting, _ = pool.run(2, "tests.ddp_jobs.failure", kind="gone")
    assert waiting.startswith("lost rank 1: ")


def test_a_state_may_be_older_than_the_process_group(pool: Pool) -> None:
    for ends in pool.run(2, "tests.ddp_jobs.made_before_the_group", hows=["dgc", "dgc"]):
        assert ends["early"] == ends["late"]
    for ends in pool.run(2, "tests.ddp_jobs.made_before_the_group", hows=["dgc", "int8"]):
        assert "Int8" in ends["said"]


@pytest.mark.parametrize(
    ("kind", "says"),
    [
        ("two models", "belongs to another model already"),
        ("sparse", "neither sparse nor complex"),
        ("complex", "neither sparse nor complex"),
        ("fsdp", "FSDP hands its hooks shards"),
        ("closed", "exchanges nothing after finish() or close()"),
    ],
)
def test_what_it_cannot_carry_is_refused_by_name(pool: Pool, kind: str, says: str) -> None:
    for said in pool.run(2, "tests.ddp_jobs.failure", kind=kind):
        assert says in said


def test_the_state_of_another_model_is_refused(pool: Pool) -> None:
    for said in pool.run(2, "tests.ddp_jobs.failure", kind="another model"):
        assert "another model" in said


@pytest.mark.parametrize(
    ("how", "kind", "says"),
    [
        ("topk(2)", ConfigError, "density 2 must be above 0"),
        ("topkk", UnknownName, "unknown codec or reducer 'topkk'"),
        ("powersgd(rank=0)", ConfigError, "rank 0"),
        ("codec(collective='native')", Unsupported, "use collective direct or ring"),
        (3, ConfigError, "neither a codec nor a reducer"),
    ],
)
def test_bad_input_is_refused_at_once(how: str, kind: type[Exception], says: str) -> None:
    with pytest.raises(kind, match=says):
        farflung.ddp_hook(how)
