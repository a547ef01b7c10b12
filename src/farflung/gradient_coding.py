"""Gradient codes: which shares of a batch each replica computes, and how any n - s sums of them make the whole."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from farflung.errors import ConfigError
from farflung.options import whole_option
from farflung.seeding import generator

__all__ = ["CONSTRUCTIONS", "GradientCode", "gradient_code"]

CONSTRUCTIONS = ("auto", "cyclic", "fractional_repetition")
"""How a code is made; ``auto`` repeats shares where that is possible, and is cyclic elsewhere."""
_DRAWS = 16
_RESIDUAL = 1e-9


@dataclass(frozen=True, slots=True, eq=False)
class GradientCode:
    r"""A matrix :math:`B` of n replicas by n shares of which any n - s rows have all ones in their span.

    Replica i sends :math:`c_i = \sum_j B_{ij} g_j`; with :math:`a` from :meth:`decoding` the sum of the gradients of
    all shares is :math:`\sum_i a_i c_i`.

    Args:
      matrix: :math:`B`, (n, n), float64.
      shares: for each replica the shares that its row names, in the order in which it computes them.
      stragglers: s.
    """

    matrix: Tensor
    shares: tuple[tuple[int, ...], ...]
    stragglers: int

    @property
    def size(self) -> int:
        """n, replicas and shares."""
        return len(self.shares)

    @property
    def needed(self) -> int:
        """How many replicas are enough, n - s."""
        return self.size - self.stragglers

    @property
    def uncoded(self) -> bool:
        """Whether each replica computes its own share alone, and a mean is of those that came."""
        return len(self.shares[0]) <= self.stragglers

    def coefficients(self, rank: int) -> Tensor:
        """What a replica weighs each of its shares with, float64."""
        return self.matrix[rank, list(self.shares[rank])]

    def decoding(self, alive: Sequence[int]) -> Tensor:
        r"""The :math:`a` for these replicas, in their order, float64: of least norm with :math:`a^T B_A = 1^T`.

        Raises:
          ConfigError: they do not make the whole, or only with large errors of rounding.
        """
        rows = self.matrix[list(alive)]
        ones = torch.ones(self.size, 1, dtype=torch.float64)
        found: Tensor = torch.linalg.lstsq(rows.T, ones, driver="gelsd").solution.flatten()
        residual = float((found @ rows - 1).abs().max())
        if not residual <= _RESIDUAL:
            raise ConfigError(
                f"gradient_coding: ranks {', '.join(map(str, alive))} of {self.size} do not make the whole gradient "
                f"(off by {residual:.1g}): choose stragglers with which construction='fractional_repetition' is "
                "possible, or another --seed"
            )
        return found


@lru_cache(maxsize=64)
def gradient_code(construction: str, size: int, stragglers: int, seed: int) -> GradientCode:
    r"""A code for n replicas that does without any s of them; alike on all that ask with equal arguments.

    *Fractional repetition*, where s + 1 divides n: groups of s + 1 replicas compute the same s + 1 shares, each with
    weight 1, and nothing is lost to rounding. *Cyclic*: replica i computes the shares i to i + s, counted around. With
    :math:`H` of s rows and n columns from N(0, 1), the last of which makes the sum of each row 0, row i of :math:`B` is
    1 at i and :math:`-H_{i+1..i+s}^{-1} H_i` behind it, so that :math:`H B^T = 0`.

    Cyclic coefficients are of either sign and may be large, and so are errors of rounding: see
    :class:`farflung.schedules.GradientCoding`. Of 16 matrices :math:`H` that one is taken whose largest coefficient
    in :math:`B` is smallest, which is our choice.

    Args:
      construction: one of :data:`CONSTRUCTIONS`.
      size: n.
      stragglers: s.
      seed: of the run.

    Raises:
      ConfigError: there is no such code.

    ``"uncoded"`` is no code: each replica computes its own share, and a mean is of those that came; see
    :class:`farflung.schedules.BackupWorkers`.

    References: Tandon et al. 2017, fractional and cyclic repetition; coefficients as in the authors' code.
    """
    if construction not in (*CONSTRUCTIONS, "uncoded"):
        raise ConfigError(
            f"gradient_coding: construction {construction!r} must be one of {', '.join(CONSTRUCTIONS)}"
        )
    whole_option("gradient_coding", "stragglers", stragglers, 0)
    if stragglers >= size:
        raise ConfigError(f"stragglers {stragglers} must be below the number of replicas, which is {size}")
    if construction == "uncoded":
        own = tuple((rank,) for rank in range(size))
        return GradientCode(torch.eye(size, dtype=torch.float64), own, stragglers)
    repeats = size % (stragglers + 1) == 0
    if construction == "fractional_repetition" and not repeats:
        raise ConfigError(
            f"gradient_coding: construction 'fractional_repetition' needs replicas in groups of stragglers + 1 = "
            f"{stragglers + 1}, and there are {size}: use construction='cyclic'"
        )
    if repeats and construction != "cyclic":
        return _repeated(size, stragglers)
    return _cyclic(size, stragglers, generator(seed, "gradient coding"))


def _repeated(size: int, stragglers: int) -> GradientCode:
    group = stragglers + 1
    firsts = [rank - rank % group for rank in range(size)]
    shares = tuple(tuple(range(first, first + group)) for first in firsts)
    matrix = torch.zeros(size, size, dtype=torch.float64)
    for rank, named in enumerate(shares):
        matrix[rank, list(named)] = 1.0
    return GradientCode(matrix, shares, stragglers)


def _cyclic(size: int, stragglers: int, random: torch.Generator) -> GradientCode:
    shares = tuple(tuple((rank + behind) % size for behind in range(stragglers + 1)) for rank in range(size))
    drawn = [_cyclic_matrix(size, stragglers, shares, random) for _ in range(_DRAWS)]
    return GradientCode(min(drawn, key=lambda matrix: float(matrix.abs().max())), shares, stragglers)


def _cyclic_matrix(
    size: int, stragglers: int, shares: Sequence[Sequence[int]], random: torch.Generator
) -> Tensor:
    parity = torch.randn(stragglers, size, generator=random, dtype=torch.float64)
    parity[:, -1] = -parity[:, :-1].sum(dim=1)
    matrix = torch.eye(size, dtype=torch.float64)
    for rank, (own, *others) in enumerate(shares):
        matrix[rank, others] = -torch.linalg.solve(parity[:, others], parity[:, own])
    return matrix
