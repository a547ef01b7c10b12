"""Low-rank compression of gradients by one step of power iteration."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor
from typing_extensions import override

from farflung.codecs.base import check_floating
from farflung.codecs.blocks import get_working_dtype
from farflung.codecs.stochastic import create_device_generator
from farflung.options import check_integer, check_number
from farflung.reducers.aggregation import CodecExchange
from farflung.reducers.base import (
    build_result,
    cast_mean,
    check_rounds,
    compute_numerator,
    format_reducer,
    get_divisor,
    pack_metadata,
)
from farflung.types import (
    Channel,
    CodecState,
    Contribution,
    ParameterSpan,
    Reducer,
    ReduceResult,
    Seeds,
    State,
    StateSlot,
    TensorSpec,
)

__all__ = ["PowerSGD"]


@dataclass(frozen=True, slots=True)
class PowerSGD(Reducer):
    r"""Reducer that sends each gradient matrix as a product of two thin matrices.

    With M the gradient of a replica (its first dimension the rows), times its weight, plus its residual:

    .. math::
        P \leftarrow \mathrm{orthonormal}\Big(\sum_i M_i Q\Big), \quad Q \leftarrow \sum_i M_i^\top P \Big/ \sum_i w_i,
        \quad \hat M = P Q^\top, \quad e_i \leftarrow M_i - w_i \hat M

    Two all-reduces send ``rank * (n + m)`` numbers for a matrix of n by m; other tensors are summed dense with P.

    Args:
      rank: r, number of columns of P and Q; None for the root of half a matrix's smaller side, at least 2.
      min_ratio: Smallest compression ratio at which a matrix is compressed.
      warm_start: If True, keep Q; otherwise it is random at every step.
      error_feedback: If True, keep residuals.
      dense_steps: Number of steps at the start that are summed dense; None for a tenth of the run, at least its
        learning rate warm-up, and zero if the length is unknown.
      collective: Name in :data:`farflung.comm.COLLECTIVES`.

    Raises:
      ConfigError: An option is out of range.
      UnknownName: There is no such collective.
      Unsupported: Collective ``native``, which cannot tell the rounds of several buckets apart.

    References: Vogels et al. 2019, Alg. 1 and 2. Rank and dense steps of None are our choice.
    """

    is_repeatable: ClassVar[bool] = True
    has_shared_delta: ClassVar[bool] = True
    compresses_matrices: ClassVar[bool] = True

    rank: int | None = None
    min_ratio: float = 2.0
    warm_start: bool = True
    error_feedback: bool = True
    dense_steps: int | None = None
    collective: str = "direct"

    def __post_init__(self) -> None:
        if self.rank is not None:
            check_integer("powersgd", "rank", self.rank, 1)
        if self.dense_steps is not None:
            check_integer("powersgd", "dense_steps", self.dense_steps, 0)
        check_number("powersgd", "min_ratio", self.min_ratio, 1)
        check_rounds("powersgd", self.collective)

    @property
    def method(self) -> str:
        """Name of the arithmetic for coding costs."""
        return format_reducer(self, dense_steps=None)

    @override
    def with_run_length(self, steps: int, rate_warmup_steps: int) -> PowerSGD:
        return (
            self
            if self.dense_steps is not None
            else replace(self, dense_steps=max(steps // 10, rate_warmup_steps))
        )

    @property
    @override
    def warmup_steps(self) -> int:
        return self.dense_steps or 0

    @override
    def scale_warmup(self, share: float) -> PowerSGD:
        return replace(self, dense_steps=round(share * self.dense_steps)) if self.dense_steps else self

    @override
    def init(self, spec: TensorSpec, seeds: Seeds) -> CodecState:
        """Returns a state with random directions, equal on all replicas, and no residual.

        Raises:
          Unsupported: The tensor is not floating.
        """
        check_floating("powersgd", spec)
        dense, groups = self._plan_layout(spec)
        dtype = get_working_dtype(spec.dtype)
        q = {
            shape: self._draw_q(shape, len(starts), dtype, create_device_generator(_CPU, seeds.shared, shape))
            for shape, starts in groups.items()
        }
        layout = {"dense": dense, "groups": groups}
        return CodecState({"layout": layout, "seed": seeds.shared, "q": q}, {"residual": {}})

    @override
    def list_summed_nbytes(self, spec: TensorSpec, size: int) -> Sequence[int]:
        """Returns the bytes of P with the dense parts, and of Q, after the dense steps."""
        dense, groups = self._plan_layout(spec)
        first, second = sum(numel for _, numel in dense), 0
        for shape, starts in groups.items():
            rows, columns, rank = self._parse_shape(shape)
            first += len(starts) * rows * rank
            second += len(starts) * columns * rank
        itemsize = get_working_dtype(spec.dtype).itemsize
        return first * itemsize, second * itemsize

    @override
    async def reduce(
        self, channel: Channel, slot: StateSlot, contribution: Contribution, *, step: int
    ) -> ReduceResult:
        exchange = CodecExchange(
            channel, self.collective, pack_metadata(contribution), step, contribution.tensor.dtype
        )
        tensor = compute_numerator(channel, contribution)
        if step < (self.dense_steps or 0):
            return build_result(channel, *await exchange.sum_dense(tensor), contribution.tensor.dtype)
        method, state, layout = self.method, slot.state, slot.state.shared["layout"]

        channel.charge("encode", tensor.numel(), method)
        matrices = self._build_matrices(state, tensor)
        dense_parts = [tensor[start : start + numel] for start, numel in layout["dense"]]
        local_p = []
        for shape, matrix in matrices.items():
            q = self._prepare_q(state, shape, state.shared["q"][shape], tensor.device, step)
            local_p.append(matrix @ q)
        slot.state = CodecState(state.shared, {"residual": {}})
        tensors = [*dense_parts, *local_p]
        first, metadata = await exchange.sum(_flatten(tensors, tensor))
        weight_sum = get_divisor(metadata)

        channel.charge("orthonormalize", tensor.numel(), method)
        sums = _split_like(tensors, first)
        for part, total in zip(dense_parts, sums, strict=False):
            part.copy_(total).div_(weight_sum)
        p = [_orthonormalize(total) for total in sums[len(dense_parts) :]]
        local_q = [matrix.mT @ left for matrix, left in zip(matrices.values(), p, strict=True)]
        second, _ = await exchange.sum(_flatten(local_q, tensor))

        channel.charge("decode", tensor.numel(), method)
        mean_q, residuals = {}, {}
        for shape, left, total in zip(matrices, p, _split_like(local_q, second), strict=True):
            mean_q[shape] = total / weight_sum
            product = left @ mean_q[shape].mT
            for row, start in zip(product, layout["groups"][shape], strict=True):
                tensor[start : start + row.numel()] = row.view(-1)
            residuals[shape] = (
                matrices[shape].sub_(product, alpha=contribution.weight).nan_to_num_(0.0, 0.0, 0.0)
            )
        shared_delta: State = {"q": mean_q} if self.warm_start else {}

        def learn(state: CodecState) -> CodecState:
            channel.charge("learn", tensor.numel(), method)
            residual = state.local["residual"]
            if self.error_feedback:
                residual = {
                    shape: residual[shape] + error if shape in residual else error
                    for shape, error in residuals.items()
                }
            return CodecState({**state.shared, **shared_delta}, {"residual": residual})

        mean = cast_mean(channel, tensor, contribution.tensor.dtype)
        return ReduceResult(mean, float(metadata[0]), metadata[1:], learn, shared_delta=shared_delta)

    def _plan_layout(self, spec: TensorSpec) -> tuple[list[list[int]], dict[str, list[int]]]:
        """Returns start and length of the dense parts, and the starts of the matrices of each shape."""
        dense: list[list[int]] = []
        groups: dict[str, list[int]] = {}
        for part in spec.spans or (ParameterSpan(spec.shape, 0),):
            rows, columns = (part.shape[0], part.numel // max(part.shape[0], 1)) if part.shape else (1, 1)
            sent = self._choose_rank(rows, columns) * (rows + columns)
            if len(part.shape) > 1 and 0 < sent * self.min_ratio <= rows * columns:
                groups.setdefault(f"{rows}x{columns}", []).append(part.start)
            else:
                dense.append([part.start, part.numel])
        return dense, groups

    def _choose_rank(self, rows: int, columns: int) -> int:
        shorter = min(rows, columns)
        return min(shorter, max(2, math.isqrt(shorter // 2)) if self.rank is None else self.rank)

    def _parse_shape(self, shape: str) -> tuple[int, int, int]:
        """Returns rows and columns of a matrix, and the rank that it is sent with."""
        rows, columns = map(int, shape.split("x"))
        return rows, columns, self._choose_rank(rows, columns)

    def _draw_q(self, shape: str, count: int, dtype: torch.dtype, noise: torch.Generator) -> Tensor:
        _, columns, rank = self._parse_shape(shape)
        return torch.randn((count, columns, rank), generator=noise, dtype=dtype, device=noise.device)

    def _build_matrices(self, state: CodecState, tensor: Tensor) -> dict[str, Tensor]:
        """Returns gradients plus residuals of each shape, as tensors of ``(matrices, rows, columns)``."""
        residual: State = state.local["residual"]
        matrices = {}
        for shape, starts in sorted(state.shared["layout"]["groups"].items()):
            rows, columns, _ = self._parse_shape(shape)
            stacked = torch.stack(
                [tensor[start : start + rows * columns].view(rows, columns) for start in starts]
            )
            matrices[shape] = stacked.to(get_working_dtype(tensor.dtype))
            if shape in residual:
                matrices[shape] += residual[shape].to(tensor.device)
        return matrices

    def _prepare_q(self, state: CodecState, shape: str, q: Tensor, device: torch.device, step: int) -> Tensor:
        """Returns Q on the device: a random one without warm start, else with unusable columns replaced."""
        noise = create_device_generator(device, state.shared["seed"], shape, step)
        fresh = self._draw_q(shape, len(q), q.dtype, noise)
        if not self.warm_start:
            return fresh
        q = q.to(device)
        size = q.norm(dim=1, keepdim=True)
        return torch.where(size.isfinite() & (size > 0), q, fresh)


_CPU = torch.device("cpu")


def _flatten(tensors: Sequence[Tensor], reference: Tensor) -> Tensor:
    """Concatenates tensors into a flat one, in the dtype of computations."""
    dtype = get_working_dtype(reference.dtype)
    return torch.cat(
        [reference.new_empty(0, dtype=dtype), *(tensor.reshape(-1).to(dtype) for tensor in tensors)]
    )


def _split_like(tensors: Sequence[Tensor], flat: Tensor) -> list[Tensor]:
    """Splits ``flat`` into tensors of the given shapes."""
    pieces = flat.split([tensor.numel() for tensor in tensors]) if tensors else ()
    return [piece.view(tensor.shape) for piece, tensor in zip(pieces, tensors, strict=True)]


def _orthonormalize(matrices: Tensor) -> Tensor:
    """Orthonormalizes the columns of each matrix by Gram-Schmidt, twice each; dependent columns become zero."""
    columns: list[Tensor] = []
    for column in matrices.unbind(dim=2):
        norm_before = column.norm(dim=1, keepdim=True)
        for _ in range(2):
            for previous in columns:
                column = column - (previous * column).sum(dim=1, keepdim=True) * previous  # noqa: PLW2901
        size = column.norm(dim=1, keepdim=True)
        is_dependent = size <= 1e-6 * norm_before
        columns.append(torch.where(is_dependent, 0.0, column / size))
    return torch.stack(columns, dim=2)
