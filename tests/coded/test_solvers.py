"""The contract of solvers, over a table of them: optima, rounds, resuming."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from farflung.coded import (
    GD,
    LBFGS,
    SOLVERS,
    Hinge,
    InMemoryProducts,
    Logistic,
    Multinomial,
    Objective,
    OneVsRest,
    Problem,
    Products,
    Solver,
    SquaredHinge,
    solve,
)
from farflung.coded import solvers as solvers_module
from farflung.coded.solvers import Ray, strong_wolfe
from farflung.errors import ConfigError
from farflung.seeding import create_generator
from farflung.state_trees import load_tree, save_tree
from tests.coded.problems import Counted, Noisy, cancer, run, signs, value, wine
from tests.covering import thorough

pytest.importorskip("sklearn")

TABLE: dict[str, tuple[Solver[Any], Objective, int]] = {
    "lbfgs logistic": (LBFGS(), Logistic(), 2),
    "lbfgs multinomial": (LBFGS(), Multinomial(classes=3), 3),
    "lbfgs squared_hinge": (LBFGS(), SquaredHinge(), 2),
    "lbfgs hinge": (LBFGS(), Hinge(C=0.1), 2),
    "lbfgs refreshed": (LBFGS(memory=5), Logistic(fit_intercept=False), 2),
    "gd logistic": (GD(tol=1e-12), Logistic(C=0.01), 2),
    "gd multinomial": (GD(tol=1e-12), Multinomial(C=0.01, classes=3), 3),
    "gd squared_hinge": (GD(tol=1e-12), SquaredHinge(C=0.01), 2),
    "gd hinge": (GD(tol=1e-6), Hinge(C=0.01), 2),
    "one_vs_rest lbfgs": (OneVsRest(LBFGS()), SquaredHinge(), 3),
}


def data_of(objective: Objective, classes: int) -> tuple[Tensor, Tensor, Tensor]:
    """Matrix, classes and targets."""
    matrix, codes = cancer() if classes == 2 else wine()
    return matrix, codes, codes if isinstance(objective, Multinomial) else signs(codes)


def problem_of(objective: Objective, classes: int) -> Problem:
    matrix, _, targets = data_of(objective, classes)
    return Problem(InMemoryProducts(matrix), objective, targets)


def optimum(objective: Objective, classes: int) -> float:
    """By a tight tolerance; the estimators are compared with scikit-learn's."""
    return run(solve(LBFGS(tol=1e-15), problem_of(objective, classes), max_iterations=3000)).objective


def test_the_table_is_whole() -> None:
    assert {type(solver) for solver, _, _ in TABLE.values()} == {*SOLVERS.values(), OneVsRest}


@pytest.mark.parametrize("name", TABLE)
def test_the_optimum_is_found(name: str) -> None:
    solver, objective, classes = TABLE[name]
    matrix, _, targets = data_of(objective, classes)
    state = run(solve(solver, Problem(InMemoryProducts(matrix), objective, targets), max_iterations=3000))
    assert state.has_converged
    assert state.objective == pytest.approx(value(objective, matrix, targets, state.weights), rel=1e-12)
    least = optimum(objective, classes)
    assert -1e-9 < state.objective / least - 1 < (1e-6 if name == "gd hinge" else 1e-9)


@pytest.mark.parametrize("name", TABLE)
def test_resumed_in_mid_run_the_bits_are_the_same(name: str, tmp_path: Path) -> None:
    solver, objective, classes = TABLE[name]
    problem = problem_of(objective, classes)
    half = run(solve(solver, problem, max_iterations=7))
    assert not half.has_converged
    save_tree(tmp_path / "state.safetensors", half.to_tree())
    again = solver.restore_state(load_tree(tmp_path / "state.safetensors"))
    through, resumed = (
        run(solve(solver, problem, max_iterations=20, state=state)) for state in (half, again)
    )
    assert through.iterations > 7
    assert differences(through.to_tree(), resumed.to_tree()) == []


def differences(one: dict[str, Any], other: dict[str, Any]) -> list[str]:
    found = [] if one.keys() == other.keys() else ["keys"]
    for key in one.keys() & other.keys():
        if isinstance(one[key], dict):
            found += differences(one[key], other[key])
        elif isinstance(one[key], Tensor):
            found += [] if torch.equal(one[key], other[key]) else [key]
        else:
            found += [] if one[key] == other[key] and type(one[key]) is type(other[key]) else [key]
    return found


