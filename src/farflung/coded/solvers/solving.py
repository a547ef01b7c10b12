"""The loop around a solver's steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from farflung.coded.problem import Problem
from farflung.coded.solvers.interface import Iterate, Solver

__all__ = ["solve"]

S = TypeVar("S", bound=Iterate)


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
      solver: what takes the steps.
      problem: what is solved.
      max_iterations: the most iterates, those of ``state`` included.
      state: to go on from; by default the beginning.
      tell: gets the state after each iterate, so that it can be kept.

    Returns:
      The last state; whether it has converged is in it.
    """
    if state is None:
        state = await solver.init(problem)
        tell(state)
    while not state.converged and state.iterations < max_iterations:
        state = await solver.step(problem, state)
        tell(state)
    return state
