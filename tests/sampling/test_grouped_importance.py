"""Mercury's sampler: what is scored when, and that batches by scores still stand for all samples."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from farflung.errors import ConfigError, RunLost
from farflung.recipes import Recipe
from farflung.sampling import SAMPLERS, GroupedImportance
from farflung.sampling.importance import compute_variance_ratio, smooth_scores
from farflung.spec import build
from farflung.state_trees import load_tree, save_tree
from farflung.types import Decision, Draw, DrawContext, Json, SampleIds, ScoringTimes
from tests.covering import thorough
from tests.helpers import same_tree

N = 40
paper = partial(GroupedImportance, rule="paper")


def view(step: int, pool: int | SampleIds = N, batch_size: int = 8, share: float = 1.0) -> DrawContext:
    return DrawContext(step, 0, 1, batch_size, pool, share)


def decide(name: str, step: int, local: Callable[[], Json]) -> Decision:
    return Decision(name, step, local(), rank=0)


def train(
    sampler: GroupedImportance, steps: range, scores: Tensor, pool: int | SampleIds = N
) -> tuple[list[Draw], list[Tensor]]:
    """Some steps in which samples always have the same scores; the batches, and what was scored in each wait."""
    draws, groups = [], []
    for step in steps:
        draws.append(sampler.draw(view(step, pool)))
        chunks = sampler.plan_wait(view(step, pool), decide).scores
        for ids in chunks:
            sampler.record_scores(ids, scores[ids], step)
        groups.append(torch.cat([torch.empty(0, dtype=torch.int64), *chunks]))
        sampler.record_times(
            ScoringTimes(1.0, 0.36, 0.01 * len(groups[-1]), len(groups[-1]), has_overlap=False)
        )
    return draws, groups


def some(seed: int = 0, count: int = N) -> Tensor:
    """Scores that differ by a lot."""
    return torch.randn(count, generator=torch.Generator().manual_seed(seed)).mul(1.5).exp()


def within(values: Tensor, mean: float, errors: float = 4.0) -> bool:
    """Whether a mean is where its standard error lets it be."""
    return abs(float(values.mean()) - mean) <= errors * float(values.std()) / math.sqrt(len(values))


def of_batch(draw: Draw, values: Tensor) -> Tensor:
    """The mean over a batch, as a replica takes it."""
    assert draw.weights is not None
    return (draw.weights * values[draw.ids]).mean()


def means(sampler: GroupedImportance, values: Tensor, tries: int, batch_size: int = 8) -> Tensor:
    """Means over many batches, from the same groups and scores: as steps go by, all ages grow alike."""
    batches = [sampler.draw(view(1000 + each, len(values), batch_size)) for each in range(tries)]
    return torch.stack([of_batch(draw, values) for draw in batches])


# --- groups -----------------------------------------------------------------------------------------------------


@given(count=st.integers(1, 60), groups=st.integers(1, 60), chunk=st.integers(1, 20), seed=st.integers(0, 5))
@settings(max_examples=25)
def test_a_fixed_number_of_groups_scores_each_sample_once_in_as_many_steps(
    count: int, groups: int, chunk: int, seed: int
) -> None:
    groups = min(groups, count)
    sampler = paper(seed, groups=groups, chosen=1, chunk=chunk)
    _, scored = train(sampler, range(3 * groups), torch.ones(count), count)
    assert all(count // groups <= len(ids) <= -(-count // groups) for ids in scored)
    assert sorted(torch.cat(scored[:groups]).tolist()) == list(range(count))
    for step in range(2 * groups):
        assert torch.equal(scored[step], scored[step + groups]), "the groups stay the same"


def test_groups_are_random_ones() -> None:
    def first(seed: int) -> list[int]:
        return list(train(paper(seed), range(1), torch.ones(N))[1][0].tolist())

    assert sorted(first(1)) != sorted(first(2))
    assert first(1) == first(1) != sorted(first(1))


def test_what_is_due_comes_in_chunks_and_stays_due_until_it_is_scored() -> None:
    sampler = paper(0, groups=4, chunk=3)
    sampler.draw(view(0))
    due = sampler.plan_wait(view(0), decide).scores
    assert [len(ids) for ids in due] == [3, 3, 3, 1]
    assert torch.equal(torch.cat([*sampler.plan_wait(view(0), decide).scores]), torch.cat([*due]))
    sampler.record_scores(due[0], torch.ones(3), 0)
    assert torch.equal(torch.cat([*sampler.plan_wait(view(0), decide).scores]), torch.cat([*due[1:]]))


def test_groups_by_time_are_as_large_as_the_wait_and_the_newest_takes_samples_over() -> None:
    sampler = paper(0, groups="bacc", chunk=5, every=4)
    draws, scored = train(sampler, range(6), some())
    # A wait of 0.36 s has room for 7 chunks of 5 samples that take 0.01 s each.
    assert [len(ids) for ids in scored] == [5, *[35] * 5]
    assert [draw.metrics["groups"] for draw in draws] == [1, 2, 2, 2, 2, 2]
    assert [draw.metrics["num_scored"] for draw in draws] == [0, 5, 35, 35, 35, 35]
    assert sorted(torch.cat(scored[:2]).tolist()) == list(range(N))


def test_groups_of_unlike_sizes_give_as_many_to_a_batch_as_they_have() -> None:
    sampler = paper(0, groups="bacc", chunk=5)
    _, (small, large) = train(sampler, range(2), some())
    assert (len(small), len(large)) == (5, 35)
    for step in range(2, 12):
        ids = sampler.draw(view(step)).ids
        assert int(torch.isin(ids, small).sum()) == 1
        assert int(torch.isin(ids, large).sum()) == 7


def test_groups_by_time_are_never_more_than_all_samples_or_is_asked_for() -> None:
    _, scored = train(paper(0, groups="bacc", chunk=64), range(4), some())
    assert [sorted(ids.tolist()) for ids in scored] == [list(range(N))] * 4
    sampler = paper(0, groups="bacc", chunk=5, max_scored=13)
    draws, scored = train(sampler, range(5), some())
    assert [len(ids) for ids in scored] == [5, *[13] * 4]
    assert draws[-1].metrics["num_scored"] == 13


# --- what batches stand for -------------------------------------------------------------------------------------


def test_the_first_batch_is_uniform() -> None:
    draw = paper(0).draw(view(0, batch_size=1000, share=1.25))
    assert draw.weights is not None
    assert draw.weight == 1.25, "as many as the replica has"
    assert draw.weights.dtype == torch.float32
    assert draw.weights.tolist() == [1.0] * 1000
    assert set(draw.ids.tolist()) == set(range(N))


def skewed(groups: int, **options: Any) -> tuple[GroupedImportance, Tensor]:
    """A sampler in the middle of a run, and values that differ much between its groups and within them."""
    sampler = paper(3, groups=groups, **options)
    scores = some()
    _, scored = train(sampler, range(groups), scores)
    values = scores.double() * torch.linspace(0.5, 1.5, N)
    for place, ids in enumerate(scored):
        values[ids] += 3.0 * place
    return sampler, values


def test_the_papers_estimator_does_not_where_groups_differ() -> None:
    sampler, values = skewed(7, chosen=2, beta=0.3)
    assert not within(means(sampler, values, 500), float(values.mean()), errors=10)


def test_the_papers_estimator_expects_the_mean_of_the_chosen_groups() -> None:
    sampler, values = skewed(5, chosen=1, beta=50.0)
    newest = train(paper(3, groups=5), range(5), some())[1][-1]
    assert within(means(sampler, values, 300), float(values[newest].mean()))
    sampler, values = skewed(5, chosen=5)
    assert within(means(sampler, values, 300), float(values.mean())), "all of them have all samples"


def test_the_papers_estimator_expects_the_mean_over_all_samples_as_groups_are_random() -> None:
    scores = some()
    values = scores.double() + torch.linspace(0, 6, N)
    found = []
    for seed in range(150):
        sampler = paper(seed, groups=5, chosen=2)
        train(sampler, range(5 + seed % 5), scores)
        found.append(of_batch(sampler.draw(view(5 + seed % 5)), values))
    assert within(torch.stack(found), float(values.mean()))


@given(seed=st.integers(0, 50), smoothing=st.floats(0.1, 4), beta=st.floats(0, 3))
@settings(max_examples=10)
def test_weights_of_the_papers_estimator_have_a_bound(seed: int, smoothing: float, beta: float) -> None:
    sampler = paper(seed, groups=6, smoothing=smoothing, beta=beta)
    draws, _ = train(sampler, range(15), some(seed))
    for draw in draws:
        assert draw.weights is not None
        assert float(draw.weights.max()) <= (1 + smoothing) / smoothing * (1 + 1e-6)


def test_weights_are_the_mean_score_over_that_of_the_sample() -> None:
    sampler, scores = paper(0, groups=1, chosen=1, smoothing=1.0), some()
    draw = train(sampler, range(3), scores)[0][-1]
    assert draw.weights is not None
    importances = smooth_scores(scores, 1.0)
    torch.testing.assert_close(draw.weights, (importances.mean() / importances)[draw.ids].float())


def test_batches_by_gradient_norms_vary_less_than_uniform_ones() -> None:
    gradients = some(5).double() * torch.where(torch.arange(N) % 2 == 0, 1.0, -1.0)
    sampler = paper(0, groups=1, chosen=1)
    train(sampler, range(1), gradients.abs().float())
    drawn, uniform = means(sampler, gradients, 800), means(paper(0), gradients, 800)
    assert within(drawn, float(gradients.mean()))
    assert float(drawn.var()) < 0.9 * float(uniform.var())
    square = float(gradients.mean()) ** 2
    told = sampler.draw(view(5000)).metrics["variance_ratio"]
    assert isinstance(told, float)
    second = 8 * uniform.var() + square
    assert float(8 * drawn.var() + square) == pytest.approx(told * float(second), rel=0.2)


@pytest.mark.parametrize("beta", [0.0, 0.7])
def test_fresh_groups_are_chosen_more_often(beta: float) -> None:
    sampler = paper(0, groups=4, chosen=1, beta=beta)
    _, scored = train(sampler, range(4), some())
    group_of = {int(each): place for place, ids in enumerate(scored) for each in ids}
    tries = 500
    found = Counter(group_of[int(sampler.draw(view(1000 + k, batch_size=1)).ids)] for k in range(tries))
    chances = torch.softmax(beta * torch.arange(4.0), 0).tolist()
    for place, chance in enumerate(chances):
        assert abs(found[place] / tries - chance) <= 4 * math.sqrt(chance * (1 - chance) / tries)


def test_very_old_groups_still_make_up_the_number_that_is_chosen() -> None:
    sampler = paper(0, groups=4, chosen=4, beta=1e6)
    train(sampler, range(4), some())
    told = sampler.draw(view(4, batch_size=400))
    assert len(told.ids.unique()) > N // 2


def test_a_sample_without_a_score_counts_as_the_mean_of_its_group() -> None:
    sampler, scores = paper(0, groups=1, chosen=1), some()
    train(sampler, range(1), scores)
    sampler.set_scores(torch.tensor([4]), torch.tensor([-1.0]))
    draw = sampler.draw(view(1, batch_size=500))
    assert draw.weights is not None
    known = torch.cat([scores[:4], scores[5:]])
    weight = draw.weights[draw.ids == 4]
    assert len(weight)
    torch.testing.assert_close(weight, torch.ones_like(weight))
    other = draw.weights[draw.ids == 3]
    torch.testing.assert_close(other[0], 1.5 * known.mean() / (scores[3] + 0.5 * known.mean()))


# --- candidates ---------------------------------------------------------------------------------------------------


def test_a_batch_is_drawn_from_the_newest_group_without_replacement() -> None:
    sampler = GroupedImportance(0, rule="pool")
    draws, groups = train(sampler, range(12), some(count=400), 400)
    assert [len(ids) for ids in groups] == [80] * 12, "ten batches"
    assert sorted(torch.cat(groups[:5]).tolist()) == list(range(400)), "in turn"
    for draw, candidates in zip(draws[1:], groups, strict=False):
        assert len(draw.ids.unique()) == 8
        assert bool(torch.isin(draw.ids, candidates).all())
        assert draw.metrics["rule"] == "pool"


@pytest.mark.parametrize(("rule", "groups"), [("pool", "bacc"), *thorough(("two", None))])
def test_batches_from_candidates_expect_the_mean_over_all_samples(rule: Any, groups: Any) -> None:
    """Over seeds, while scores change from step to step, so those that candidates are drawn by are old."""
    count, found = 200, []
    values = some(3, count).double() + torch.linspace(0, 4, count)
    for seed in range(160):
        sampler = GroupedImportance(seed, rule=rule, groups=groups, chunk=8, every=2)
        for step in range(4):
            train(sampler, range(step, step + 1), some(10 + step, count), count)
        found.append(of_batch(sampler.draw(view(4, count)), values))
    assert within(torch.stack(found), float(values.mean()))


def test_candidates_by_older_scores_are_taken_where_few_samples_matter() -> None:
    """One in a hundred has all there is to learn, and ten batches hold two of them at random."""
    count = 800
    scores = torch.full((count,), 1e-3)
    scores[::100] = 1.0
    sampler = GroupedImportance(1)
    draws, groups = train(sampler, range(130), scores, count)
    told = [draw.metrics["rule"] for draw in draws]
    assert told[:2] == ["uniform", "pool"]
    assert told[-20:] == ["two"] * 20
    held = [int((scores[ids] == 1).sum()) for ids in groups]
    assert max(held[:5]) < 8
    assert held[-20:] == [8] * 20, "all of them"
    train(sampler, range(130, 400), torch.ones(count), count)
    assert sampler.draw(view(400, count)).metrics["rule"] == "pool"


def test_weights_of_candidates_have_a_bound() -> None:
    for seed in range(20):
        draws, _ = train(GroupedImportance(seed, rule="two"), range(8), some(seed, 300) ** 3, 300)
        assert max(float(draw.weights.max()) for draw in draws if draw.weights is not None) <= 51 + 5


@pytest.mark.parametrize("rule", ["auto", "pool"])
def test_of_a_stream_all_that_is_held_are_candidates(rule: Any) -> None:
    sampler, pool, seen = GroupedImportance(0, rule=rule, groups=8), torch.arange(30, 70), set[int]()
    for step in range(60):
        (draw,), _ = train(sampler, range(step, step + 1), torch.ones(100), pool)
        assert len(draw.ids.unique()) == 8
        assert draw.weight is None
        seen |= set(draw.ids.tolist())
    assert seen == set(range(30, 70))


@pytest.mark.parametrize("most", [160, 800, 10**9])
def test_a_sample_of_a_stream_weighs_as_much_as_any_in_its_time_there(most: int) -> None:
    """One in fifty is drawn soon; the others stay until they are drawn, or are lost where more than so many wait."""
    arrive = 80 if most < 10**9 else 8
    sampler, pool = GroupedImportance(0, rule="pool"), torch.arange(0)
    scores = torch.full((600 * arrive,), 0.02)
    scores[::50] = 1.0
    weighed = torch.zeros(len(scores), dtype=torch.float64)
    for step in range(600):
        pool = torch.cat([pool, torch.arange(step * arrive, (step + 1) * arrive)])[-most:]
        (draw,), _ = train(sampler, range(step, step + 1), scores, pool)
        pool = pool[~torch.isin(pool, draw.ids)]
        if draw.weights is not None:
            weighed[draw.ids] += draw.weights
    rare, others = weighed[arrive * 50 :: 50], weighed[arrive * 50 + 1 :: 50]
    error = math.hypot(*(float(each.std()) / math.sqrt(len(each)) for each in (rare, others)))
    assert abs(float(rare.mean() - others.mean())) <= 4 * error


def test_groups_by_time_have_two_batches_at_least() -> None:
    sampler = GroupedImportance(0, groups="bacc", chunk=4)
    _, groups = train(sampler, range(1), some())
    assert len(groups[0]) == 16


# --- seeds and state --------------------------------------------------------------------------------------------


def test_replicas_with_shares_of_the_data_draw_unlike_numbers() -> None:
    recipe = Recipe(sampler="grouped_importance")
    one, other = (recipe.build_components(1, share).sampler.draw(view(0)).ids for share in range(2))
    assert one.tolist() != other.tolist()


def test_replicas_that_draw_from_the_same_samples_draw_unlike_numbers() -> None:
    one, other = (paper(0).draw(DrawContext(0, rank, 2, 8, N)).ids for rank in range(2))
    assert one.tolist() != other.tolist()


@pytest.mark.parametrize("groups", ["4", "'bacc', chunk=3, every=3"])
@pytest.mark.parametrize("more", ["rule='paper'", "rule='auto'", "rule='two'", "rule='half'"])
@pytest.mark.parametrize("streams", [False, True])
def test_it_goes_on_from_its_state(groups: str, more: str, streams: bool, tmp_path: Path) -> None:
    if streams and ("two" in more or "half" in more):
        pytest.skip("refused")
    text = f"grouped_importance(groups={groups}, {more})"
    scores = some(count=200)

    def made() -> GroupedImportance:
        sampler = build("sampler", text, SAMPLERS, {"seed": 5})
        assert isinstance(sampler, GroupedImportance)
        return sampler

    def go_on(sampler: GroupedImportance, steps: range) -> list[Any]:
        told: list[Any] = []
        for step in steps:
            pool = torch.arange(3 * step, N + 3 * step) if streams else N
            (draw,), (group,) = train(sampler, range(step, step + 1), scores, pool)
            weights = [] if draw.weights is None else draw.weights.tolist()
            told.append((draw.ids.tolist(), weights, dict(draw.metrics), group.tolist()))
        return told

    whole = made()
    found = go_on(whole, range(12))
    half = made()
    assert go_on(half, range(7)) == found[:7]
    state = half.state_dict()
    save_tree(tmp_path / "state", {"sampler": state})
    go_on(half, range(7, 9))
    resumed = made()
    resumed.load_state_dict(load_tree(tmp_path / "state")["sampler"])
    assert go_on(resumed, range(7, 12)) == found[7:]
    assert same_tree(resumed.state_dict(), whole.state_dict())


# --- streams ----------------------------------------------------------------------------------------------------


def test_of_a_stream_those_held_are_drawn_and_the_stream_says_what_a_batch_weighs() -> None:
    sampler = paper(0)
    pool = torch.tensor([90, 7, 41])
    draw = sampler.draw(view(0, pool, batch_size=64))
    assert set(draw.ids.tolist()) == {90, 7, 41}
    assert draw.weight is None
    draw = sampler.draw(view(1, torch.tensor([41, 3]), batch_size=64))
    assert set(draw.ids.tolist()) == {41, 3}


def test_of_a_stream_the_oldest_scores_are_renewed_first() -> None:
    sampler = paper(0, groups=2, chosen=1)

    def step(at: int, pool: list[int]) -> list[int]:
        _, (group,) = train(sampler, range(at, at + 1), torch.ones(10), torch.tensor(pool))
        return list(group.tolist())

    assert step(0, [6, 5, 4, 3]) == [6, 5]
    assert step(1, [6, 5, 4, 3]) == [4, 3]
    assert step(2, [6, 5, 4, 3, 9, 8]) == [9, 8, 6], "what has no score comes before"
    assert step(3, [5, 4, 3, 8, 6]) == [5, 4, 3]
    assert step(4, [8, 6, 5]) == [8, 6]


def test_what_is_new_in_a_stream_is_in_the_newest_group_and_counts_as_its_mean() -> None:
    sampler = paper(0, groups=1, chosen=1, beta=100.0)
    train(sampler, range(5), torch.tensor([1.0, 3.0]), torch.tensor([0, 1]))
    draw = sampler.draw(view(5, torch.tensor([0, 1, 2]), batch_size=300))
    assert draw.weights is not None
    assert set(draw.ids.tolist()) == {0, 1, 2}
    weight = {int(each): float(w) for each, w in zip(draw.ids, draw.weights, strict=True)}
    assert weight == pytest.approx({0: 3 / 2, 1: 3 / 4, 2: 1.0})


def test_a_score_outlasts_others_coming_and_going() -> None:
    sampler = paper(0, groups=1, chosen=1)
    train(sampler, range(1), some(), torch.tensor([8, 2, 5]))
    sampler.draw(view(1, torch.tensor([2, 30, 8])))
    assert sampler.get_scores(torch.tensor([8, 30, 2, 5])).tolist() == [some()[8], -1.0, some()[2], -1.0]


def test_of_a_stream_that_is_used_up_nothing_is_scored() -> None:
    sampler = paper(0)
    sampler.draw(view(0, torch.arange(4)))
    assert not sampler.plan_wait(view(0, torch.arange(0)), decide).scores


# --- what else is told and weighed ------------------------------------------------------------------------------


def test_telemetry_says_what_importance_is_worth() -> None:
    sampler, scores = paper(0, groups=5), some()
    draws, scored = train(sampler, range(4), scores)
    unknown = dict.fromkeys(("rank_within_5", "rank_within_10", "score_age"))
    assert draws[0].metrics == {
        "rule": "paper",
        "groups": 1,
        "num_scored": 0,
        "variance_ratio": 1.0,
        "score_quantiles": None,
        "largest_weight": 1.0,
        **unknown,
    }
    for step in range(1, 4):
        newest = scores[scored[step - 1]]
        ratio = compute_variance_ratio(newest, smooth_scores(newest, 0.5))
        known = {"groups": step + 1, "num_scored": 8, "variance_ratio": ratio}
        assert {name: draws[step].metrics[name] for name in known} == pytest.approx(known)
        # Of eight scores, 5 % is the first, 25 % the second and so on.
        assert draws[step].metrics["score_quantiles"] == [
            newest.sort().values[at].item() for at in (0, 1, 3, 5, 7)
        ]
        weights = draws[step].weights
        assert weights is not None
        assert draws[step].metrics["largest_weight"] == weights.max().item()
        assert unknown.items() <= draws[step].metrics.items(), "nobody is scored anew before all have a score"
    json.dumps(dict(draws[-1].metrics))


def test_telemetry_says_how_ranks_have_moved_since_the_scores_before() -> None:
    sampler, count = paper(0, groups=2), 80
    first, second = torch.arange(1.0, count + 1), torch.arange(1.0, count + 1)
    _, groups = train(sampler, range(2), first, count)
    members = groups[0].sort().values
    # Of the 40 of a group two swap places that are 3 apart, 7.5 %, and two that are 10 apart.
    for one, other in ((3, 6), (20, 30)):
        second[members[one]], second[members[other]] = first[members[other]], first[members[one]]
    draws, _ = train(sampler, range(2, 5), second, count)
    assert draws[0].metrics["score_age"] is None, "of step 1, where scores were the first"
    told = [draws[1].metrics[name] for name in ("rank_within_5", "rank_within_10", "score_age")]
    assert told == [36 / 40, 38 / 40, 2.0]
    told = [draws[2].metrics[name] for name in ("rank_within_5", "rank_within_10", "score_age")]
    assert told == [1.0, 1.0, 2.0]


def test_ranks_of_what_others_have_scored_are_not_told() -> None:
    sampler, scores = paper(0, groups=2), some(count=20)
    _, groups = train(sampler, range(2), scores, 20)
    sampler.set_scores(groups[0][:3], torch.full((3,), 9.0))
    draws, _ = train(sampler, range(2, 4), scores, 20)
    assert draws[1].metrics["score_age"] is None, "seven are too few"
    draws, _ = train(sampler, range(4, 6), scores, 20)
    assert draws[1].metrics["score_age"] == 2.0, "all ten were scored here by then"


# --- what else a wait is spent on ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rule", "scores", "gradients"), [("fill", 0, 27), ("half", 40, 14), ("pool", 80, 0)]
)
def test_a_wait_is_spent_on_scores_or_a_third_as_many_gradients(
    rule: Any, scores: int, gradients: int
) -> None:
    sampler = GroupedImportance(0, rule=rule, chunk=20)
    for step in range(4):
        told = sampler.draw(view(step, 400)).metrics["rule"]
        assert told == ("uniform" if step == 0 or rule == "fill" else "pool")
        due = sampler.plan_wait(view(step, 400), decide)
        assert sum(map(len, due.scores)) == scores
        assert sum(map(len, due.gradients)) == gradients
        assert max(map(len, [*due.scores, *due.gradients])) == 20
        for ids in due.scores:
            sampler.record_scores(ids, torch.ones(len(ids)), step)


def test_batches_and_gradients_of_fill_are_one_pass_over_the_samples() -> None:
    sampler, seen = GroupedImportance(3, rule="fill"), list[int]()
    for step in range(20):
        seen += sampler.draw(view(step)).ids.tolist()
        for ids in sampler.plan_wait(view(step), decide).gradients:
            seen += ids.tolist()
    for first in range(0, len(seen) - N, N):
        assert sorted(seen[first : first + N]) == list(range(N))


def test_running_statistics_follow_uniform_samples_while_batches_are_drawn_by_scores() -> None:
    sampler, seen = GroupedImportance(3, rule="pool", statistics="uniform"), list[int]()
    for step in range(15):
        seen += [] if sampler.draw(view(step)).weights is not None else [0] * 8
        due = sampler.plan_wait(view(step), decide)
        for ids in due.scores:
            sampler.record_scores(ids, torch.ones(len(ids)), step)
        seen += torch.cat([*due.statistics]).tolist()
    assert len(seen) == 8 + 15 * 8
    assert sorted(seen[8 + N - 8 : 8 + 2 * N - 8]) == list(range(N))
    assert sampler.statistics == "uniform"
    assert not in_a_run().plan_wait(view(0), decide).statistics, "a batch that is uniform has its own"


def in_a_run() -> GroupedImportance:
    sampler = GroupedImportance(3, statistics="uniform")
    assert sampler.gain is not None
    sampler.gain.begin_run("")
    sampler.draw(view(0))
    return sampler


@pytest.mark.parametrize(
    ("options", "what"),
    [
        ({"rule": "two"}, "rule 'two'"),
        ({"rule": "fill"}, "rule 'fill'"),
        ({"rule": "half", "statistics": "uniform"}, "rule 'half' and statistics='uniform'"),
    ],
)
def test_what_takes_samples_from_all_is_refused_for_a_stream(options: dict[str, Any], what: str) -> None:
    said = f"^grouped_importance: {what} takes samples from all .* give rule='pool' and statistics='batch'$"
    with pytest.raises(ConfigError, match=said):
        GroupedImportance(0, **options).draw(view(0, torch.arange(40)))


# --- samples that change their owner ----------------------------------------------------------------------------


@given(count=st.integers(0, N), groups=st.integers(1, 9), step=st.integers(0, 40))
@settings(max_examples=20)
def test_what_is_given_away_is_of_each_group_its_share(count: int, groups: int, step: int) -> None:
    sampler = paper(0, groups=groups, chosen=1)
    _, scored = train(sampler, range(groups), some())
    slots = sampler.choose_outgoing(count, step)
    assert len(set(slots.tolist())) == len(slots) == count
    for ids in scored:
        share = count * len(ids) / N
        assert math.floor(share) <= int(torch.isin(slots, ids).sum()) <= math.ceil(share)


def test_what_is_given_away_goes_by_importance() -> None:
    sampler, tries = paper(0, groups=1, chosen=1), 800
    scores = torch.tensor([1.0, 2.0, 3.0, 4.0])
    train(sampler, range(1), scores, pool=4)
    found = torch.bincount(torch.cat([sampler.choose_outgoing(1, step) for step in range(tries)])) / tries
    wanted = (scores + 1.25) / 15
    assert bool(((found - wanted).abs() <= 4 * (wanted * (1 - wanted) / tries).sqrt()).all())


def test_no_more_is_given_away_than_there_is() -> None:
    sampler = paper(0)
    sampler.draw(view(0))
    with pytest.raises(ConfigError, match="41 samples are to be given away, and there are 40"):
        sampler.choose_outgoing(N + 1, 0)


def test_what_comes_takes_the_slot_and_the_group_and_brings_its_score() -> None:
    sampler, scores = paper(0, groups=4), some()
    train(sampler, range(3), scores)
    before = sampler.state_dict()
    slots = sampler.choose_outgoing(6, 3)
    brought = torch.tensor([5.0, -1.0, 0.0, 1.0, 2.0, 3.0])
    sampler.set_scores(slots, brought)
    after = sampler.state_dict()
    assert sampler.get_scores(slots).tolist() == brought.tolist()
    assert sampler.get_scores(slots).dtype == torch.float32
    others = torch.tensor([each for each in range(N) if each not in slots.tolist()])
    assert torch.equal(after["scores"][others], before["scores"][others])
    assert all(same_tree(after[key], before[key]) for key in before if key not in ("scores", "scored_at"))


# --- what is refused --------------------------------------------------------------------------------------------


def test_more_groups_than_samples_are_refused() -> None:
    sampler = paper(0)
    with pytest.raises(ConfigError, match="groups 8 for the 7 samples of this replica"):
        sampler.draw(view(0, 7))


@pytest.mark.parametrize("odd", [math.nan, math.inf, -math.inf, -0.5])
def test_scores_that_are_not_finite_end_the_run_and_those_below_zero_are_refused(odd: float) -> None:
    sampler = paper(0)
    sampler.draw(view(0))
    says = "are below 0" if odd == -0.5 else "are not finite: lower the learning rate"
    with pytest.raises((RunLost, ConfigError), match=f"2 of 3 scores at step 17 {says}"):
        sampler.record_scores(torch.arange(3), torch.tensor([odd, 1.0, odd]), 17)


@pytest.mark.parametrize(
    ("option", "said"),
    [
        ("groups=0", "groups 0 must be at least 1"),
        ("groups=2.5", "groups 2.5 must be a whole number"),
        ("groups='auto'", "groups 'auto' must be a whole number or 'bacc'"),
        ("rule='paper', chosen=0", "chosen 0 must be at least 1"),
        ("rule='paper', groups=3, chosen=4", "chosen 4 must be at most groups, 3"),
        ("rule='paper', beta=-1", "beta -1 must be a number of at least 0"),
        ("smoothing='much'", "smoothing 'much' must be a number of at least 0"),
        ("scored_by='norm'", "scored_by 'norm' must be 'loss' or 'gradient_bound'"),
        ("rule='exact'", "rule 'exact' must be 'auto' or 'pool' or 'two' or 'fill' or 'half' or 'paper'"),
        ("rule=2", "rule 2 must be 'auto' or 'pool' or 'two' or 'fill' or 'half' or 'paper'"),
        ("chosen=3", "chosen 3 is of the paper's rule: give rule='paper' too"),
        ("smoothing=0", "smoothing 0 must be above 0, or samples scored 0 are never drawn"),
        ("statistics='mine'", "statistics 'mine' must be 'batch' or 'uniform'"),
        ("chunk=0", "chunk 0 must be at least 1"),
        ("max_scored=63", "max_scored 63 must be at least 64"),
        ("every=0", "every 0 must be at least 1"),
        ("share=2", "share 2 must be above 0 and at most 1"),
    ],
)
def test_bad_options(option: str, said: str) -> None:
    with pytest.raises(ConfigError, match=f"^grouped_importance: {said}$"):
        build("sampler", f"grouped_importance({option})", SAMPLERS, {"seed": 1})


def test_by_time_any_number_of_groups_may_be_chosen() -> None:
    sampler = paper(0, groups="bacc", chosen=50)
    assert len(sampler.draw(view(0)).ids) == 8
