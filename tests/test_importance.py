"""The importance sampler for loops with a DataLoader: what it draws, what it weighs, and with which batch that goes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

import farflung
from farflung.errors import CheckpointError, ConfigError
from farflung.importance import Drawn
from farflung.replica import load_tree, save_tree
from tests.helpers import same_tree
from tests.pool import Pool

N = 40


def scores_of(ids: Tensor) -> Tensor:
    """Some made-up ones, the highest 40 times the lowest."""
    return 1.0 + ids


class Numbers(Dataset[int]):
    """A data set whose samples are their own numbers."""

    def __len__(self) -> int:
        return N

    def __getitem__(self, index: int) -> int:
        return index


def loader_of(sampler: farflung.ImportanceSampler, workers: int = 0, **options: Any) -> DataLoader[Any]:
    return DataLoader(Numbers(), batch_sampler=sampler, num_workers=workers, **options)


# --- what it draws and weighs -----------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 3])
def test_the_weighted_mean_expects_to_be_the_mean_gradient(size: int) -> None:
    """Over all ranks, whose shares are of unlike sizes, and though scores change from batch to batch."""
    random = torch.Generator().manual_seed(1)
    inputs, targets = torch.randn(N, 3, generator=random), torch.randn(N, generator=random)
    weights = torch.zeros(3, requires_grad=True)

    def losses(ids: Tensor) -> Tensor:
        return (inputs[ids] @ weights - targets[ids]).square()

    (wanted,) = torch.autograd.grad(losses(torch.arange(N)).mean(), weights)
    estimates = []
    for seed in range(20):
        samplers = [
            farflung.ImportanceSampler(range(N), 4, seed=seed, rank=r, size=size) for r in range(size)
        ]
        for sampler in samplers:
            sampler.update(sampler.share[: N // size // 2], scores_of(sampler.share[: N // size // 2]))
        for _ in range(10):
            passes = [sampler.batches(loader_of(sampler)) for sampler in samplers]
            for several in zip(*passes, strict=True):
                means = [drawn.weigh(losses(drawn.ids)) for drawn, _ in several]
                estimates.append(torch.autograd.grad(torch.stack(means).mean(), weights)[0])
    found = torch.stack(estimates).double()
    error = found.std(dim=0) / len(found) ** 0.5
    assert bool(((found.mean(dim=0) - wanted).abs() < 4 * error).all())
    assert bool((error < 0.1 * wanted.norm()).all()), "or this would show nothing"


def test_samples_come_in_proportion_to_smoothed_scores() -> None:
    sampler = farflung.ImportanceSampler(range(N), 20, smoothing=0.5)
    sampler.update(sampler.share, scores_of(sampler.share))
    importances = scores_of(torch.arange(N)) + 0.5 * scores_of(torch.arange(N)).mean()
    counts = torch.zeros(N)
    for _ in range(500):
        for drawn, _ in sampler.batches(loader_of(sampler)):
            counts += torch.bincount(drawn.ids, minlength=N)
            torch.testing.assert_close(drawn.weights, importances.mean() / importances[drawn.ids])
    wanted = counts.sum() * importances / importances.sum()
    assert bool(((counts - wanted).abs() < 5 * wanted.sqrt()).all())


@pytest.mark.parametrize("smoothing", [0.1, 0.5, 2.0])
def test_no_weight_exceeds_its_bound_and_every_sample_stays_within_reach(smoothing: float) -> None:
    sampler = farflung.ImportanceSampler(range(N), 8, smoothing=smoothing)
    sampler.update(sampler.share, torch.zeros(N))
    sampler.update(sampler.share[:1], torch.tensor([1e6]))
    seen, heaviest = set[int](), 0.0
    for _ in range(400):
        for drawn, _ in sampler.batches(loader_of(sampler)):
            seen.update(drawn.ids.tolist())
            heaviest = max(heaviest, float(drawn.weights.max()))
    assert seen == set(range(N))
    assert heaviest == pytest.approx((1 + smoothing) / smoothing)


@pytest.mark.parametrize("known", [None, 0.0])
def test_draws_are_uniform_while_nothing_tells_samples_apart(known: float | None) -> None:
    sampler = farflung.ImportanceSampler(range(N), 8)
    if known is not None:
        sampler.update(sampler.share[:5], torch.full((5,), known))
    drawn, _ = next(sampler.batches(loader_of(sampler)))
    assert drawn.weights.tolist() == [1.0] * 8


def test_shares_of_unlike_sizes_weigh_what_they_hold() -> None:
    samplers = [farflung.ImportanceSampler(range(N), 4, rank=rank, size=3) for rank in range(3)]
    weights = [next(sampler.batches(loader_of(sampler)))[0].weights[0].item() for sampler in samplers]
    assert weights == pytest.approx([14 / (N / 3), 13 / (N / 3), 13 / (N / 3)])


def test_samples_without_a_score_have_the_mean_of_those_with_one() -> None:
    sampler = farflung.ImportanceSampler(range(3), 3)
    sampler.update([0, 1], torch.tensor([1.0, 3.0]))
    weights: dict[int, float] = {}
    for _ in range(20):
        for drawn, _ in sampler.batches(loader_of(sampler)):
            weights |= zip(drawn.ids.tolist(), drawn.weights.tolist(), strict=True)
    assert weights == pytest.approx({0: 3 / 2, 1: 3 / 4, 2: 1.0})


def test_weighing_scores_by_losses_or_by_what_is_said() -> None:
    sampler = farflung.ImportanceSampler(range(2), 2)
    drawn = Drawn(torch.tensor([1, 0]), torch.tensor([0.5, 2.0]), sampler)
    losses = torch.tensor([4.0, 1.0], dtype=torch.bfloat16, requires_grad=True)
    mean = drawn.weigh(losses)
    mean.backward()
    assert (mean.item(), mean.dtype) == (2.0, torch.bfloat16)
    assert losses.grad is not None
    assert losses.grad.tolist() == [0.25, 1.0]
    assert sampler.state_dict()["scores"].tolist() == [1.0, 4.0]
    drawn.weigh(-losses, scores=torch.tensor([7.0, 8.0]))
    assert sampler.state_dict()["scores"].tolist() == [8.0, 7.0]
    sampler.update([1, 0, 1], torch.tensor([1.0, 2.0, 3.0]))
    assert sampler.state_dict()["scores"].tolist() == [2.0, 3.0], "the last counts"


# --- which batch they go with -----------------------------------------------------------------------------------


def checked(pairs: Iterator[tuple[Drawn, Any]]) -> Iterator[Drawn]:
    """What was drawn, once it is clear that it is the batch's."""
    for drawn, batch in pairs:
        assert drawn.ids.tolist() == batch.tolist()
        yield drawn


