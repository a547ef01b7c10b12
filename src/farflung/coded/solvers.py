"""Solvers of linear models by two products: L-BFGS, gradient descent, and one-vs-rest."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar, Generic, Protocol, Self, TypeVar

import torch
from torch import Tensor
from typing_extensions import override

from farflung.coded.linear_model import Problem
from farflung.coded.preconditioner import ColumnStats, Preconditioner
from farflung.errors import ConfigError
from farflung.options import check_integer, check_number
from farflung.seeding import create_generator
from farflung.tasks import Pending, Task
from farflung.types import State

__all__ = [
    "GD",
    "LBFGS",
    "SOLVERS",
    "GDState",
    "Iterate",
    "LBFGSState",
    "OneVsRest",
    "OneVsRestState",
    "Solver",
    "solve",
]

_POWER_ROUNDS = 10
"""Number of rounds of the power iteration, with two products each."""
_MAX_CURVATURE = 2.0
"""Maximum curvature for the default rate; the hinge has more only in its parabola, with few samples."""
_DECREASE, _FLATNESS = 1e-4, 0.1
"""Constants :math:`c_1` and :math:`c_2` of the strong Wolfe conditions."""
_CHECK_PERIOD = 5
"""Number of iterates between two checks at the optimal intercept, which cost two products."""
_MAX_IDLE, _MIN_PROGRESS = 50, 1e-13
"""Maximum number of iterates without progress, and minimum progress, relative to the objective."""
_REFRESH_PERIOD = 50
"""Number of iterates after which margins are computed afresh."""
_MAX_TRIALS = 60
_ROUNDING_ERROR = 1e-14
"""Relative error of an objective; smaller changes near the optimum mean nothing."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Iterate:
    """State of a solver, which consists of tensors, numbers and flags.

    A run that resumes from :meth:`to_tree` takes bit-identical steps.

    Args:
      weights: Weights, (rows, outputs); see :class:`farflung.coded.Problem`.
      objective: Objective at the weights.
      gap: Bound of the objective above its minimum, relative; see :meth:`farflung.coded.Problem.compute_gap`.
      iterations: Number of steps taken.
      has_converged: True if the gap is at most the tolerance.
      has_stalled: True if it is not, and rounding errors allow no further step.
    """

    weights: Tensor
    objective: float
    gap: float
    iterations: int
    has_converged: bool
    has_stalled: bool = False

    @property
    def is_over(self) -> bool:
        """Returns True if no further step is useful."""
        return self.has_converged or self.has_stalled

    def to_tree(self) -> State:
        """Returns the state as a tree for :func:`farflung.state_trees.save_tree`."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    @classmethod
    def from_tree(cls, tree: State) -> Self:
        """Restores a state from the result of :meth:`to_tree`.

        Raises:
          KeyError: it is the state of another solver.
        """
        return cls(**{field.name: tree[field.name] for field in fields(cls)})


S = TypeVar("S", bound=Iterate)
T = TypeVar("T")


class Solver(Protocol[S]):
    """Frozen settings of a method to minimise an objective; the state is passed in and returned.

    A caller loops ``state = await solver.step(problem, state)`` until ``state.is_over``.
    """

    needs_stats: ClassVar[bool]
    """True if it uses the means and sizes of columns."""

    async def init(
        self, problem: Problem, weights: Tensor | None = None, stats: ColumnStats | None = None
    ) -> S:
        """Creates the state before the first step.

        Args:
          problem: Problem to solve.
          weights: Initial weights; zeros by default.
          stats: Statistics of the columns; measured by default if needed.
        """

    async def step(self, problem: Problem, state: S) -> S:
        """Takes one step."""

    def restore_state(self, tree: State) -> S:
        """Restores a state from the result of :meth:`Iterate.to_tree`."""


async def solve(
    solver: Solver[S],
    problem: Problem,
    *,
    max_iterations: int,
    state: S | None = None,
    callback: Callable[[S], None] = lambda state: None,
) -> S:
    """Takes steps until the solver has converged.

    Args:
      solver: Solver that takes the steps.
      problem: Problem to solve.
      max_iterations: Maximum number of iterates, including those of ``state``.
      state: State to resume from; by default the initial one.
      callback: Function called with the state after each iterate.

    Returns:
      Last state, converged or not.
    """
    if state is None:
        state = await solver.init(problem)
        callback(state)
    while not state.is_over and state.iterations < max_iterations:
        state = await solver.step(problem, state)
        callback(state)
    return state


# --- gradient descent -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class GDState(Iterate):
    """State of gradient descent.

    Args:
      learning_rate: Given or estimated learning rate.
      gradient: Gradient at the weights.
    """

    learning_rate: float
    gradient: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class GD:
    r"""Gradient descent with a fixed step length, the first method of coded training.

    .. math:: w_{t+1} = w_t - \eta\, \nabla F(w_t)

    Args:
      learning_rate: Rate :math:`\eta`; by default :math:`1 / L` with :math:`L = 1 + C \kappa \lambda`. Here
        :math:`\kappa` is the largest second derivative of the loss, but at most 2, and :math:`\lambda` the
        largest eigenvalue of :math:`X^T \Omega X`, with the samples' weights :math:`\Omega`, the intercept's
        constant feature included. A power iteration finds it from below, so the rate may be too high, though
        hardly by the factor of 2 at which steps would diverge.
      tol: Gap at which the solver has converged.

    Raises:
      ConfigError: a setting is out of its range.

    References: Lin et al. 2019 (arXiv 1910.10283).
    """

    needs_stats: ClassVar[bool] = False

    learning_rate: float | None = None
    tol: float = 1e-10

    def __post_init__(self) -> None:
        if self.learning_rate is not None:
            check_number("gd", "learning_rate", self.learning_rate, 0)
        check_number("gd", "tol", self.tol, 0)

    async def init(
        self, problem: Problem, weights: Tensor | None = None, stats: ColumnStats | None = None
    ) -> GDState:
        """Creates the first state by a transposed product, one more for given weights, and a power method."""
        del stats  # not needed by this solver
        rate = self.learning_rate
        if rate is None:
            eigenvalue = await _estimate_eigenvalue(problem)
            curvature = min(problem.objective.curvature, _MAX_CURVATURE)
            rate = 1 / (1 + problem.objective.loss_weight * curvature * eigenvalue)
        return await self._compute_state(problem, *await problem.init_weights(weights), rate, 0)

    async def step(self, problem: Problem, state: GDState) -> GDState:
        """Takes one step by two products, and a third at the optimal intercept if it may have converged.

        Raises:
          ConfigError: the learning rate is so high that the objective is infinite.
        """
        iterations, rate = state.iterations + 1, state.learning_rate
        weights = state.weights - rate * state.gradient
        margins = await problem.compute_margins(weights)
        new_state = await self._compute_state(problem, weights, margins, rate, iterations)
        if new_state.gap > self.tol:
            return new_state
        best_state = await self._compute_state(
            problem, *problem.optimize_intercept(weights, margins), rate, iterations
        )
        if best_state.gap > self.tol:
            return replace(new_state, gap=best_state.gap)
        return replace(best_state, has_converged=True)

    async def _compute_state(
        self, problem: Problem, weights: Tensor, margins: Tensor, rate: float, iterations: int
    ) -> GDState:
        objective, slopes, gradient = problem.evaluate(weights, margins)
        if not math.isfinite(objective):
            raise ConfigError(f"gd: diverged at iterate {iterations}: lower learning_rate {rate}")
        gradient = gradient + await problem.multiply_transposed(slopes)
        return GDState(
            weights=weights,
            objective=objective,
            gap=problem.compute_gap(objective, gradient, rate * float((gradient * gradient).sum())),
            iterations=iterations,
            has_converged=False,
            learning_rate=rate,
            gradient=gradient,
        )

    def restore_state(self, tree: State) -> GDState:
        return GDState.from_tree(tree)


async def _estimate_eigenvalue(problem: Problem) -> float:
    vector = torch.randn(
        problem.shape[0], 1, generator=create_generator(0, "power iteration"), dtype=torch.float64
    )
    weights = problem.sample_weights
    eigenvalue = 0.0
    for _ in range(_POWER_ROUNDS):
        vector = vector / vector.norm()
        margins = await problem.compute_margins(vector)
        if weights is not None:
            margins = margins * weights.amax(dim=1, keepdim=True)
        vector = await problem.multiply_transposed(margins)
        eigenvalue = float(vector.norm())
        if eigenvalue == 0:
            break
    return eigenvalue


# --- L-BFGS -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LBFGSState(Iterate):
    """State of L-BFGS.

    Args:
      margins: Margins at the weights, (samples, outputs).
      gradient: Gradient at the weights.
      weight_changes: Differences of the last weights, (pairs, rows, outputs), oldest first.
      gradient_changes: Differences of their gradients.
      scales: Scales of the preconditioner; see :class:`farflung.coded.Preconditioner`.
      tilt: Tilt of the preconditioner.
      shear: Shear of the preconditioner.
      mark_objective: Objective at the last progress: a fall beyond rounding errors, or a halved gap.
      min_gap: Minimum gap so far.
      num_idle: Number of iterates since the last progress.
    """

    margins: Tensor
    gradient: Tensor
    weight_changes: Tensor
    gradient_changes: Tensor
    scales: Tensor
    tilt: Tensor
    shear: Tensor
    mark_objective: float = math.inf
    min_gap: float = math.inf
    num_idle: int = 0

    @property
    def preconditioner(self) -> Preconditioner:
        """Approximate Hessian before any step."""
        return Preconditioner(self.scales, self.tilt, self.shear)

    @property
    def direction(self) -> Tensor:
        """Direction :math:`-H g`, computed by two loops over the pairs."""
        preconditioner = self.preconditioner
        direction = -self.gradient
        pairs = [
            (move, turn, float((move * turn).sum()))
            for move, turn in zip(self.weight_changes, self.gradient_changes, strict=True)
        ]
        shares: list[float] = []
        for move, turn, bend in reversed(pairs):
            shares.append(float((move * direction).sum()) / bend)
            direction = direction - shares[-1] * turn
        direction = preconditioner.solve(direction)
        if pairs:
            _, turn, bend = pairs[-1]
            direction = direction * (bend / float((turn * preconditioner.solve(turn)).sum()))
        for (move, turn, bend), share in zip(pairs, reversed(shares), strict=True):
            direction = direction + (share - float((turn * direction).sum()) / bend) * move
        return direction


@dataclass(frozen=True, slots=True, kw_only=True)
class LBFGS:
    """Steps along :math:`-H g`, where H is the inverse Hessian estimated from the last steps.

    Margins are linear in the weights, so :math:`X (w + a d) = X w + a X d` and the line search costs no
    message. An iterate is one product with the direction and one transposed product, whatever the number of
    trial steps. That makes a thorough search and a long memory worthwhile. Sums of many steps drift from
    :math:`X w`. So the product with the weights is recomputed every 50 iterates, as another column of a
    product, and at the end.

    H starts as the inverse of :class:`farflung.coded.Preconditioner`, which centres and scales columns; the
    penalty stays that of the original columns. An intercept without penalty is moved to its optimum after each
    step, at no message, and one with a penalty when the solver may have converged. So the gap has no rounding
    errors of the intercept multiplied by the means of columns.

    Args:
      tol: Gap at which the solver has converged.
      memory: Maximum number of pairs of differences.

    Raises:
      ConfigError: a setting is out of its range.

    References: Nocedal & Wright 2006, alg. 7.4 and 7.5.
    """

    needs_stats: ClassVar[bool] = True

    tol: float = 1e-10
    memory: int = 100

    def __post_init__(self) -> None:
        check_number("lbfgs", "tol", self.tol, 0)
        check_integer("lbfgs", "memory", self.memory, 1)

    async def init(
        self, problem: Problem, weights: Tensor | None = None, stats: ColumnStats | None = None
    ) -> LBFGSState:
        """Creates the first state by two products, one with given statistics, and one more for given weights.

        Raises:
          BadSamples: squares of the features are infinite.
        """
        preconditioner = Preconditioner.from_problem(problem, stats or await ColumnStats.measure(problem))
        weights, margins = await problem.init_weights(weights)
        return await self._create_state(problem, weights, margins, preconditioner)

    async def step(self, problem: Problem, state: LBFGSState) -> LBFGSState:
        """Takes one step by two products, and two more if it may have converged or finds no lower point."""
        iterations, outputs, direction = state.iterations + 1, problem.shape[1], state.direction
        has_best_intercept = problem.objective.intercept_penalty == 0
        gain = -0.5 * float((state.gradient * direction).sum())
        # H may estimate a small gap while errors in a penalised intercept hide it.
        expects_end = not has_best_intercept and gain <= 0.01 * self.tol * state.objective
        if expects_end and state.iterations % _CHECK_PERIOD == _CHECK_PERIOD - 1:
            fresh = await self._restart(problem, state)
            if fresh.has_converged:
                return fresh
        if iterations % _REFRESH_PERIOD:
            margins, change = state.margins, await problem.compute_margins(direction)
        else:
            margin_pair = await problem.compute_margins(torch.cat([state.weights, direction], dim=1))
            margins, change = margin_pair[:, :outputs], margin_pair[:, outputs:]
        ray = Ray(problem, state.weights, margins, direction, change)
        start = ray.evaluate_at(0.0)
        guess = 1.0 if len(state.weight_changes) else _compute_safe_length(ray, start)
        point = strong_wolfe(ray, start, guess)
        if point is None:
            fresh = await self._restart(problem, state)
            return replace(fresh, has_stalled=not fresh.has_converged and not len(state.weight_changes))
        weights, margins = point.weights, point.margins
        if has_best_intercept:
            weights, margins = problem.optimize_intercept(weights, margins)
        objective, gradient = await problem.compute_gradient(weights, margins)
        weight_changes, gradient_changes = state.weight_changes, state.gradient_changes
        weight_change, gradient_change = weights - state.weights, gradient - state.gradient
        if float((weight_change * gradient_change).sum()) > 0:
            weight_changes = torch.cat([weight_changes, weight_change[None]])[-self.memory :]
            gradient_changes = torch.cat([gradient_changes, gradient_change[None]])[-self.memory :]
        new_state = replace(
            state,
            weights=weights,
            objective=objective,
            iterations=iterations,
            margins=margins,
            gradient=gradient,
            weight_changes=weight_changes,
            gradient_changes=gradient_changes,
        )
        new_state = _count_idle(replace(new_state, gap=_compute_gap(problem, new_state)))
        if new_state.num_idle == _MAX_IDLE:
            fresh = await self._restart(problem, new_state)
            return replace(fresh, has_stalled=not fresh.has_converged)
        if new_state.gap > self.tol:
            return new_state
        fresh = await self._restart(problem, new_state)
        return (
            fresh
            if fresh.has_converged
            else _count_idle(replace(fresh, weight_changes=weight_changes, gradient_changes=gradient_changes))
        )

    def restore_state(self, tree: State) -> LBFGSState:
        return LBFGSState.from_tree(tree)

    async def _create_state(
        self, problem: Problem, weights: Tensor, margins: Tensor, preconditioner: Preconditioner
    ) -> LBFGSState:
        weights, margins = problem.optimize_intercept(weights, margins)
        objective, gradient = await problem.compute_gradient(weights, margins)
        state = LBFGSState(
            weights=weights,
            objective=objective,
            gap=1.0,
            iterations=0,
            has_converged=False,
            margins=margins,
            gradient=gradient,
            weight_changes=weights.new_zeros(0, *weights.shape),
            gradient_changes=weights.new_zeros(0, *weights.shape),
            scales=preconditioner.scales,
            tilt=preconditioner.tilt,
            shear=preconditioner.shear,
        )
        gap = _compute_gap(problem, state)
        return replace(state, gap=gap, has_converged=gap <= self.tol)

    async def _restart(self, problem: Problem, state: LBFGSState) -> LBFGSState:
        """Recomputes margins and gradient, by two products, and drops the pairs."""
        margins = await problem.compute_margins(state.weights)
        fresh = await self._create_state(problem, state.weights, margins, state.preconditioner)
        return replace(
            fresh,
            iterations=state.iterations,
            mark_objective=state.mark_objective,
            min_gap=state.min_gap,
            num_idle=state.num_idle,
        )


def _count_idle(state: LBFGSState) -> LBFGSState:
    """Counts the iterates since the last progress; resets the count after progress."""
    if state.objective < (1 - _MIN_PROGRESS) * state.mark_objective or state.gap < 0.5 * state.min_gap:
        return replace(
            state, mark_objective=state.objective, min_gap=min(state.gap, state.min_gap), num_idle=0
        )
    return replace(state, num_idle=state.num_idle + 1)


def _compute_gap(problem: Problem, state: LBFGSState) -> float:
    """Bounds the relative distance from the minimum; without a penalty, by the gain expected of the next step."""
    gain = 0.0
    if not problem.objective.has_penalty:
        directions = state.direction, state.preconditioner.solve(state.gradient)
        gain = max(0.5 * abs(float((state.gradient * direction).sum())) for direction in directions)
    return problem.compute_gap(state.objective, state.gradient, gain)


def _compute_safe_length(ray: Ray, start: Point) -> float:
    """Computes the step to the minimum of a parabola that is an upper bound of the objective."""
    problem = ray.problem
    squares = ray.change * ray.change
    if problem.sample_weights is not None:
        squares = squares * problem.sample_weights
    bend = problem.objective.loss_weight * problem.objective.curvature * float(squares.sum())
    return -start.slope / (bend + 2 * problem.compute_penalty(ray.direction)[0])


# --- the line search of L-BFGS ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False)
class Ray:
    """The objective along a direction.

    Args:
      problem: Problem with the objective.
      weights: Weights at the origin.
      margins: Margins at the origin.
      direction: Direction, of the shape of the weights.
      change: Change of the margins along the direction.
    """

    problem: Problem
    weights: Tensor
    margins: Tensor
    direction: Tensor
    change: Tensor

    def evaluate_at(self, length: float) -> Point:
        """Evaluates the point at a length, in multiples of the direction."""
        weights = self.weights + length * self.direction
        margins = self.margins + length * self.change
        objective, slopes, gradient = self.problem.evaluate(weights, margins)
        slope = float((slopes * self.change).sum()) + float((gradient * self.direction).sum())
        return Point(length, objective, slope, weights, margins, slopes)


@dataclass(frozen=True, slots=True, eq=False)
class Point:
    """A point of a ray.

    Args:
      length: Length from the origin, in multiples of the direction.
      objective: Objective at the point.
      slope: Derivative of the objective by the length.
      weights: Weights at the point.
      margins: Margins at the point.
      slopes: Derivative of the losses by the margins.
    """

    length: float
    objective: float
    slope: float
    weights: Tensor
    margins: Tensor
    slopes: Tensor


def strong_wolfe(ray: Ray, start: Point, guess: float) -> Point | None:
    r"""Finds a point that satisfies the strong Wolfe conditions.

    .. math:: \varphi(a) \le \varphi(0) + c_1 a \varphi'(0), \qquad |\varphi'(a)| \le c_2 |\varphi'(0)|

    The objective is convex, so its slope rises along the ray, and its zero crossing can be bracketed.

    Args:
      ray: Ray along a descent direction.
      start: Point at length 0.
      guess: First length to try.

    Returns:
      Point, or ``None`` if the objective falls by no more than its rounding errors.

    References: Nocedal & Wright 2006, eq. 3.7 and alg. 3.5, with the secant of the slopes for interpolation.
    """
    low, high = start, None
    length = guess
    for _ in range(_MAX_TRIALS):
        point = ray.evaluate_at(length)
        max_objective = (
            start.objective + _DECREASE * length * start.slope + _ROUNDING_ERROR * abs(start.objective)
        )
        if not point.objective <= max_objective or point.slope > -_FLATNESS * start.slope:
            high = point
        elif point.slope < _FLATNESS * start.slope:
            low = point
        else:
            return point
        length = _interpolate(low, high)
    return low if low.objective < start.objective else None


def _interpolate(low: Point, high: Point | None) -> float:
    """Interpolates the length of zero slope, well inside the bracket."""
    if high is None:
        return 4 * low.length
    width = high.length - low.length
    rise = high.slope - low.slope
    share = -low.slope / rise if math.isfinite(rise) and rise > 0 else 0.5
    return low.length + min(max(share, 0.1), 0.9) * width


# --- several outputs --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class OneVsRestState(Iterate, Generic[S]):
    """States of the solvers of all outputs.

    Args:
      outputs: State of each output, in order.
    """

    outputs: tuple[S, ...]

    @override
    def to_tree(self) -> State:
        return {"outputs": {str(index): state.to_tree() for index, state in enumerate(self.outputs)}}


@dataclass(frozen=True, slots=True)
class OneVsRest(Generic[S]):
    """Solves each output separately, all in the same rounds: their weights are columns of one product.

    A converged output no longer takes part. The gap is the largest of all, and the objective is their sum.

    Args:
      solver: Solver of one output.
    """

    needs_stats: ClassVar[bool] = True

    solver: Solver[S]

    async def init(
        self, problem: Problem, weights: Tensor | None = None, stats: ColumnStats | None = None
    ) -> OneVsRestState[S]:
        """Starts all outputs in the same rounds."""
        columns = [None] * problem.shape[1] if weights is None else weights.split(1, dim=1)
        if stats is None and self.solver.needs_stats:
            stats = await ColumnStats.measure(problem)
        return _join_states(
            await _gather_outputs(
                problem,
                lambda outputs: (
                    self.solver.init(output, column, stats)
                    for output, column in zip(outputs, columns, strict=True)
                ),
            )
        )

    async def step(self, problem: Problem, state: OneVsRestState[S]) -> OneVsRestState[S]:
        """Takes a step of each output in the same rounds."""
        active = [index for index, output in enumerate(state.outputs) if not output.is_over]
        steps = await _gather_outputs(
            problem,
            lambda outputs: (self.solver.step(outputs[index], state.outputs[index]) for index in active),
        )
        new_states = dict(zip(active, steps, strict=True))
        return _join_states([new_states.get(index, output) for index, output in enumerate(state.outputs)])

    def restore_state(self, tree: State) -> OneVsRestState[S]:
        outputs = tree["outputs"]
        return _join_states([self.solver.restore_state(outputs[str(index)]) for index in range(len(outputs))])


def _join_states(outputs: list[S]) -> OneVsRestState[S]:
    return OneVsRestState(
        weights=torch.cat([state.weights for state in outputs], dim=1),
        objective=sum(state.objective for state in outputs),
        gap=max(state.gap for state in outputs),
        iterations=max(state.iterations for state in outputs),
        has_converged=all(state.has_converged for state in outputs),
        has_stalled=all(state.is_over for state in outputs) and any(state.has_stalled for state in outputs),
        outputs=tuple(outputs),
    )


async def _gather_outputs(
    problem: Problem, start: Callable[[list[Problem]], Iterable[Coroutine[Any, Any, T]]]
) -> list[T]:
    """Runs solvers of one output each concurrently; their simultaneous products share a round."""
    products, ready = problem.products, deque[Callable[[], None]]()
    rounds: list[tuple[Callable[[Tensor], Awaitable[Tensor]], list[tuple[Tensor, Pending[Tensor]]]]] = [
        (products.multiply, []),
        (products.multiply_transposed, []),
    ]

    def create_request(waiting: list[tuple[Tensor, Pending[Tensor]]]) -> Callable[[Tensor], Pending[Tensor]]:
        def request(factor: Tensor) -> Pending[Tensor]:
            waiting.append((factor, Pending()))
            return waiting[-1][1]

        return request

    column = _Output(products.samples, products.features, *(create_request(waiting) for _, waiting in rounds))
    weights = problem.sample_weights
    factors = (
        [None] * problem.shape[1] if weights is None else weights.expand_as(problem.targets).split(1, dim=1)
    )
    outputs = [
        Problem(column, problem.objective, targets, factor)
        for targets, factor in zip(problem.targets.split(1, dim=1), factors, strict=True)
    ]
    tasks: list[Task[T]] = [Task(coroutine, ready.append) for coroutine in start(outputs)]
    while not all(task.is_done for task in tasks):
        while ready:
            ready.popleft()()
        for product, waiting in rounds:
            requests = waiting.copy()
            waiting.clear()
            if requests:
                total = await product(torch.cat([factor for factor, _ in requests], dim=1))
                parts = total.split([factor.shape[1] for factor, _ in requests], dim=1)
                for (_, answer), part in zip(requests, parts, strict=True):
                    answer.set_result(part)
    return [task.result() for task in tasks]


@dataclass(frozen=True, slots=True)
class _Output:
    """Products for the solver of one output, see :class:`farflung.coded.Products`."""

    samples: int
    features: int
    multiply: Callable[[Tensor], Pending[Tensor]]
    multiply_transposed: Callable[[Tensor], Pending[Tensor]]


SOLVERS: dict[str, Callable[..., Solver[Any]]] = {"gd": GD, "lbfgs": LBFGS}
"""Solvers by name."""
