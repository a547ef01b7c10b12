"""The importance sampler for loops with a DataLoader: what it draws, what it weighs, and with which batch that goes."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

import farflung
from farflung.errors import CheckpointError, ConfigError, RunLost
from farflung.importance import DrawnBatch, _select_rows
from farflung.state_trees import load_tree, save_tree
from tests.covering import thorough
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


def by_number(_: nn.Module, numbers: Tensor) -> Tensor:
    """Losses, the same at every step."""
    return scores_of(numbers).float()


NONE = nn.Identity()


def passed(
    sampler: farflung.ImportanceSampler, workers: int = 0, **options: Any
) -> farflung.importance.BatchIterator:
    """A pass over the numbers, scored by them."""
    return sampler.iter_batches(loader_of(sampler, workers, **options), NONE, by_number)


def made(batch_size: int = 4, **options: Any) -> farflung.ImportanceSampler:
    return farflung.ImportanceSampler(Numbers(), batch_size, **{"scored_by": "loss", **options})


# --- what it draws and weighs -----------------------------------------------------------------------------------


class Line(nn.Module):
    """Three weights, whose gradient is known."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.Parameter(torch.zeros(3))

    def forward(self, inputs: Tensor) -> Tensor:
        return inputs @ self.weights


@pytest.mark.parametrize(
    ("size", "rule"), [(1, "two"), *thorough((1, "pool"), (1, "auto"), (3, "pool"), (3, "two"), (3, "auto"))]
)
def test_the_weighted_mean_expects_to_be_the_mean_gradient(size: int, rule: str) -> None:
    """Over all ranks, whose shares are of unlike sizes, and though scores change from batch to batch."""
    random = torch.Generator().manual_seed(1)
    data = TensorDataset(torch.randn(N, 3, generator=random), torch.randn(N, generator=random))
    model, scale = Line(), [1.0]

    def losses(model: nn.Module, batch: list[Tensor]) -> Tensor:
        inputs, targets = batch
        found: Tensor = (model(inputs) - targets).square() * inputs[:, 0].mul(scale[0]).exp()
        return found

    (wanted,) = torch.autograd.grad(losses(model, list(data[:])).mean(), model.weights)
    estimates = []
    for seed in range(60):
        samplers = [
            farflung.ImportanceSampler(data, 3, seed=seed, rank=r, size=size, rule=rule, candidates=2)  # type: ignore[arg-type]
            for r in range(size)
        ]
        passes = [
            sampler.iter_batches(DataLoader(data, batch_sampler=sampler), model, losses)
            for sampler in samplers
        ]
        for several in zip(*passes, strict=True):
            means = [drawn.reduce_losses(losses(model, batch)) for drawn, batch in several]
            estimates.append(torch.autograd.grad(torch.stack(means).mean(), model.weights)[0])
    found = torch.stack(estimates).double()
    error = found.std(dim=0) / len(found) ** 0.5
    assert bool(((found.mean(dim=0) - wanted).abs() < 4 * error).all())
    assert bool((error < 0.1 * wanted.norm()).all()), "or this would show nothing"


def test_a_batch_is_cut_from_ten_batches_of_candidates() -> None:
    sampler = made(2)
    loader = loader_of(sampler)
    for ids, (drawn, batch) in zip(sampler, sampler.iter_batches(loader, NONE, by_number), strict=True):
        assert len(set(ids)) == 20
        assert drawn.ids.tolist() == batch.tolist()
        assert len(set(batch.tolist())) == 2


def test_rows_are_cut_from_whatever_holds_tensors() -> None:
    class Pair(NamedTuple):
        one: Tensor
        other: Tensor

    rows = torch.tensor([2, 0])
    numbers = torch.arange(3)
    found = _select_rows({"a": [numbers, (numbers + 10,)], "b": Pair(numbers, numbers.view(3, 1))}, rows, 3)
    assert found["a"][0].tolist() == [2, 0]
    assert found["a"][1][0].tolist() == [12, 10]
    assert type(found["b"]) is Pair
    assert found["b"].other.tolist() == [[2], [0]]
    for odd, said in ((numbers[:2], r"a tensor of shape \(2,\)"), ([1, 2, 3], "int"), (None, "NoneType")):
        with pytest.raises(
            ConfigError, match=f"the loader gives {said} for 3 samples: give tensors with a row"
        ):
            _select_rows(odd, rows, 3)


