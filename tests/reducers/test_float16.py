"""Gradients in float16, of which a sum may be out of range although the mean is not."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor

from farflung.codecs import DGC, DeMo, TopK, by_size, error_feedback
from farflung.comm import COLLECTIVES, ExchangeChannel
from farflung.reducers import CodecReducer
from farflung.reducers.aggregation import CodecExchange
from farflung.seeding import create_generator
from farflung.types import Codec, ParameterSpan, Runtime, TensorSpec
from tests.helpers import NUMEL, in_virtual_time, same_bits, tensors_in
from tests.reducers.replicas import PARTS, WEIGHTS, assert_alike, run
from tests.reducers.test_contract import ROWS

HALF = TensorSpec((NUMEL,), torch.float16, PARTS)


def large(rank: int, step: int) -> Tensor:
    del rank, step
    return torch.full((NUMEL,), 40_000.0, dtype=torch.float16)


def spread(rank: int, step: int) -> Tensor:
    """Numbers of all sizes, the largest near the end of the range."""
    drawn = torch.rand(NUMEL, generator=create_generator(22, rank, step)) * 2 - 1
    return (drawn * torch.logspace(-3, 4.8, NUMEL)).half()


@pytest.mark.parametrize("name", ROWS)
def test_what_is_finite_on_all_ranks_stays_finite(name: str) -> None:
    replicas = run(ROWS[name].reducer, 3, 2, spec=HALF, make=large, weighted=False)
    assert_alike(replicas)
    for result in replicas[0].results:
        assert result.mean.dtype == torch.float16
        assert result.mean.isfinite().all()
    for replica in replicas:
        assert all(tensor.isfinite().all() for tensor in tensors_in(replica.slot.state.local))


@pytest.mark.parametrize("name", [name for name, row in ROWS.items() if row.error is not None])
@pytest.mark.parametrize("size", [1, 2, 4])
def test_the_mean_is_weighted(name: str, size: int) -> None:
    weights = torch.tensor(WEIGHTS[:size], dtype=torch.float64)
    for step, result in enumerate(run(ROWS[name].reducer, size, spec=HALF, make=spread)[0].results):
        exact = sum(w * spread(rank, step).double() for rank, w in enumerate(weights)) / weights.sum()
        assert (result.mean - exact).norm() <= (2e-3 + (ROWS[name].error or 0.0)) * exact.norm()


@pytest.mark.parametrize("collective", sorted(COLLECTIVES.keys() - {"native"}))
@pytest.mark.parametrize("size", [2, 3, 4])
def test_a_dense_mean_has_ddps_bits(collective: str, size: int) -> None:
    result = run(CodecReducer(collective=collective), size, 1, spec=HALF, make=spread, weighted=False)[0]
    shares = [spread(rank, 0).mul(1 / size) for rank in range(size)]
    total = shares[0].clone()
    for share in shares[1:]:
        total += share
    if collective == "ring" and size > 2:  # adds each segment in an order of its own
        assert (result.results[0].mean - total).abs().max() <= 2e-3 * total.abs().max()
    else:
        assert same_bits(result.results[0].mean, total)


@pytest.mark.parametrize(
    "name", ["codec, identity", "codec, by_size", "powersgd (dense at first)", "gradiveq"]
)
def test_a_dense_sum_takes_half_the_bytes_of_float32(name: str) -> None:
    reducer = CodecReducer(by_size(numel=NUMEL + 1)) if name == "codec, by_size" else ROWS[name].reducer
    half, whole, none = (
        run(reducer, 4, 1, spec=TensorSpec((numel,), dtype), make=partial(_ones, numel, dtype))[0].nbytes[0]
        for numel, dtype in ((NUMEL, torch.float16), (NUMEL, torch.float32), (0, torch.float32))
    )
    assert half - none == (whole - none) / 2


def _ones(numel: int, dtype: torch.dtype, rank: int, step: int) -> Tensor:
    del rank, step
    return torch.ones(numel, dtype=dtype)


@pytest.mark.parametrize("name", ["codec, identity", "codec, topk", "codec, int8", "powersgd"])
def test_what_is_infinite_stays_so(name: str) -> None:
    def odd(rank: int, step: int) -> Tensor:
        grad = spread(rank, step)
        grad[3] = torch.inf if rank else 1.0
        return grad

    assert not run(ROWS[name].reducer, 2, 1, spec=HALF, make=odd)[0].results[0].mean.isfinite().all()


def test_a_residual_may_be_larger_than_a_gradient_of_its_type() -> None:
    for replica in run(CodecReducer(error_feedback(TopK(1 / NUMEL))), 2, 3, spec=HALF, make=large):
        assert replica.slot.state.local["residual"].max() == 3 * 40_000 * WEIGHTS[replica.rank]


def test_what_a_residual_makes_too_large_is_cut_to_what_a_gradient_could_be() -> None:
    async def body(runtime: Runtime) -> Tensor:
        channel, side = ExchangeChannel(runtime.comm, 1, 0), torch.ones(1, dtype=torch.float64)
        total, _ = await CodecExchange(channel, "direct", side, 0, torch.float16).sum_dense(
            torch.full((10,), 1e6)
        )
        return total

    for size in (2, 3, 7):
        for total in in_virtual_time(size, body)[0]:
            torch.testing.assert_close(total / size, torch.full((10,), 65504.0), rtol=size * 2e-3, atol=0.0)


@pytest.mark.parametrize("codec", [error_feedback(TopK(0.02)), DGC(0.02, momentum=0.0), DeMo(keep=1)])
def test_a_residual_of_bfloat16_keeps_what_is_small_beside_it(codec: Codec) -> None:
    """In bfloat16 a residual of 1 is the same after a gradient of 1/512 as before."""
    reducer, spec, steps = (
        CodecReducer(codec),
        TensorSpec((256,), torch.bfloat16, (ParameterSpan((64, 4), 0),)),
        4,
    )

    def make(rank: int, step: int) -> Tensor:
        return torch.full((256,), 1.0 if step == 0 else 1 / 512, dtype=torch.bfloat16)

    (replica,) = run(reducer, 1, steps, spec=spec, make=make, weighted=False)
    assert all(result.mean.dtype == torch.bfloat16 for result in replica.results)
    kept = [tensor for tensor in tensors_in(replica.slot.state.local) if tensor.is_floating_point()]
    assert {tensor.dtype for tensor in kept} == {torch.float32}
