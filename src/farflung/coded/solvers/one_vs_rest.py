"""Several outputs as problems of their own, whose products travel together."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor
from typing_extensions import override

from farflung.coded.problem import Problem
from farflung.coded.solvers.base import Iterate, Solver
from farflung.tasks import Pending, Task
from farflung.types import State

__all__ = ["OneVsRest", "OneVsRestState"]

S = TypeVar("S", bound=Iterate)
T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class OneVsRestState(Iterate, Generic[S]):
    """State of the solver of each output.

    Args:
      outputs: their states, in order.
    """

    outputs: tuple[S, ...]

    @override
    def tree(self) -> State:
        return {"outputs": {str(index): state.tree() for index, state in enumerate(self.outputs)}}


@dataclass(frozen=True, slots=True)
class OneVsRest(Generic[S]):
    """Solves each output by itself, all in the same rounds: their weights are columns of one product.

    An output that has converged takes no part any more. The gap is the largest of all, and the objective their sum.

    Args:
      solver: of one output.
    """

    solver: Solver[S]

    async def init(self, problem: Problem, weights: Tensor | None = None) -> OneVsRestState[S]:
        """Starts all outputs in as many rounds as one output takes."""
        together = _Together(problem)
        columns = [None] * len(together.problems) if weights is None else weights.split(1, dim=1)
        begun = [
            self.solver.init(one, column) for one, column in zip(together.problems, columns, strict=True)
        ]
        return _joined(await together.run(begun))

    async def step(self, problem: Problem, state: OneVsRestState[S]) -> OneVsRestState[S]:
        """Takes a step of each output in as many rounds as one output takes."""
        together = _Together(problem)
        going = [index for index, one in enumerate(state.outputs) if not one.converged]
        steps = await together.run(
            [self.solver.step(together.problems[index], state.outputs[index]) for index in going]
        )
        taken = dict(zip(going, steps, strict=True))
        return _joined([taken.get(index, one) for index, one in enumerate(state.outputs)])

    def restored(self, tree: State) -> OneVsRestState[S]:
        outputs = tree["outputs"]
        return _joined([self.solver.restored(outputs[str(index)]) for index in range(len(outputs))])


def _joined(outputs: list[S]) -> OneVsRestState[S]:
    return OneVsRestState(
        weights=torch.cat([one.weights for one in outputs], dim=1),
        objective=sum(one.objective for one in outputs),
        gap=max(one.gap for one in outputs),
        iterations=max(one.iterations for one in outputs),
        converged=all(one.converged for one in outputs),
        outputs=tuple(outputs),
    )


class _Together:
    """Runs solvers side by side; the products that they ask for meanwhile are one round."""

    def __init__(self, problem: Problem) -> None:
        self._products = problem.products
        self._ready: deque[Callable[[], None]] = deque()
        self._times: list[_Wanted] = []
        self._transposed: list[_Wanted] = []
        self.problems = [
            Problem(
                _Column(problem.products.samples, problem.products.features, self._times, self._transposed),
                problem.objective,
                column,
            )
            for column in problem.targets.split(1, dim=1)
        ]

    async def run(self, coroutines: list[Coroutine[Any, Any, T]]) -> list[T]:
        tasks: list[Task[T]] = [Task(one, self._ready.append) for one in coroutines]
        while not all(task.done for task in tasks):
            while self._ready:
                self._ready.popleft()()
            await _answer(self._times, self._products.times)
            await _answer(self._transposed, self._products.transposed_times)
        return [task.result() for task in tasks]


@dataclass(slots=True)
class _Wanted:
    """A product that the solver of one output waits for."""

    factor: Tensor
    answer: Pending[Tensor] = field(default_factory=Pending)


@dataclass(slots=True)
class _Column:
    """The products for the solver of one output."""

    samples: int
    features: int
    wanted_times: list[_Wanted]
    wanted_transposed: list[_Wanted]

    def times(self, weights: Tensor) -> Pending[Tensor]:
        return _want(self.wanted_times, weights)

    def transposed_times(self, residuals: Tensor) -> Pending[Tensor]:
        return _want(self.wanted_transposed, residuals)


def _want(wanted: list[_Wanted], factor: Tensor) -> Pending[Tensor]:
    wanted.append(_Wanted(factor))
    return wanted[-1].answer


async def _answer(wanted: list[_Wanted], product: Callable[[Tensor], Any]) -> None:
    """Answers all waiting solvers by one round."""
    if not wanted:
        return
    asked = wanted.copy()
    wanted.clear()
    answer: Tensor = await product(torch.cat([one.factor for one in asked], dim=1))
    for one, part in zip(asked, answer.split([one.factor.shape[1] for one in asked], dim=1), strict=True):
        one.answer.set(part)