def test_scores_leave_no_trace_and_every_module_in_its_mode() -> None:
    data = TensorDataset(torch.randn(N, 4), torch.randint(3, (N,)))
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 3))
    model[1].eval()
    before, modes = copy.deepcopy(model.state_dict()), [module.training for module in model.modules()]

    def losses(model: nn.Module, batch: list[Tensor]) -> Tensor:
        assert not model.training
        found: Tensor = nn.functional.cross_entropy(model(batch[0]), batch[1], reduction="none")
        return found

    sampler = farflung.ImportanceSampler(data, 4)
    sampler.iter_batches(DataLoader(data, batch_sampler=sampler), model, losses).prefetch()
    assert same_tree(model.state_dict(), before)
    assert [module.training for module in model.modules()] == modes
    assert all(parameter.grad is None for parameter in model.parameters())
    norms = sampler.state_dict()["scores"]
    outputs = copy.deepcopy(model).eval()(data[:][0]).detach()
    wanted = (outputs.softmax(1) - nn.functional.one_hot(data[:][1], 3)).norm(dim=1)
    torch.testing.assert_close(norms, wanted[sampler.share])


def test_what_is_scored_ahead_is_drawn_from_by_the_model_of_then() -> None:
    factor = [1.0]

    def losses(_: nn.Module, numbers: Tensor) -> Tensor:
        return torch.where(numbers < 20, factor[0], 1.0)

    sampler = made(10)
    batches = sampler.iter_batches(loader_of(sampler), NONE, losses)
    factor[0] = 1e4
    batches.prefetch()
    factor[0] = 1.0
    batches.prefetch()
    drawn, _ = next(batches)
    assert (drawn.ids < 20).sum() >= 9
    drawn, _ = next(batches)
    assert drawn.weights.tolist() == pytest.approx([1.0] * 10)
    assert len([*batches]) == 2
    batches.prefetch()
    assert not [*batches]


def test_losses_of_zero_leave_it_uniform_and_the_mean_is_kept() -> None:
    sampler = made(8)
    for drawn, _ in sampler.iter_batches(
        loader_of(sampler), NONE, lambda _, numbers: torch.zeros(len(numbers))
    ):
        assert drawn.weights.tolist() == pytest.approx([1.0] * 8)


def test_shares_of_unlike_sizes_weigh_what_they_hold() -> None:
    same = {"losses": lambda _, numbers: torch.ones(len(numbers))}
    samplers = [made(4, rank=rank, size=3) for rank in range(3)]
    weights = [next(s.iter_batches(loader_of(s), NONE, **same))[0].weights[0].item() for s in samplers]
    assert weights == pytest.approx([14 / (N / 3), 13 / (N / 3), 13 / (N / 3)])


def test_weighing_takes_the_mean_in_the_dtype_of_the_losses() -> None:
    drawn = DrawnBatch(torch.tensor([1, 0]), torch.tensor([0.5, 2.0]))
    losses = torch.tensor([4.0, 1.0], dtype=torch.bfloat16, requires_grad=True)
    mean = drawn.reduce_losses(losses)
    mean.backward()
    assert (mean.item(), mean.dtype) == (2.0, torch.bfloat16)
    assert losses.grad is not None
    assert losses.grad.tolist() == [0.25, 1.0]


# --- which batch they go with -----------------------------------------------------------------------------------


def checked(pairs: Iterator[tuple[DrawnBatch, Any]]) -> Iterator[DrawnBatch]:
    """What was drawn, once it is clear that it is the batch's."""
    for drawn, batch in pairs:
        assert drawn.ids.tolist() == batch.tolist()
        yield drawn


@pytest.mark.parametrize(("workers", "persistent"), [(0, False), (2, False), (2, True)])
def test_batches_of_workers_that_fetch_ahead_are_their_draws(workers: int, persistent: bool) -> None:
    """Also where the loop breaks off, or looks at two passes at once."""
    sampler = made(4, candidates=2, rule="two")
    options = {"persistent_workers": True, "prefetch_factor": 3} if persistent else {}
    loader = loader_of(sampler, workers, **options)

    def again() -> Iterator[DrawnBatch]:
        return checked(sampler.iter_batches(loader, NONE, by_number))

    for step, _ in enumerate(again()):
        if step == 3:
            break
    assert sum(1 for _ in again()) == len(sampler) == len(loader) == 10
    if not persistent:  # torch starts such a loader's workers anew, whatever else looks at it
        for one, other in zip(again(), again(), strict=True):
            assert one is not other


