"""Low-rank gradients."""

from __future__ import annotations

import importlib
import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from farflung.reducers import PowerSGD
from farflung.seeding import create_generator
from farflung.types import ParameterSpan, Seeds, TensorSpec
from tests.reducers.replicas import PARTS, SIDE, SPEC, gradient, left, once, run

powersgd_hook: Any = importlib.import_module("torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook")


def low_rank(rank: int, step: int) -> Tensor:
    """The convolution's gradient has rank 2, the matrix's too, and both stay as they are."""
    del step
    g = create_generator(8, rank)
    left_one, right_one = torch.randn(4, 2, generator=create_generator(9)), torch.randn(2, 36, generator=g)
    left_two, right_two = torch.randn(10, 2, generator=create_generator(10)), torch.randn(2, 10, generator=g)
    return torch.cat([(left_one @ right_one).view(-1), (left_two @ right_two).view(-1), torch.ones(13)])


def test_a_gradient_of_that_rank_comes_out_whole() -> None:
    replicas = run(PowerSGD(rank=2, min_ratio=1.0), 4, steps=3, make=low_rank, weighted=False)
    exact = torch.stack([low_rank(rank, 0) for rank in range(4)]).mean(dim=0)
    for result in replicas[0].results:
        torch.testing.assert_close(result.mean, exact, rtol=1e-4, atol=1e-4)


def test_ranks_by_shapes_and_dense_steps_by_the_run() -> None:
    parts = (ParameterSpan((128, 512), 0), ParameterSpan((32, 40), 65536), ParameterSpan((10, 200), 66816))
    q = PowerSGD().init(TensorSpec((68816,), spans=parts), Seeds(0, 0)).shared["q"]
    assert {shape: one.shape[-1] for shape, one in q.items()} == {"128x512": 8, "32x40": 4, "10x200": 2}
    assert PowerSGD().with_run_length(2000, 100).dense_steps == 200
    assert PowerSGD().with_run_length(500, 100).dense_steps == 100
    assert PowerSGD(dense_steps=0).with_run_length(2000, 100).dense_steps == 0
    assert PowerSGD().with_run_length(2000, 100).method == "powersgd"


def test_a_warm_start_finds_the_largest_directions() -> None:
    """Of a matrix that stays, power iteration finds the best approximation there is."""
    u, _, v = torch.linalg.svd(torch.randn(20, 20, generator=create_generator(3)))
    matrix = u @ torch.diag(0.5 ** torch.arange(20.0)) @ v
    reducer = PowerSGD(rank=2, error_feedback=False)
    spec = TensorSpec((400,), spans=(ParameterSpan((20, 20), 0),))
    replicas = run(
        reducer, 2, 20, spec=spec, make=lambda rank, step: matrix.reshape(-1).clone(), weighted=False
    )
    best = (u[:, :2] @ torch.diag(torch.tensor([1.0, 0.5])) @ v[:2]).reshape(-1)
    torch.testing.assert_close(replicas[0].results[-1].mean, best, rtol=0.0, atol=1e-4)


def test_only_what_pays_is_compressed_and_the_rest_is_exact() -> None:
    reducer = PowerSGD(rank=2)
    parts = (
        ParameterSpan((30, 20), 0),
        ParameterSpan((4, 4), 600),
        ParameterSpan((9,), 616),
        ParameterSpan((), 625),
        ParameterSpan((30, 2, 10), 626),
    )
    spec = TensorSpec((1226,), spans=parts)
    state = reducer.init(spec, Seeds(1, 2))
    assert state.shared["layout"] == {"dense": [[600, 16], [616, 9], [625, 1]], "groups": {"30x20": [0, 626]}}
    grads = [torch.randn(1226, generator=create_generator(3, rank)) for rank in range(4)]
    results, nbytes, _ = once(reducer, grads, spec=spec)
    torch.testing.assert_close(results[0].mean[600:626], torch.stack(grads).mean(dim=0)[600:626])
    numbers = 26 + 2 * 2 * (30 + 20)
    assert abs(nbytes[0] - 2 * 3 * numbers * 4 / 4 - 6 * SIDE) <= 3 * 2 * 8


