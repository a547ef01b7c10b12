"""What a solver is, and the part of its state that whoever drives it looks at."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Protocol, Self, TypeVar

from torch import Tensor

from farflung.coded.problem import Problem
from farflung.types import State

__all__ = ["Iterate", "Solver"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Iterate:
    """Where a solver is: a value made of tensors, numbers and flags alone.

    A run that goes on from :meth:`tree` takes the same steps, to the bit.

    Args:
      weights: the best so far, (rows, outputs); see :class:`~farflung.coded.problem.Problem`.
      objective: at the weights.
      gap: what the stopping rule looks at, relative to the objective; each solver says what it is.
      iterations: steps that were taken.
      converged: whether the gap is as small as asked.
    """

    weights: Tensor
    objective: float
    gap: float
    iterations: int
    converged: bool

    def tree(self) -> State:
        """As a tree that :func:`farflung.replica.save_tree` writes."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    @classmethod
    def from_tree(cls, tree: State) -> Self:
        """The state that :meth:`tree` was made of."""
        return cls(**{field.name: tree[field.name] for field in fields(cls)})


S = TypeVar("S", bound=Iterate)


class Solver(Protocol[S]):
    """Frozen settings of a way to minimise an objective; its state is passed in and handed back.

    A caller loops ``state = await solver.step(problem, state)`` until ``state.converged``.
    """

    async def init(self, problem: Problem, weights: Tensor | None = None) -> S:
        """The state before the first step.

        Args:
          problem: to be solved.
          weights: to start from; zeros when not given.
        """
        ...

    async def step(self, problem: Problem, state: S) -> S:
        """One iterate on."""
        ...

    def restored(self, tree: State) -> S:
        """The state that its :meth:`Iterate.tree` was made of."""
        ...