def test_loaders_that_cannot_be_followed_are_refused() -> None:
    sampler = farflung.ImportanceSampler(Numbers(), 4)
    with pytest.raises(ConfigError, match="not drawn here: make it with batch_sampler="):
        sampler.iter_batches(DataLoader(Numbers(), batch_size=4), NONE, by_number)
    with pytest.raises(ConfigError, match="in_order=False gives its batches in an order of its own"):
        sampler.iter_batches(loader_of(sampler, 2, in_order=False), NONE, by_number)


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
    def ids(**options: int) -> list[list[int]]:
        return [drawn.ids.tolist() for drawn, _ in passed(made(**options))]

    assert made(rank=0, size=2).share.tolist() == made(rank=0, size=2).share.tolist()
    assert made(rank=0, size=2).share.tolist() != made(rank=0, size=2, seed=1).share.tolist()
    assert ids() == ids() != ids(seed=1)
    one, other = (made(rank=rank, size=2) for rank in range(2))
    assert [*one] != [
        one.share[torch.searchsorted(other.share, torch.tensor(each))].tolist() for each in other
    ]


# --- checkpoints ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [0, *thorough(2)])
@pytest.mark.parametrize(("ahead", "done"), [(False, 0), (True, 7), (False, 10), (True, 13)])
def test_it_goes_on_where_it_was_saved(tmp_path: Path, workers: int, ahead: bool, done: int) -> None:
    """With what was chosen and scored ahead, for passes of ten batches."""

    def steps(
        sampler: farflung.ImportanceSampler, begin: int, end: int
    ) -> list[tuple[list[int], list[float]]]:
        told: list[tuple[list[int], list[float]]] = []
        loader, step = loader_of(sampler, workers), [begin]

        def losses(_: nn.Module, numbers: Tensor) -> Tensor:
            return (scores_of(numbers) / (1 + step[0])).float()

        while step[0] < end:
            batches = sampler.iter_batches(loader, NONE, losses)
            for drawn, batch in batches:
                assert drawn.ids.tolist() == batch.tolist()
                told.append((drawn.ids.tolist(), drawn.weights.tolist()))
                if ahead:
                    batches.prefetch()
                step[0] += 1
                if step[0] == end:
                    break
        return told

    whole, first, resumed = (made(4, candidates=3, rule="two") for _ in range(3))
    wanted = steps(whole, 0, 25)
    assert steps(first, 0, done) == wanted[:done]
    save_tree(tmp_path / "state.safetensors", first.state_dict())
    resumed.load_state_dict(load_tree(tmp_path / "state.safetensors"))
    assert same_tree(resumed.state_dict(), first.state_dict())
    assert steps(resumed, done, 25) == wanted[done:]
    assert same_tree(resumed.state_dict(), whole.state_dict())


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"seed": 1}, "the state is of seed 0, and this is 1"),
        ({"rank": 1, "size": 2}, "the state is of rank 0, and this is 1"),
        ({"batch_size": 5}, "the state is of batch_size 4, and this is 5"),
        ({"candidates": 5}, "the state is of candidates 10, and this is 5"),
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
        ({"smoothing": 0}, "smoothing 0 must be above 0"),
        ({"candidates": 0}, "candidates 0 must be at least 1"),
        ({"rule": "paper"}, "rule 'paper' must be 'auto' or 'pool' or 'two'"),
        ({"scored_by": "norm"}, "scored_by 'norm' must be 'loss' or 'gradient_bound'"),
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
    ("losses", "says"),
    [
        (
            torch.ones(()),
            r"losses \(\) for 4 samples: give one for each; torch's losses do with reduction='none'",
        ),
        (torch.ones(4, 1), r"losses \(4, 1\) for 4 samples"),
        ([1.0] * 4, "losses list for 4 samples"),
    ],
)
def test_losses_that_do_not_fit(losses: Any, says: str) -> None:
    with pytest.raises(ConfigError, match=says) as error:
        DrawnBatch(torch.arange(4), torch.ones(4)).reduce_losses(losses)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("losses", "says"),
    [
        (torch.ones(()), r"its loss of 20 samples has shape \(\)"),
        (
            torch.full((20,), float("inf")),
            "20 of 20 scores at step 0 are not finite: lower the learning rate",
        ),
        (-torch.ones(20), "20 of 20 scores at step 0 are below 0"),
    ],
)
def test_scores_that_do_not_fit(losses: Tensor, says: str) -> None:
    sampler = made(2)
    with pytest.raises((ConfigError, RunLost), match=says) as error:
        next(sampler.iter_batches(loader_of(sampler), NONE, lambda *_: losses))
    assert "\n" not in str(error.value)
    assert bool((sampler.state_dict()["scores"] < 0).all()), "nothing was scored"
