"""Codes: coefficients of coded blocks, their rank and redundancy, and the decoding of answers."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Generic, Protocol, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from farflung.noise import draw_uniform_array
from farflung.seeding import derive_seed

__all__ = [
    "CODES",
    "MAX_CONDITION",
    "MAX_LOSS_SETS",
    "MDS",
    "RLNC",
    "TOLERANCE",
    "Code",
    "Decoder",
    "Plan",
    "compute_rank",
    "compute_rank_deficits",
    "compute_redundancy",
    "draw_normal_row",
    "find_combination",
    "get_plan",
]

MAX_LOSS_SETS = 33_000
"""Maximum number of sets of losses to test: all pairs of 256 devices, for example."""
_SET_BATCH_SIZE = 4096
"""Number of sets tested in one call."""
TOLERANCE = 1e-6
"""Minimum share of a row's length outside a span for the row to add a dimension.

With a smaller share, a decoding matrix of both would have a condition above :data:`MAX_CONDITION`.
"""
MAX_CONDITION = 1 / TOLERANCE
"""Maximum condition of a decoding matrix; answers, accurate to 1e-16, decode to products accurate to 1e-10."""
_PLAN_CACHE_SIZE = 512
"""Number of cached decoding plans; the sets of answers of one round recur in the next."""
_MAX_RESIDUAL = 1e-9
"""Allowed error of a combination, relative to the target's largest coefficient."""
_ROUNDING_ERROR = 1e-12
"""Error of a coefficient whose terms cancel, relative to these."""

Index = TypeVar("Index", bound=Hashable)
"""Identifier of a block, or of its answer."""


class Code(Protocol):
    r"""Coefficients of the coded blocks :math:`\tilde X_j = \sum_k G_{jk} X_k`, as settings alone.

    Raw blocks are rows of their own, the unit vectors, so every code is systematic.
    """

    def draw_row(self, index: int, partitions: int, seed: int) -> Tensor:
        """Draws the coefficients of one coded block, as a pure function; never all zero.

        Args:
          index: Number of the coded block, from 0.
          partitions: Number of partitions, K.
          seed: Seed of the whole code.

        Returns:
          (partitions,), float64.
        """