def test_a_direction_that_was_lost_is_found_again() -> None:
    """After a step of zeros, or one that is not finite, there is no direction to begin with."""

    def troubled(rank: int, step: int) -> Tensor:
        if step in (1, 2):
            return torch.full((SPEC.numel,), 0.0 if step == 1 else math.nan)
        return gradient(rank, step)

    for keeps in (True, False):
        replicas = run(PowerSGD(error_feedback=keeps), 2, steps=6, make=troubled)
        results = replicas[0].results
        assert results[1].mean.isfinite().all()
        assert keeps or not results[1].mean.any()
        assert all(result.mean.isfinite().all() and result.mean[:244].any() for result in results[3:])
        assert all(left(replica).isfinite().all() for replica in replicas if keeps)


def test_columns_that_depend_are_dropped_and_found_again() -> None:
    """Gradients of rank one with more columns than that, and then of full rank."""
    vector = torch.randn(20, generator=create_generator(1))
    matrix, whole = torch.outer(vector, vector), torch.randn(20, 20, generator=create_generator(2))
    spec = TensorSpec((400,), spans=(ParameterSpan((20, 20), 0),))

    def make(rank: int, step: int) -> Tensor:
        return (matrix if step < 4 else whole).reshape(-1).clone()

    results = run(PowerSGD(rank=4, error_feedback=False), 2, 6, spec=spec, make=make, weighted=False)[
        0
    ].results
    for result in results[:4]:
        torch.testing.assert_close(result.mean, matrix.reshape(-1), rtol=1e-4, atol=1e-4)
    assert int(torch.linalg.matrix_rank(results[5].mean.view(20, 20), rtol=1e-4)) == 4


class Bucket:
    """What PyTorch's hook asks of a :class:`torch.distributed.GradBucket`."""

    def __init__(self, flat: Tensor) -> None:
        self._flat = flat

    def buffer(self) -> Tensor:
        return self._flat

    def gradients(self) -> list[Tensor]:
        return [self._flat[p.start : p.start + p.numel].view(p.shape) for p in PARTS]

    def index(self) -> int:
        return 0

    def is_last(self) -> bool:
        return True


def alone(tensor: Tensor, **_: object) -> SimpleNamespace:
    """An all-reduce of one rank."""
    done: torch.futures.Future[list[Tensor]] = torch.futures.Future()
    done.set_result([tensor])
    return SimpleNamespace(get_future=lambda: done)


@pytest.mark.parametrize("rank", [1, 2, 3])
def test_it_goes_the_way_of_the_hook_of_pytorch(rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the same first Q; all sums are linear, so one rank with the mean gradient has the mean residual."""
    monkeypatch.setattr(powersgd_hook.dist, "all_reduce", alone)
    size, steps, spec = 3, 8, TensorSpec(SPEC.shape, torch.float64, PARTS)

    def make(rank: int, step: int) -> Tensor:
        return gradient(rank, step).double()

    reducer = PowerSGD(rank=rank, min_ratio=1.0)
    first = reducer.init(spec, Seeds(5, 100)).shared["q"]
    q = torch.cat([first[shape].reshape(-1) for shape in ("4x36", "10x10")])

    theirs = powersgd_hook.PowerSGDState(
        SimpleNamespace(size=lambda: 1), rank, start_powerSGD_iter=2, min_compression_rate=1
    )
    theirs.iter = 2
    theirs.p_memory_dict[0], theirs.q_memory_dict[0] = torch.empty(rank * 14, dtype=torch.float64), q.clone()
    ours = run(reducer, size, steps, spec=spec, make=make, weighted=False)
    for step in range(steps):
        mean = torch.stack([make(each, step) for each in range(size)]).mean(dim=0)
        found = powersgd_hook.powerSGD_hook(theirs, Bucket(mean)).wait()
        torch.testing.assert_close(ours[0].results[step].mean, found, rtol=1e-9, atol=1e-9)
    residual = torch.stack([left(replica) for replica in ours]).mean(dim=0)
    torch.testing.assert_close(residual, theirs.error_dict[0], rtol=1e-9, atol=1e-9)