@pytest.mark.parametrize(("workers", "persistent"), [(0, False), (2, False), (2, True)])
def test_batches_of_workers_that_fetch_ahead_are_their_draws(workers: int, persistent: bool) -> None:
    """Also where the loop leaves batches out, breaks off, or looks at two passes at once."""
    sampler = farflung.ImportanceSampler(Numbers(), 4)
    options = {"persistent_workers": True, "prefetch_factor": 3} if persistent else {}
    loader = loader_of(sampler, workers, **options)
    for step, drawn in enumerate(checked(sampler.batches(loader))):
        if step == 3:
            break
        if step != 1:
            drawn.weigh(scores_of(drawn.ids).float())
    assert sum(1 for _ in checked(sampler.batches(loader))) == len(sampler) == len(loader) == 10
    if not persistent:  # torch starts such a loader's workers anew, whatever else looks at it
        for one, other in zip(
            checked(sampler.batches(loader)), checked(sampler.batches(loader)), strict=True
        ):
            assert one is not other


def test_weights_are_of_when_a_sample_was_drawn() -> None:
    """A loader with workers has asked before the scores have come, and those batches stay unbiased."""
    sampler = farflung.ImportanceSampler(Numbers(), 4)
    for step, (drawn, _) in enumerate(sampler.batches(loader_of(sampler, 2, prefetch_factor=2))):
        assert (drawn.weights == 1).all() == (step < 5), (
            "four are fetched ahead, and one more when the first comes"
        )
        sampler.update(sampler.share, scores_of(sampler.share))


