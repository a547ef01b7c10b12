"""Gradient descent by coded products against the same by the whole matrix, iterate by iterate, on a9a."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from farflung.coded import GD, HeldProducts, Hinge, Logistic, Objective, Problem, solve
from farflung.coded.coordinator import Coordinator
from farflung.coded.parts import partitioned
from farflung.coded.solvers import GDState
from farflung.data import a9a
from farflung.data.source import find
from farflung.faults import FaultPlan
from tests.coded.problems import run
from tests.coded_runs import Run
from tests.covering import thorough

PARTITIONS, DEVICES = 6, 9
ITERATIONS = 40
EXACT = 1e-9
SLOW = 1000
"""So many times slower than the others, so that one's answers are always decoded from theirs."""


@pytest.fixture(scope="module")
def samples() -> tuple[Tensor, Tensor]:
    """The whole training set of a9a in float64, and targets of -1 and 1."""
    if find(a9a.SOURCE) is None:
        pytest.skip("a9a is not at hand")
    train, _ = a9a.load()
    return train.inputs.to(torch.float64), train.targets.to(torch.float64)[:, None]


def descent(problem: Problem, rate: float, seen: Callable[[Tensor], object]) -> Any:
    """Tells the weights of every iterate."""

    def tell(state: GDState) -> None:
        seen(state.weights)

    return solve(GD(learning_rate=rate, tol=1e-300), problem, max_iterations=ITERATIONS, tell=tell)


RATES: dict[Objective, float] = {Logistic(): 1.5e-5, Hinge(): 2e-7}


LOGISTIC, HINGE = RATES


@pytest.mark.parametrize(
    ("objective", "transposed", "code"),
    [
        (LOGISTIC, "columns", "rlnc"),
        (HINGE, "columns", "mds"),
        *thorough((LOGISTIC, "repair", "mds"), (HINGE, "repair", "rlnc")),
    ],
)
def test_every_iterate_is_that_without_a_code(
    objective: Objective, transposed: str, code: str, samples: tuple[Tensor, Tensor]
) -> None:
    """Two devices with data are slow, so that products are decoded, and a third is lost on the way."""
    (features, targets), rate = samples, RATES[objective]
    due: list[Tensor] = []
    run(descent(Problem(HeldProducts(features), objective, targets), rate, due.append))

    rows = partitioned(len(features), PARTITIONS)
    faults = FaultPlan().slow(1, factor=SLOW, at_s=0).slow(4, factor=SLOW, at_s=0).crash(2, at_s=30.0)
    coded = Run(
        PARTITIONS,
        DEVICES,
        faults=faults,
        settings={"code": code, "transposed": transposed},
        data=lambda number: (features[rows[number]], targets[rows[number], 0]),
    )
    found: list[Tensor] = []

    async def body(coordinator: Coordinator) -> None:
        labels = torch.cat([one.labels for one in coordinator.settle()])[:, None]
        await descent(Problem(coordinator, objective, labels), rate, found.append)

    seen = coded(body)
    assert len(found) == len(due) == ITERATIONS + 1
    assert not due[-1].allclose(due[-2], rtol=1e-4, atol=0), "it is still on its way"
    errors = [
        float((one - other).norm() / other.norm()) for one, other in zip(found[1:], due[1:], strict=True)
    ]
    assert max(errors) < EXACT
    assert max(errors) > 0, "something was decoded"
    assert len(seen.notes.of("gone")) == 1
