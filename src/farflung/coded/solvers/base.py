"""The protocol of solvers, their state, and the loop around their steps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Protocol, Self, TypeVar

from torch import Tensor

from farflung.coded.problem import Problem
from farflung.types import State

__all__ = ["Iterate", "Solver", "solve"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Iterate:
    """State of a solver, made of tensors, numbers and flags alone.

    A run that goes on from :meth:`tree` takes bit-identical steps.

    Args:
      weights: (rows, outputs); see :class:`~farflung.coded.problem.Problem`.
      objective: at the weights.
      gap: the figure of the stopping rule, relative to the objective; each solver defines its own.
      iterations: steps that were taken.
      converged: whether the gap is at most the tolerance.
    """

    weights: Tensor
    objective: float
    gap: float
    iterations: int
    converged: bool

    def tree(self) -> State:
        """Gives the state as a tree that :func:`farflung.replica.save_tree` writes."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    @classmethod
    def from_tree(cls, tree: State) -> Self:
        """Reads the result of :meth:`tree`.

        Raises:
          KeyError: it is the state of another solver.
        """
        return cls(**{field.name: tree[field.name] for field in fields(cls)})


S = TypeVar("S", bound=Iterate)


class Solver(Protocol[S]):
    """Frozen settings of a way to minimise an objective; the state is passed in and returned.

    A caller loops ``state = await solver.step(problem, state)`` until ``state.converged``.
    """

    async def init(self, problem: Problem, weights: Tensor | None = None) -> S:
        """Makes the state before the first step.

        Args:
          problem: to be solved.
          weights: to start from; zeros when not given.
        """
        ...

    async def step(self, problem: Problem, state: S) -> S:
        """Takes one step."""
        ...

    def restored(self, tree: State) -> S:
        """Reads the result of :meth:`Iterate.tree`."""
        ...


async def solve(
    solver: Solver[S],
    problem: Problem,
    *,
    max_iterations: int,
    state: S | None = None,
    tell: Callable[[S], None] = lambda state: None,
) -> S:
    """Steps until the solver has converged.

    Args:
      solver: takes the steps.
      problem: to be solved.
      max_iterations: the most iterates, those of ``state`` included.
      state: to go on from; by default the beginning.
      tell: called with the state after each iterate.

    Returns:
      The last state, which says whether it has converged.
    """
    if state is None:
        state = await solver.init(problem)
        tell(state)
    while not state.converged and state.iterations < max_iterations:
        state = await solver.step(problem, state)
        tell(state)
    return state