def test_loaders_that_cannot_be_followed_are_refused() -> None:
    sampler = farflung.ImportanceSampler(Numbers(), 4)
    with pytest.raises(ConfigError, match="not drawn here: make it with batch_sampler="):
        sampler.batches(DataLoader(Numbers(), batch_size=4))
    with pytest.raises(ConfigError, match="in_order=False gives its batches in an order of its own"):
        sampler.batches(loader_of(sampler, 2, in_order=False))


# --- ranks ------------------------------------------------------------------------------------------------------


def test_ranks_under_ddp_hold_disjoint_shares(pool: Pool) -> None:
    one, other = pool.run(2, "tests.ddp_jobs.importance", samples=101, batch_size=8)
    assert sorted(one["share"] + other["share"]) == list(range(101))
    assert len(one["share"]) == 51
    assert one["batches"] == other["batches"] == 6
    for rank in one, other:
        assert set(rank["drawn"]) <= set(rank["share"])
    assert one["parameters"] == other["parameters"]


def test_shares_depend_on_the_seed_and_draws_on_the_rank_too() -> None:
    def made(**options: int) -> farflung.ImportanceSampler:
        return farflung.ImportanceSampler(range(N), 4, **options)

    assert made(rank=0, size=2).share.tolist() == made(rank=0, size=2).share.tolist()
    assert made(rank=0, size=2).share.tolist() != made(rank=0, size=2, seed=1).share.tolist()
    assert list(made()) == list(made())
    assert list(made()) != list(made(seed=1))
    one, other = (made(rank=rank, size=2) for rank in range(2))
    assert list(one) != [
        one.share[torch.searchsorted(other.share, torch.tensor(ids))].tolist() for ids in other
    ]


# --- checkpoints ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("done", [0, 1, 7, 10, 13])
def test_it_goes_on_where_it_was_saved(tmp_path: Path, workers: int, done: int) -> None:
    """With what was drawn ahead, for passes of ten batches."""

    def steps(sampler: farflung.ImportanceSampler, count: int) -> list[tuple[list[int], list[float]]]:
        told: list[tuple[list[int], list[float]]] = []
        loader = loader_of(sampler, workers)
        while len(told) < count:
            for drawn in checked(sampler.batches(loader)):
                drawn.weigh(scores_of(drawn.ids) / (1 + len(told) + done_before[sampler]))
                told.append((drawn.ids.tolist(), drawn.weights.tolist()))
                if len(told) == count:
                    break
        return told

    whole, first, resumed = (farflung.ImportanceSampler(Numbers(), 4) for _ in range(3))
    done_before = {whole: 0, first: 0, resumed: done}
    wanted = steps(whole, 25)
    assert steps(first, done) == wanted[:done]
    save_tree(tmp_path / "state.safetensors", first.state_dict())
    resumed.load_state_dict(load_tree(tmp_path / "state.safetensors"))
    assert same_tree(resumed.state_dict(), first.state_dict())
    assert steps(resumed, 25 - done) == wanted[done:]
    assert same_tree(resumed.state_dict(), whole.state_dict())


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"seed": 1}, "the state is of seed 0, and this is 1"),
        ({"rank": 1, "size": 2}, "the state is of rank 0, and this is 1"),
        ({"batch_size": 5}, "the state is of batch_size 4, and this is 5"),
    ],
)
def test_the_state_of_another_is_refused(options: dict[str, Any], says: str) -> None:
    state = farflung.ImportanceSampler(range(N), 4).state_dict()
    with pytest.raises(CheckpointError, match=says):
        farflung.ImportanceSampler(range(N), **{"batch_size": 4, **options}).load_state_dict(state)
    with pytest.raises(CheckpointError, match=r"the state is of samples 40, and this is 41"):
        farflung.ImportanceSampler(range(N + 1), 4).load_state_dict(state)


