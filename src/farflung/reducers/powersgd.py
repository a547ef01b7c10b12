"""Low-rank gradients by one step of power iteration."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor
from typing_extensions import override

from farflung.codecs.base import floating
from farflung.codecs.blocks import working_dtype
from farflung.codecs.stochastic import generator_on
from farflung.options import number_option, whole_option
from farflung.reducers.aggregation import Exchange
from farflung.reducers.base import (
    check_rounds,
    divisor,
    method_of_rounds,
    numerator,
    reduced,
    rounded,
    side_of,
)
from farflung.types import (
    Channel,
    CodecState,
    CodingCost,
    Contribution,
    Placed,
    Reduced,
    Reducer,
    Seeds,
    State,
    StateSlot,
    TensorSpec,
)

__all__ = ["PowerSGD"]


@dataclass(frozen=True, slots=True)
class PowerSGD(Reducer):
    r"""Sends each gradient matrix as a product of two thin ones.

    With M a replica's gradient (its first dimension the rows), times its weight, plus its residual:

    .. math::
        P \leftarrow \mathrm{orthonormal}\Big(\sum_i M_i Q\Big), \quad
        Q \leftarrow \sum_i M_i^\top P \Big/ \sum_i w_i, \quad
        \hat M = P Q^\top, \quad e_i \leftarrow M_i - w_i \hat M

    Two all-reduces, of ``rank * (n + m)`` numbers in all for a matrix of n by m. Q is kept for the next step (warm
    start). Vectors and scalars, and matrices too small to gain by it, are summed dense beside P. The momentum is the
    optimizer's, after the aggregation.

    The residual is known only when the result is. It is taken out of the state when an exchange begins and what
    becomes of it is added when the result is merged, so exchanges that overlap never send the same residual twice.

    Matrices of one shape are worked on together. A column of P that is nothing but rounding is dropped, and where Q
    has no direction, or none that is finite, it gets a random one; with the authors' code such a column stays zero.
    What is not finite in a residual is forgotten. All ranks orthonormalise by themselves, which gives the same bits
    on the same build of torch and the same kind of processor.

    Args:
      rank: r, columns of P and Q; ``None``: the root of half a matrix's smaller side, at least 2.
      min_ratio: a matrix is compressed if that makes it at least this many times smaller.
      warm_start: whether to keep Q; otherwise it is random at every step.
      error_feedback: whether to keep residuals.
      dense_steps: so many steps at the start are summed dense; ``None``: a tenth of the run, at least the warm-up of
        its learning rate, and none where the length is not known.
      collective: a name in :data:`farflung.comm.COLLECTIVES`.

    Raises:
      ConfigError: an option out of its range.
      UnknownName: no such collective.
      Unsupported: collective ``native``, which cannot tell the rounds of several buckets apart.

    References: Vogels et al. 2019, Alg. 1 and 2, with the residual of the authors' code; ``min_ratio`` is theirs too.
    Rank and dense steps of ``None`` are our choice: a small transformer needs both to come near dense gradients.
    """

    repeatable: ClassVar[bool] = True
    teaches: ClassVar[bool] = True

    rank: int | None = None
    min_ratio: float = 2.0
    warm_start: bool = True
    error_feedback: bool = True
    dense_steps: int | None = None
    collective: str = "direct"
    method: str = field(init=False, repr=False, compare=False)
    """What the costs of its arithmetic are called by."""

    def __post_init__(self) -> None:
        if self.rank is not None:
            whole_option("powersgd", "rank", self.rank, 1)
        if self.dense_steps is not None:
            whole_option("powersgd", "dense_steps", self.dense_steps, 0)
        number_option("powersgd", "min_ratio", self.min_ratio, 1)
        check_rounds("powersgd", self.collective)
        settled = self if self.dense_steps is None else replace(self, dense_steps=None)
        object.__setattr__(self, "method", method_of_rounds("powersgd", settled))

    @override
    def for_run(self, steps: int, warmup: int) -> PowerSGD:
        return self if self.dense_steps is not None else replace(self, dense_steps=max(steps // 10, warmup))

    @override
    def init(self, spec: TensorSpec, seeds: Seeds) -> CodecState:
        """Random directions, equal on all replicas, and no residual.

        Raises:
          Unsupported: the tensor is not floating.
        """
        floating("powersgd", spec)
        dense, groups = self._layout(spec)
        dtype = working_dtype(spec.dtype)
        q = {
            shape: self._random(shape, len(starts), dtype, generator_on(_CPU, seeds.shared, shape))
            for shape, starts in groups.items()
        }
        layout = {"dense": dense, "groups": groups}
        return CodecState({"layout": layout, "seed": seeds.shared, "q": q}, {"residual": {}})

    @override
    def summed_nbytes(self, spec: TensorSpec, size: int) -> Sequence[int]:
        """P with what is dense, and Q, after the dense steps."""
        dense, groups = self._layout(spec)
        first, second = sum(numel for _, numel in dense), 0
        for shape, starts in groups.items():
            rows, columns = _sides(shape)
            first += len(starts) * rows * self._rank(rows, columns)
            second += len(starts) * columns * self._rank(rows, columns)
        itemsize = working_dtype(spec.dtype).itemsize
        return first * itemsize, second * itemsize

    @override
    async def reduce(self, channel: Channel, slot: StateSlot, own: Contribution, *, step: int) -> Reduced:
        """P with what is dense, then Q."""
        exchange = Exchange(channel, self.collective, side_of(own), step, own.tensor.dtype)
        tensor = numerator(channel, own)
        if step < (self.dense_steps or 0):
            return reduced(channel, *await exchange.sum_dense(tensor), own.tensor.dtype)
        cost = partial(CodingCost, method=self.method, numel=tensor.numel())
        state = slot.state
        dense, matrices, p = channel.compute(cost("encode"), partial(self._projected, state, tensor, step))
        slot.state = CodecState(state.shared, {"residual": {}})
        flat, side = await exchange.sum(_flat([*dense, *p], tensor))
        by = divisor(side)
        p, q = channel.compute(cost("orthonormalize"), partial(_turned, dense, matrices, p, flat, by))
        flat, _ = await exchange.sum(_flat(q, tensor))
        new_q, left_over = channel.compute(
            cost("decode"), partial(_restored, state, tensor, matrices, p, q, flat, by, own.weight)
        )

        taught: State = {"q": new_q} if self.warm_start else {}

        def learn(now: CodecState) -> CodecState:
            shared = {**now.shared, **taught}
            if not self.error_feedback:
                return CodecState(shared, now.local)
            before = now.local["residual"]
            residual = {
                shape: before[shape] + kept if shape in before else kept for shape, kept in left_over.items()
            }
            return CodecState(shared, {"residual": residual})

        def learned(now: CodecState) -> CodecState:
            return channel.compute(cost("learn"), partial(learn, now))

        mean = rounded(channel, tensor, own.tensor.dtype)
        return Reduced(mean, float(side[0]), side[1:], learned, taught=taught)

    def _projected(
        self, state: CodecState, tensor: Tensor, step: int
    ) -> tuple[list[Tensor], dict[str, Tensor], list[Tensor]]:
        """What is dense, the matrices, and P of each shape."""
        layout, matrices = state.shared["layout"], self._matrices(state, tensor)
        q = {
            shape: self._usable(state, shape, q, tensor.device, step)
            for shape, q in state.shared["q"].items()
        }
        dense = [tensor[start : start + numel] for start, numel in layout["dense"]]
        return dense, matrices, [matrices[shape] @ q[shape] for shape in matrices]

    def _layout(self, spec: TensorSpec) -> tuple[list[list[int]], dict[str, list[int]]]:
        """Start and length of what stays dense; starts of the matrices of each shape."""
        dense: list[list[int]] = []
        groups: dict[str, list[int]] = {}
        for part in spec.parts or (Placed(spec.shape, 0),):
            rows, columns = (part.shape[0], part.numel // max(part.shape[0], 1)) if part.shape else (1, 1)
            if self._pays(part, rows, columns):
                groups.setdefault(f"{rows}x{columns}", []).append(part.start)
            else:
                dense.append([part.start, part.numel])
        return dense, groups

    def _pays(self, part: Placed, rows: int, columns: int) -> bool:
        sent = self._rank(rows, columns) * (rows + columns)
        return len(part.shape) > 1 and 0 < sent * self.min_ratio <= rows * columns

    def _rank(self, rows: int, columns: int) -> int:
        shorter = min(rows, columns)
        return min(shorter, max(2, math.isqrt(shorter // 2)) if self.rank is None else self.rank)

    def _random(self, shape: str, count: int, dtype: torch.dtype, noise: torch.Generator) -> Tensor:
        rows, columns = _sides(shape)
        size = (count, columns, self._rank(rows, columns))
        return torch.randn(size, generator=noise, dtype=dtype, device=noise.device)

    def _matrices(self, state: CodecState, tensor: Tensor) -> dict[str, Tensor]:
        """Gradients and residuals, shape ``(matrices, rows, columns)`` for each shape there is."""
        residual: State = state.local["residual"]
        found = {}
        for shape, starts in sorted(state.shared["layout"]["groups"].items()):
            rows, columns = _sides(shape)
            numel = rows * columns
            stacked = torch.stack([tensor[start : start + numel].view(rows, columns) for start in starts])
            stacked = stacked.to(working_dtype(tensor.dtype))
            found[shape] = stacked.add_(residual[shape].to(tensor.device)) if shape in residual else stacked
        return found

    def _usable(self, state: CodecState, shape: str, q: Tensor, device: torch.device, step: int) -> Tensor:
        """Q on the device, with random columns where it has none."""
        noise = generator_on(device, state.shared["seed"], shape, step)
        fresh = self._random(shape, len(q), q.dtype, noise)
        if not self.warm_start:
            return fresh
        q = q.to(device)
        size = q.norm(dim=1, keepdim=True)
        return torch.where(size.isfinite() & (size > 0), q, fresh)


_CPU = torch.device("cpu")


def _sides(shape: str) -> tuple[int, int]:
    rows, _, columns = shape.partition("x")
    return int(rows), int(columns)


def _flat(tensors: Iterable[Tensor], like: Tensor) -> Tensor:
    """One flat tensor of all, in the dtype to compute in."""
    parts = [tensor.reshape(-1).to(working_dtype(like.dtype)) for tensor in tensors]
    return torch.cat(parts) if parts else like.new_empty(0, dtype=working_dtype(like.dtype))


def _like(tensors: Sequence[Tensor], flat: Tensor) -> list[Tensor]:
    """``flat`` cut into tensors of these shapes."""
    pieces = flat.split([tensor.numel() for tensor in tensors]) if tensors else ()
    return [piece.view(tensor.shape) for piece, tensor in zip(pieces, tensors, strict=True)]


def _turned(
    dense: Sequence[Tensor], matrices: Mapping[str, Tensor], p: Sequence[Tensor], flat: Tensor, by: float
) -> tuple[list[Tensor], list[Tensor]]:
    """P made orthonormal and the own Q of each shape, from the sums of the first round; what is dense is there then."""
    sums = _like([*dense, *p], flat)
    for part, total in zip(dense, sums, strict=False):
        part.copy_(total).div_(by)
    left = [_orthonormal(total) for total in sums[len(dense) :]]
    return left, [m.mT @ one for m, one in zip(matrices.values(), left, strict=True)]


def _restored(
    state: CodecState,
    tensor: Tensor,
    matrices: Mapping[str, Tensor],
    p: Sequence[Tensor],
    q: Sequence[Tensor],
    flat: Tensor,
    by: float,
    weight: float,
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Writes the means of the matrices into ``tensor``; the mean Q of each shape, and what was left out."""
    groups = state.shared["layout"]["groups"]
    q_mean = {shape: total / by for shape, total in zip(matrices, _like(q, flat), strict=True)}
    left_over: dict[str, Tensor] = {}
    for (shape, right), left in zip(q_mean.items(), p, strict=True):
        mean = left @ right.mT
        for row, start in zip(mean, groups[shape], strict=True):
            tensor[start : start + row.numel()] = row.view(-1)
        kept = matrices[shape].sub_(mean, alpha=weight)
        left_over[shape] = kept.nan_to_num_(0.0, 0.0, 0.0)
    return q_mean, left_over


def _orthonormal(matrices: Tensor) -> Tensor:
    """Gram-Schmidt on the columns of each matrix, each projection done twice; columns that depend become zero."""
    columns: list[Tensor] = []
    for column in matrices.unbind(dim=2):
        before = column.norm(dim=1, keepdim=True)
        for _ in range(2):
            for other in columns:
                column = column - (other * column).sum(dim=1, keepdim=True) * other  # noqa: PLW2901
        size = column.norm(dim=1, keepdim=True)
        depends = size <= 1e-6 * before
        columns.append(torch.where(depends, 0.0, column / size))
    return torch.stack(columns, dim=2)