@pytest.mark.parametrize("name", [name for name in TABLE if not name.startswith("one_vs_rest")])
def test_an_iterate_is_two_rounds(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if name == "lbfgs refreshed":
        monkeypatch.setattr(solvers_module, "_REFRESH_PERIOD", 2)
    solver, objective, classes = TABLE[name]
    matrix, _, targets = data_of(objective, classes)
    products = Counted(matrix)
    problem = Problem(products, objective, targets)
    state = run(solver.init(problem))
    beginning = len(products.rounds)
    assert beginning == (21 if isinstance(solver, GD) else 2)
    run(solve(solver, problem, max_iterations=6, state=state))
    assert len(products.rounds) - beginning == 12
    refreshed = {2 * problem.shape[1]} if name == "lbfgs refreshed" else set()
    assert set(products.rounds[beginning:]) == {problem.shape[1]} | refreshed


def test_outputs_travel_together_and_do_not_meet() -> None:
    one, objective = LBFGS(), SquaredHinge()
    matrix, _, targets = data_of(objective, 3)
    products = Counted(matrix)
    state = run(solve(OneVsRest(one), Problem(products, objective, targets), max_iterations=500))
    alone = []
    for target in targets.split(1, dim=1):
        apart = Counted(matrix)
        alone.append(
            (run(solve(one, Problem(apart, objective, target), max_iterations=500)), len(apart.rounds))
        )
    torch.testing.assert_close(state.weights, torch.cat([single.weights for single, _ in alone], dim=1))
    assert state.objective == pytest.approx(sum(single.objective for single, _ in alone))
    assert state.iterations == max(single.iterations for single, _ in alone)
    assert max(products.rounds[1:]) == 3, "the first measures columns, once for all"
    assert (
        len(products.rounds) <= max(rounds for _, rounds in alone) + 4
    )  # two may end in rounds of their own


@pytest.mark.parametrize("name", ["lbfgs logistic", "lbfgs squared_hinge"])
def test_errors_of_decoding_do_no_harm(name: str) -> None:
    solver, objective, classes = TABLE[name]
    matrix, _, targets = data_of(objective, classes)
    products: Products = Noisy(matrix, 1e-11)
    state = run(solve(solver, Problem(products, objective, targets), max_iterations=300))
    assert state.has_converged
    assert state.objective == pytest.approx(optimum(objective, classes), rel=1e-7)


@pytest.mark.parametrize("objective", [Hinge(C=0.01), Logistic(C=0.01)], ids=["hinge", "logistic"])
def test_steps_of_gradient_descent(objective: Objective) -> None:
    problem, solver = problem_of(objective, 2), GD(learning_rate=0.02)
    state = run(solver.init(problem))
    assert state.learning_rate == 0.02
    for number in range(1, 5):
        after = run(solver.step(problem, state))
        torch.testing.assert_close(after.weights, state.weights - 0.02 * state.gradient)
        assert after.iterations == number
        state = after


def test_lbfgs_notices_margins_that_drifted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(solvers_module, "_REFRESH_PERIOD", 10**6)
    problem, solver = problem_of(Logistic(), 2), LBFGS()
    state = run(solve(solver, problem, max_iterations=5))
    drifted = replace(state, margins=state.margins + 0.3)
    found = run(solve(solver, problem, max_iterations=500, state=drifted))
    assert found.has_converged
    assert found.objective == pytest.approx(optimum(Logistic(), 2), rel=1e-7)


# --- the stopping rule ------------------------------------------------------------------------------------------------

COLUMNS: dict[str, Callable[[Tensor], Tensor]] = {
    "as they are": lambda matrix: matrix,
    "far from 0": lambda matrix: matrix + 1e6,
    "of unlike sizes": lambda matrix: matrix * torch.logspace(-6, 6, matrix.shape[1], dtype=torch.float64),
    "large": lambda matrix: matrix * 1e4,
    "huge": lambda matrix: matrix * 1e14,
    "constant and empty": lambda matrix: (
        torch.nn.functional.pad(matrix, (0, 1), value=7.0) * (torch.arange(matrix.shape[1] + 1) != 3)
    ),
}


def problem_with_wrong_labels(objective: Objective, classes: int, columns: str) -> Problem:
    """One whose classes no weights tell apart, so that the least loss is not nearly 0."""
    matrix, codes, _ = data_of(objective, classes)
    is_wrong = torch.rand(len(codes), generator=create_generator(7)) < 0.1
    codes = torch.where(is_wrong, (codes + 1) % classes, codes)
    targets = codes if isinstance(objective, Multinomial) else signs(codes)
    return Problem(InMemoryProducts(COLUMNS[columns](matrix)), objective, targets)


MODELS: dict[str, tuple[Objective, int]] = {
    "logistic": (Logistic(), 2),
    "logistic, no intercept": (Logistic(fit_intercept=False), 2),
    "multinomial": (Multinomial(classes=3), 3),
    "squared_hinge": (SquaredHinge(intercept_scaling=2.0), 2),
    "hinge": (Hinge(C=0.1), 2),
}


@pytest.mark.parametrize(
    ("model", "columns"),
    [
        ("logistic", "as they are"),
        ("logistic, no intercept", "of unlike sizes"),
        ("multinomial", "far from 0"),
        ("squared_hinge", "constant and empty"),
        ("hinge", "as they are"),
        *thorough(("hinge", "far from 0"), ("squared_hinge", "large"), ("logistic", "of unlike sizes")),
    ],
)
def test_the_gap_is_no_less_than_what_is_above_the_optimum(model: str, columns: str) -> None:
    """At every iterate, whatever the columns are like; and in the end it is as small as was asked for."""
    problem = problem_with_wrong_labels(*MODELS[model], columns)
    states: list[Any] = []
    state = run(solve(LBFGS(), problem, max_iterations=3000, callback=states.append))
    if model == "hinge" and columns == "far from 0":  # as small as rounding errors of its weights allow
        assert state.is_over
        assert state.gap < 1e-6
    else:
        assert state.has_converged
        assert state.gap <= 1e-10
    least = run(solve(LBFGS(tol=1e-16), problem, max_iterations=3000)).objective
    rounding = 1e-9 if columns == "far from 0" else 1e-12
    for one in states:
        assert one.objective - least <= one.gap * one.objective + rounding * least


def test_where_rounding_errors_hide_the_gap_it_has_stalled_and_not_converged() -> None:
    problem = problem_with_wrong_labels(Logistic(), 2, "huge")  # of features
    state = run(solve(LBFGS(), problem, max_iterations=500))
    assert (state.has_converged, state.has_stalled) == (False, True)
    assert state.gap > 1e-10
    assert state.iterations < 500
    again = LBFGS().restore_state(state.to_tree())
    assert run(solve(LBFGS(), problem, max_iterations=500, state=again)) is again
    whole = run(solve(OneVsRest(LBFGS()), problem, max_iterations=500))
    assert (whole.has_converged, whole.has_stalled) == (False, True)


def test_gradient_descent_on_columns_far_from_0_has_not_converged() -> None:
    matrix, _, targets = data_of(Logistic(), 2)
    state = run(solve(GD(), Problem(InMemoryProducts(matrix + 1e6), Logistic(), targets), max_iterations=20))
    assert not state.has_converged
    assert state.gap > 1


def test_gradient_descent_bounds_the_gap_at_the_best_intercept() -> None:
    """Its gradient is small, but the intercept is not where the bound holds."""
    matrix, _, targets = data_of(Logistic(), 2)
    problem = Problem(InMemoryProducts(matrix), Logistic(C=0.01), targets)
    state = run(solve(GD(tol=1e-4), problem, max_iterations=1000))
    assert state.has_converged
    settled, _ = problem.optimize_intercept(state.weights, run(problem.compute_margins(state.weights)))
    torch.testing.assert_close(settled, state.weights, rtol=0, atol=1e-12)
    least = run(solve(LBFGS(), problem, max_iterations=100)).objective
    assert 0 < state.objective / least - 1 < state.gap <= 1e-4


@pytest.mark.parametrize("model", MODELS)
def test_the_intercept_is_moved_to_its_best_value(model: str) -> None:
    objective, classes = MODELS[model]
    problem = problem_of(objective, classes)
    weights = 0.1 * torch.randn(problem.shape, generator=create_generator(5), dtype=torch.float64)
    margins = run(problem.compute_margins(weights))
    settled, moved = problem.optimize_intercept(weights, margins)
    torch.testing.assert_close(moved, run(problem.compute_margins(settled)))
    assert torch.equal(settled[: problem.products.features], weights[: problem.products.features])
    if objective.fit_intercept:
        before, _, _ = problem.evaluate(weights, margins)
        after, slopes, penalty = problem.evaluate(settled, moved)
        assert after < before
        gradient = penalty + run(problem.multiply_transposed(slopes))
        assert float(gradient[-1].abs().max()) < 1e-9 * float(slopes.abs().sum())


def test_no_penalty() -> None:
    """An infinite C: the least loss where there is one, and a loss of nearly 0 where classes can be told apart."""
    random = create_generator(6)
    matrix = torch.randn(300, 5, generator=random, dtype=torch.float64)
    draws = torch.rand(300, 1, generator=random, dtype=torch.float64)
    targets = torch.where(draws < torch.sigmoid(matrix[:, :1] + 0.3), 1.0, -1.0).to(torch.float64)
    for products in (InMemoryProducts(matrix), InMemoryProducts(matrix * 1e3 + 1e6)):
        problem = Problem(products, Logistic(C=float("inf")), targets)
        state = run(solve(LBFGS(), problem, max_iterations=200))
        assert state.has_converged
        weak = run(solve(LBFGS(), Problem(products, Logistic(C=1e9), targets), max_iterations=200))
        assert state.objective == pytest.approx(weak.objective / 1e9, rel=1e-8)
    apart = Problem(InMemoryProducts(matrix), Logistic(C=float("inf")), matrix[:, :1].sign())
    state = run(solve(LBFGS(), apart, max_iterations=200))
    assert state.has_converged
    assert state.objective < 1e-6


@pytest.mark.parametrize("solver", [LBFGS(), GD()], ids=["lbfgs", "gd"])
def test_samples_that_say_nothing(solver: Solver[Any]) -> None:
    targets = torch.tensor([[1.0], [-1.0]], dtype=torch.float64)
    problem = Problem(InMemoryProducts(torch.zeros(2, 3, dtype=torch.float64)), Logistic(), targets)
    state = run(solve(solver, problem, max_iterations=10))
    assert state.has_converged
    assert float(state.weights.abs().max()) < 1e-9


def test_a_learning_rate_that_diverges() -> None:
    with pytest.raises(ConfigError, match=r"gd: diverged at iterate \d+: lower learning_rate 100000"):
        run(solve(GD(learning_rate=1e5), problem_of(SquaredHinge(), 2), max_iterations=1000))


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        (LBFGS, {"tol": -1}, "lbfgs: tol -1 must be"),
        (LBFGS, {"memory": 0}, "lbfgs: memory 0 must be at least 1"),
        (GD, {"learning_rate": -0.1}, "gd: learning_rate -0.1 must be"),
    ],
)
def test_settings_out_of_range(kind: type[Any], options: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        kind(**options)


# --- the line search -------------------------------------------------------------------------------------------


def ray_of(objective: Objective, seed: int, *, uphill: bool = False) -> Ray:
    random = create_generator(seed)
    matrix = torch.randn(60, 4, generator=random, dtype=torch.float64)
    targets = torch.where(torch.rand(60, 1, generator=random) < 0.5, 1.0, -1.0).to(torch.float64)
    problem = Problem(InMemoryProducts(matrix), objective, targets)
    weights = torch.randn(problem.shape, generator=random, dtype=torch.float64)
    margins = run(problem.compute_margins(weights))
    _, slopes = objective.compute_loss(margins, targets)
    gradient = problem.compute_penalty(weights)[1] + run(problem.multiply_transposed(slopes))
    direction = gradient if uphill else -gradient
    return Ray(problem, weights, margins, direction, run(problem.compute_margins(direction)))


@given(
    objective=st.sampled_from([Logistic(), SquaredHinge(), Logistic(C=1e3)]),
    seed=st.integers(0, 1000),
    guess=st.floats(-7, 3).map(lambda power: 10**power),
)
def test_both_conditions_hold(objective: Objective, seed: int, guess: float) -> None:
    ray = ray_of(objective, seed)
    start = ray.evaluate_at(0.0)
    found = strong_wolfe(ray, start, guess)
    assert found is not None
    assert found.objective <= start.objective + 1e-4 * found.length * start.slope + 1e-10
    assert abs(found.slope) <= 0.1 * abs(start.slope)
    assert found.objective == pytest.approx(ray.evaluate_at(found.length).objective, rel=1e-12)


@given(seed=st.integers(0, 1000))
def test_slopes_are_derivatives(seed: int) -> None:
    ray = ray_of(Logistic(), seed)
    step = 1e-6
    below, above = (ray.evaluate_at(0.01 + sign * step).objective for sign in (-1, 1))
    assert ray.evaluate_at(0.01).slope == pytest.approx((above - below) / (2 * step), rel=1e-3, abs=1e-4)


def test_uphill_nothing_is_found() -> None:
    ray = ray_of(Logistic(), 0, uphill=True)
    assert strong_wolfe(ray, ray.evaluate_at(0.0), 1.0) is None
