"""Any codec or reducer as DDP's communication hook: through its rebuilt buckets, and through a checkpoint."""

from __future__ import annotations

import copy
import gc
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch

import farflung
from farflung.errors import ConfigError, UnknownName, Unsupported
from farflung.reducers import REDUCERS
from tests import ddp_jobs
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


@pytest.mark.parametrize("size", [2, 3])
def test_identity_is_ddp_where_sums_do_not_fit_in_float16(pool: Pool, size: int) -> None:
    for result in pool.run(size, "tests.ddp_jobs.in_float16"):
        assert result["finite"]
        assert result["hook"] == result["attach"]
        assert size > 2 or result["hook"] == result["ddp"]  # gloo adds three in an order of its own
        assert result["mask"] == [-60_000.0] * 3


@pytest.mark.parametrize("model", ddp_jobs.MODELS)
def test_identity_is_ddp_for_each_way_of_handing_buckets_over(pool: Pool, model: str) -> None:
    """DDP leaves out buckets, even the first and the last; or gives several the same number; or has inner passes."""
    for result in pool.run(2, "tests.ddp_jobs.hooked_beside_ddp", model=model):
        assert result["hook"] == result["ddp"]
        if model.startswith("skips") and "static" not in model:
            assert result["models_sent"] == pytest.approx(len(model.removeprefix("skips ")) / 3, rel=0.2)


@pytest.mark.parametrize(
    ("kind", "says"),
    [
        ("unlike at first", ["left out other parameters", "left out other parameters"]),
        (
            "unlike later",
            ["in step 1 DDP left out other parameters", "in step 1 DDP left out other parameters"],
        ),
        ("used later", ["unused in the first backward pass", "unused in the first backward pass"]),
        ("used later on one", ["unused in the first backward pass", "unused in the first backward pass"]),
        ("checkpointed", ["use_reentrant=False", "use_reentrant=False"]),
    ],
)
def test_buckets_left_out_in_ways_that_cannot_be_served_are_an_error_on_all_ranks(
    pool: Pool, kind: str, says: list[str]
) -> None:
    for said, part in zip(pool.run(2, "tests.ddp_jobs.failure", kind=kind), says, strict=True):
        assert part in said


@pytest.mark.parametrize("by_initial", [True, False])
@pytest.mark.parametrize("batch_counts", [[1, 3], [3, 0]])
def test_ranks_that_run_out_of_data_join_as_with_pytorchs_hooks(
    pool: Pool, batch_counts: list[int], by_initial: bool
) -> None:
    options: dict[str, Any] = {"batch_counts": batch_counts, "by_initial": by_initial}
    theirs, ours, coded = (
        pool.run(2, "tests.ddp_jobs.joins", how=how, **options)
        for how in ("allreduce_hook", "identity", "error_feedback(topk(0.1))")
    )
    assert len({*theirs, *ours}) == 1
    assert len(set(coded)) == 1


def test_a_rank_that_left_is_named_to_one_that_has_run_out_of_data(pool: Pool) -> None:
    joined, _ = pool.run(2, "tests.ddp_jobs.failure", kind="gone while joined")
    assert joined.startswith("lost rank 1: ")


@pytest.mark.parametrize("as_view", [False, True])
def test_gradients_with_a_graph_are_those_of_pytorchs_hook(pool: Pool, as_view: bool) -> None:
    for found in pool.run(2, "tests.ddp_jobs.differentiates_twice", as_view=as_view):
        assert found["identity"] == found["allreduce_hook"]


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


@pytest.mark.parametrize("by_file", [False, True])
@pytest.mark.parametrize("how", STATEFUL)
def test_a_copy_goes_on_with_the_same_bits(pool: Pool, tmp_path: Path, how: str, by_file: bool) -> None:
    job: dict[str, Any] = {"how": how, "folder": str(tmp_path), "by_file": by_file}
    for result in pool.run(2, "tests.ddp_jobs.copied", **job):
        assert result["whole"] == result["copied"]


def test_only_the_rank_that_was_copied_has_its_residual_again(pool: Pool, tmp_path: Path) -> None:
    for grad in pool.run(2, "tests.ddp_jobs.copied_from_rank_0", folder=str(tmp_path)):
        assert grad == [0.0, 0.5]


def test_nothing_keeps_a_copy_that_is_not_used() -> None:
    state, _ = farflung.ddp_hook("dgc")
    copied = weakref.ref(copy.deepcopy(state))
    gc.collect()
    assert copied() is None


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