# --- bad input --------------------------------------------------------------------------------------------------


class Endless(IterableDataset[int]):
    """A data set without length."""

    def __iter__(self) -> Iterator[int]:
        return iter(())


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"batch_size": 0}, "batch_size 0 must be at least 1"),
        ({"smoothing": 0}, "smoothing 0: must be above 0"),
        ({"smoothing": -1.0}, r"smoothing -1\.0 must be a number of at least 0"),
        ({"smoothing": float("nan")}, "smoothing nan must be a number"),
        ({"seed": 0.5}, r"seed 0\.5 must be a whole number"),
        ({"rank": 1}, "rank 1 of size None: give both or none"),
        ({"rank": 2, "size": 2}, "rank 2 must be 0 to 1"),
        ({"batch_size": 41}, "batch_size 41 is more than the 40 samples that each of 1 ranks has of 40"),
        ({"batch_size": 14, "rank": 0, "size": 3}, "batch_size 14 is more than the 13 samples"),
        ({"dataset": Endless()}, "Endless has no length: it must be map-style"),
        ({"dataset": TensorDataset(torch.empty(0))}, "more than the 0 samples"),
    ],
)
def test_options_that_do_not_fit(options: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says) as error:
        farflung.ImportanceSampler(**{"dataset": range(N), "batch_size": 4, **options})
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("losses", "scores", "says"),
    [
        (
            torch.ones(()),
            None,
            r"losses \(\) for 4 samples: give one for each; torch's losses do with reduction='none'",
        ),
        (torch.ones(4, 1), None, r"losses \(4, 1\) for 4 samples"),
        ([1.0] * 4, None, "losses list for 4 samples"),
        (torch.tensor([1.0, float("nan"), 2.0, float("inf")]), None, "losses that are not finite: 2 of 4"),
        (-torch.ones(4), None, "score -1 is below 0: give scores= beside losses that may be"),
        (torch.ones(4), torch.ones(3), r"scores \(3,\) for 4 samples"),
        (torch.ones(4), torch.full((4,), float("inf")), "scores that are not finite: 4 of 4"),
    ],
)
def test_losses_and_scores_that_do_not_fit(losses: Any, scores: Any, says: str) -> None:
    sampler = farflung.ImportanceSampler(range(N), 4)
    drawn = Drawn(torch.arange(4), torch.ones(4), sampler)
    with pytest.raises(ConfigError, match=says) as error:
        drawn.weigh(losses, scores)
    assert "\n" not in str(error.value)
    assert bool(sampler.state_dict()["scores"].isnan().all()), "nothing was scored"


def test_samples_of_other_ranks_are_refused() -> None:
    one, other = (farflung.ImportanceSampler(range(N), 4, rank=rank, size=2) for rank in range(2))
    foreign = int(other.share[-1])
    with pytest.raises(ConfigError, match=f"sample {foreign} is not among the 20 of rank 0"):
        one.update([int(one.share[0]), foreign], torch.ones(2))
    for beyond in (-1, N):
        with pytest.raises(ConfigError, match=f"sample {beyond} is not among"):
            one.update([beyond], torch.ones(1))
    with pytest.raises(ConfigError, match=r"ids of shape \(\) and torch.int64 are no list of samples"):
        one.update(torch.tensor(1), torch.ones(1))
    with pytest.raises(ConfigError, match=r"ids of shape \(1,\) and torch.float32 are no list of samples"):
        one.update(torch.ones(1), torch.ones(1))
    one.update([], torch.empty(0))