def draw_normal_row(seed: int, *counters: int | npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    """Draws standard normal numbers from :func:`farflung.noise.draw_uniform_array` (Box & Muller 1958)."""
    radius = np.sqrt(-2 * np.log1p(-draw_uniform_array(seed, *counters, 0)))
    normal: npt.NDArray[np.float64] = radius * np.cos(2 * np.pi * draw_uniform_array(seed, *counters, 1))
    return normal


@dataclass(frozen=True, slots=True)
class MDS:
    """Standard normal coefficients of all partitions: any K of the blocks determine them, with probability 1.

    References: Lee et al. 2015 (arXiv 1512.02673), maximum distance separable codes.
    """

    def draw_row(self, index: int, partitions: int, seed: int) -> Tensor:
        return torch.from_numpy(draw_normal_row(derive_seed(seed, "mds"), index, np.arange(partitions)))


@dataclass(frozen=True, slots=True)
class RLNC:
    """Random linear network coding: half of the coefficients are zero, so a block needs half of the partitions.

    .. math:: G_{jk} = M_{jk} V_{jk}

    Values :math:`V_{jk}` are standard normal, and masks :math:`M_{jk}` balanced by design. Rows 2i and 2i+1
    have complementary masks, so each partition is in one of the two. For even K each row has exactly K/2 ones;
    for odd K one of the two has one more, drawn at random. Over rows 4i to 4i+3 a column has one of four types,
    by which row of either pair it is in. Columns 4c to 4c+3 have one type each, in an order drawn for these
    rows: two complementary types, then the other two.

    At (N, K) = (20, 16), answers in random order are decoded after 0.396 more than K (exact, by counting
    types); with independent masks after 0.93 (simulated). A row of one partition is never zero.

    References: Lin et al. 2019 (arXiv 1910.10283) propose RLNC for the data. The distribution is ours.
    """

    def draw_row(self, index: int, partitions: int, seed: int) -> Tensor:
        columns = np.arange(partitions)
        for attempt in itertools.count():
            mask = _build_mask(index, columns, derive_seed(seed, "rlnc", "types"))
            if attempt:  # for one partition the balanced mask may be zero
                mask = draw_uniform_array(derive_seed(seed, "rlnc", "mask", attempt), index, columns) < 0.5
            if mask.any():
                break
        values = draw_normal_row(derive_seed(seed, "rlnc", "values", attempt), index, columns)
        return torch.from_numpy(np.where(mask, values, 0.0))


def _build_mask(index: int, columns: npt.NDArray[np.int64], seed: int) -> npt.NDArray[np.bool_]:
    """Returns the mask of a row. A column's type is two bits, one for each pair of the group of rows."""
    group, pair, parity = index // 4, index // 2 % 2, index % 2
    order = (8 * draw_uniform_array(seed, group, columns // 4)).astype(np.int64)
    first = order % 4
    partner = first ^ np.where(order < 4, 1, 2)
    place = columns % 4
    types = np.where(place < 2, first, partner) ^ np.where(place % 2, 3, 0)
    mask: npt.NDArray[np.bool_] = (types >> pair) % 2 != parity
    return mask


CODES: dict[str, Callable[..., Code]] = {"mds": MDS, "rlnc": RLNC}
"""Codes by name; each can be built without arguments."""


# --- rank and redundancy ----------------------------------------------------------------------------------------------


class _Span:
    """Span of the rows so far, by an orthonormal basis; each row costs O(K rank).

    Args:
      partitions: Length of a row, K.
    """

    def __init__(self, partitions: int) -> None:
        self._basis = np.zeros((partitions, partitions))
        self.rank = 0

    def add(self, row: Tensor) -> bool:
        """Adds a row, (K,) and float64; returns True if the rank grew."""
        basis = self._basis[: self.rank]
        residual = row.numpy()
        length = math.sqrt(residual @ residual)
        if len(basis) == len(residual) or not length:
            return False
        for _ in range(2):  # Gram-Schmidt; the second pass removes rounding errors
            residual = residual - (basis @ residual) @ basis
        outside_norm = math.sqrt(residual @ residual)
        if not outside_norm > TOLERANCE * length:
            return False
        self._basis[self.rank] = residual / outside_norm
        self.rank += 1
        return True


def _normalize_rows(rows: Tensor) -> Tensor:
    """Scales rows to length 1, (..., K); zeros stay zeros."""
    return torch.nn.functional.normalize(rows, dim=-1, eps=torch.finfo(rows.dtype).tiny)


def _split_rows(rows: Mapping[Index, Tensor]) -> tuple[dict[int, Index], list[Index]]:
    """Separates the first raw block of each partition from all other blocks."""
    raw: dict[int, Index] = {}
    coded: list[Index] = []
    for index, row in rows.items():
        coefficients = row.numpy()
        (places,) = coefficients.nonzero()
        is_raw = len(places) == 1 and coefficients[places[0]] == 1
        if not is_raw or raw.setdefault(int(places[0]), index) != index:
            coded.append(index)
    return raw, coded


def find_combination(target: Tensor, rows: Mapping[Index, Tensor]) -> dict[Index, float] | None:
    """Finds coefficients with which blocks sum to a target row; returns None if they do not span it.

    Raw blocks contribute where they exist. For the other partitions, independent coded blocks are selected,
    those of few partitions first.

    Args:
      target: Coefficients of the sum, (K,), float64; a unit vector for the repair of a raw block.
      rows: Coefficients of each block, (K,); a partition is lost if none of them is its raw block.

    Returns:
      Nonzero coefficients, or ``None`` if the blocks do not span the target.
    """
    raw, coded = _split_rows(rows)
    non_raw = torch.tensor([k for k in range(len(target)) if k not in raw], dtype=torch.int64)
    span = _Span(len(non_raw))
    coded.sort(key=lambda index: int(rows[index].count_nonzero()))
    basis = [index for index in coded if span.add(rows[index][non_raw])]
    blocks = torch.stack([rows[index] for index in basis]) if basis else target.new_zeros(0, len(target))
    factors = target[non_raw] @ torch.linalg.pinv(blocks[:, non_raw], rtol=TOLERANCE)
    factors[factors.abs() <= _ROUNDING_ERROR * factors.abs().sum()] = 0
    terms = factors[:, None] * blocks
    residual = target - terms.sum(0)
    residual[residual.abs() <= _ROUNDING_ERROR * (target.abs() + terms.abs().sum(0))] = 0
    norm_bound = float((factors.abs() * blocks.norm(dim=1)).sum())
    if (
        float(residual[non_raw].abs().sum()) > _MAX_RESIDUAL * float(target.abs().amax())
        or norm_bound * TOLERANCE > target.norm()
    ):
        return None
    coefficients = {index: float(residual[k]) for k, index in sorted(raw.items())}
    coefficients |= zip(basis, factors.tolist(), strict=True)
    return {index: factor for index, factor in coefficients.items() if factor}


def compute_rank(matrix: Tensor) -> int:
    """Computes the rank of rows, (rows, partitions), as :class:`farflung.coded.Decoder` counts it."""
    span = _Span(matrix.shape[1])
    for row in matrix:
        span.add(row)
    return span.rank


def compute_redundancy(
    matrix: Tensor, holders: Sequence[Hashable] | None = None, *, max_losses: int | None = None
) -> int:
    """Computes the worst-case number of holders that may vanish so that the rest determines all partitions.

    The result is exact if that takes at most :data:`MAX_LOSS_SETS` sets: always with 20 rows of which 4 are
    coded, up to 2 with 256 rows. Beyond, it is a lower bound: all sets of that many losses have been tested.

    Args:
      matrix: Coefficients; see :func:`compute_rank_deficits`, also for the other arguments.
      holders: Holder of each row; ``None`` gives each row its own.
      max_losses: Maximum number of losses to test; ``None`` tests those of all holders.

    Returns:
      At least 0, or -1 if the rows as they are do not determine all partitions.
    """
    safe_losses = itertools.takewhile(
        lambda missing: not missing, compute_rank_deficits(matrix, holders, max_losses=max_losses)
    )
    return sum(1 for _ in safe_losses) - 1


def compute_rank_deficits(
    matrix: Tensor,
    holders: Sequence[Hashable] | None = None,
    *,
    max_losses: int | None = None,
) -> Iterator[int]:
    """Yields the missing rank after losses of no holder, one, two, and so on, summed over all sets.

    At most :data:`MAX_LOSS_SETS` sets are tested; a number of losses that would exceed them is not begun. A set
    costs a matrix of the coded rows by those partitions whose raw rows are lost: all other raw rows are known.

    Args:
      matrix: Coefficients, (rows, partitions), float64.
      holders: Holder of each row; ``None`` gives each row its own.
      max_losses: Maximum number of losses to test; ``None`` tests those of all holders.
    """
    holders = range(len(matrix)) if holders is None else holders
    raw, coded = _split_rows(dict(enumerate(matrix)))
    non_raw = [k for k in range(matrix.shape[1]) if k not in raw]
    raw_of: dict[Hashable, list[int]] = {holder: [] for holder in holders}
    for k, place in raw.items():
        raw_of[holders[place]].append(k)
    numbers = {holder: number for number, holder in enumerate(raw_of)}
    held_by = torch.tensor([numbers[holders[place]] for place in coded], dtype=torch.int64)
    rows, num_sets = _normalize_rows(matrix[coded]), -1  # not counting the empty set
    for losses in range(1 + (len(raw_of) if max_losses is None else min(max_losses, len(raw_of)))):
        num_sets += math.comb(len(raw_of), losses)
        if num_sets > MAX_LOSS_SETS:
            return
        # Sets share a tensor only if they lose equally many raw rows.
        by_width: dict[int, list[tuple[list[int], list[int]]]] = {}
        for lost_holders in itertools.combinations(raw_of, losses):
            columns = [*non_raw, *itertools.chain.from_iterable(raw_of[holder] for holder in lost_holders)]
            lost = [numbers[holder] for holder in lost_holders]
            by_width.setdefault(len(columns), []).append((lost, columns))
        yield sum(
            _sum_rank_deficits(rows, held_by, sets[begin : begin + _SET_BATCH_SIZE])
            for sets in by_width.values()
            for begin in range(0, len(sets), _SET_BATCH_SIZE)
        )


def _sum_rank_deficits(rows: Tensor, held_by: Tensor, sets: Sequence[tuple[list[int], list[int]]]) -> int:
    """Sums the missing ranks of the remaining holders' coded rows, in the columns that no raw row determines.

    Args:
      rows: Coded rows, (coded, partitions), each of length 1.
      held_by: Number of each row's holder, (coded,).
      sets: Numbers of the lost holders, and the columns, equally many in each set.
    """
    lost, columns = (torch.tensor(numbers, dtype=torch.int64) for numbers in zip(*sets, strict=True))
    is_remaining = (held_by[:, None] != lost[:, None]).all(dim=2)
    blocks = rows[:, columns].movedim(0, 1) * is_remaining[:, :, None]  # (sets, coded, columns)
    return columns.numel() - int((torch.linalg.svdvals(blocks) > TOLERANCE).sum())


# --- decoding ---------------------------------------------------------------------------------------------------------


class Plan(Generic[Index]):
    """One factorisation for all answers of one set of blocks.

    Raw answers are the partitions themselves. With M the partitions that are missing and H the others, the
    coded answers :math:`Y = G X` give

    .. math:: G_M X_M = Y - G_H X_H

    which is solved by QR, in the sense of least squares, with each row scaled to length 1 first. Equal sets of
    answers give equal bits, in any order of arrival.

    Args:
      rows: Coefficients of each answer, (K,); together of rank K.
    """

    def __init__(self, rows: Mapping[Index, Tensor]) -> None:
        self.indices = tuple(rows)
        """Identifiers of the blocks whose answers are used."""
        self._raw, self._coded = _split_rows(rows)
        self._coded.sort(key=lambda index: rows[index].tolist())
        matrix = torch.stack(list(rows.values()))
        self._partitions = matrix.shape[1]
        self.missing_partitions = tuple(k for k in range(self._partitions) if k not in self._raw)
        values = torch.linalg.svdvals(_normalize_rows(matrix))
        self.condition = float(values[0] / values[-1])
        """Condition of the matrix of all rows, each scaled to length 1; bounds the growth of errors."""
        if self.missing_partitions:
            by_row = torch.stack([rows[index] for index in self._coded])
            self._row_norms = by_row.norm(dim=1)
            by_row = by_row / self._row_norms[:, None]
            self._raw_partitions = [k for k in sorted(self._raw) if by_row[:, k].any()]
            self._raw_coefficients = by_row[:, self._raw_partitions]
            self._q, self._r = torch.linalg.qr(by_row[:, list(self.missing_partitions)])

    def apply(self, answers: Mapping[Index, Tensor]) -> list[Tensor]:
        """Solves for the K tensors that the answers combine, in the order of the partitions.

        Partitions may have different numbers of rows. A coded block is as high as the highest partition, with
        the others padded by zeros below. A raw answer may have its partition's own height instead.

        Args:
          answers: Answer of each block, float64: (b, c) of a coded one, (at most b, c) of a raw one.

        Returns:
          Raw answers unchanged, and (b, c) for each missing partition.
        """
        solutions = {k: answers[index] for k, index in self._raw.items()}
        if self.missing_partitions:
            coded_answers = torch.stack([answers[index] for index in self._coded])
            rhs = coded_answers.reshape(len(coded_answers), -1) / self._row_norms[:, None]
            if self._raw_partitions:
                raw_answers = coded_answers.new_zeros(len(self._raw_partitions), *coded_answers.shape[1:])
                for row, k in zip(raw_answers, self._raw_partitions, strict=True):
                    answer = answers[self._raw[k]]
                    row[: len(answer)] = answer
                rhs -= self._raw_coefficients @ raw_answers.reshape(len(raw_answers), -1)
            solution = torch.linalg.solve_triangular(self._r, self._q.T @ rhs, upper=True)
            solutions |= zip(
                self.missing_partitions, solution.reshape(-1, *coded_answers.shape[1:]), strict=True
            )
        return [solutions[k] for k in range(self._partitions)]


@lru_cache(_PLAN_CACHE_SIZE)
def get_plan(rows: tuple[tuple[Any, bytes], ...]) -> Plan[Any]:
    """Returns the cached plan of rows, given as bytes in the order of their blocks."""
    return Plan({index: torch.frombuffer(bytearray(row), dtype=torch.float64) for index, row in rows})


class Decoder(Generic[Index]):
    """Collects answers until they determine all partitions.

    The rank is numeric. A row counts as dependent if at most :data:`TOLERANCE` of its length lies outside the
    span of the earlier rows, since its condition would be too large. If answers of full rank are still too
    ill-conditioned, there is no plan. The decoder then takes further answers, and all of them are used, by
    least squares.

    Args:
      partitions: Number of partitions, K.
    """

    def __init__(self, partitions: int) -> None:
        self._partitions = partitions
        self._rows: dict[Index, Tensor] = {}
        self._span = _Span(partitions)

    @property
    def rank(self) -> int:
        return self._span.rank

    def add(self, index: Index, row: Tensor) -> bool:
        """Adds an answer; returns True if the rank grew. A raw one is used in any case, as it needs no solving.

        Args:
          index: Identifier of its block; once each.
          row: Coefficients, (partitions,), finite and float64.
        """
        self._rows[index] = row
        return self._span.add(row)

    def find_plan(self) -> Plan[Index] | None:
        """Returns a plan for the answers, with a condition of at most :data:`MAX_CONDITION`, if there is one.

        It uses the raw answers and the first coded ones that they need, or all if these are ill-conditioned.
        """
        if self.rank < self._partitions:
            return None
        span, (raw, _) = _Span(self._partitions), _split_rows(self._rows)
        ordered_rows = {index: self._rows[index] for index in raw.values()} | self._rows
        minimal_rows = {index: row for index, row in ordered_rows.items() if span.add(row)}
        for rows in (minimal_rows, self._rows):
            if len(rows) >= self._partitions:
                plan = get_plan(tuple((key, rows[key].numpy().tobytes()) for key in sorted(rows)))  # type: ignore[type-var]
                if plan.condition <= MAX_CONDITION:
                    return plan
        return None
