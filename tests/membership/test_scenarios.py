"""Scenarios of other libraries' tests of fault tolerance, in virtual time: which ranks end, and with what parameters.

They are those of torchft's ``manager_integ_test`` and ``local_sgd_integ_test``, and of PyTorch's
``test_c10d_fault_tolerance``; a run of two whose senior is lost stops, since nothing is certified in virtual time.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from benchmarks.elastic.run import SCHEDULES
from farflung.errors import ConfigError
from farflung.faults import FaultPlan
from tests.covering import diagonal
from tests.membership.test_elastic import check, run

PLAN = FaultPlan()
ALL = (0, 1, 2)
SCENARIOS: dict[str, tuple[FaultPlan, list[tuple[int, ...]]]] = {
    "rank 0 fails at step 2": (PLAN.crash(0, at_step=2), [ALL, (1, 2)]),
    "both ranks fail at different steps, two join": (
        PLAN.join(2, at_step=1).join(3, at_step=1).crash(1, at_step=16).crash(0, at_step=24),
        [(0, 1), (0, 1, 2, 3), (0, 2, 3), (2, 3)],
    ),
    "a joiner comes while all train": (PLAN.join(3, at_s=0.1), [ALL, (*ALL, 3)]),
    "a joiner comes late": (PLAN.join(2, at_s=0.3), [(0, 1), ALL]),
    "the last rank is lost": (PLAN.crash(2, at_step=4), [ALL, (0, 1)]),
    "the middle rank is lost": (PLAN.crash(1, at_step=4), [ALL, (0, 2)]),
    "down to one and up again": (
        PLAN.crash(2, at_step=2).crash(1, at_step=4).join(3, at_step=5).join(4, at_step=14),
        [ALL, (0, 1), (0,), (0, 3), (0, 3, 4)],
    ),
    "two groups are parted": (PLAN.cut(0, group=(1,), at_step=4), [(*ALL, 3, 4), (2, 3, 4)]),
    "halves are parted": (PLAN.cut(0, group=(1,), at_step=4), [(*ALL, 3), (0, 1)]),
}
"""What befalls a run, and the members that take its samples one after the other; the last ones come to its end."""


def recipe_of(schedule: str, codec: str = "int8") -> str:
    return f"synchronous(schedule='{schedule}', codec='{codec}')"


@diagonal("name, schedule", SCENARIOS, SCHEDULES)
def test_those_that_are_left_end_with_one_model(name: str, schedule: str) -> None:
    faults, views = SCENARIOS[name]
    ended = run(1 + max(map(max, views)), faults, recipe_of(schedule), steps=32)
    assert ended.error is None
    assert tuple(replica.runtime.comm.rank for replica in ended.survivors) == views[-1]
    elastic: Any = ended.survivors[0].runtime.elastic
    assert [change.ranks for change in elastic.changes] == views
    check(ended)


@diagonal("name, schedule", ["two groups are parted", "halves are parted"], SCHEDULES)
def test_the_ranks_that_are_parted_from_the_majority_stop_by_name(name: str, schedule: str) -> None:
    faults, (before, left) = SCENARIOS[name]
    for replica in run(len(before), faults, recipe_of(schedule)).replicas:
        elastic: Any = replica.runtime.elastic
        assert (elastic.agreement.error is None) == (replica.runtime.comm.rank in left)
        assert elastic.agreement.error is None or "no agreement on view 2; connected: " in str(
            elastic.agreement.error
        )


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_an_exchange_that_fails_is_made_again_with_the_same_bits(schedule: str) -> None:
    recipe = recipe_of(schedule, "error_feedback(topk(density=0.25))")
    plain, ended = run(3, PLAN, recipe), run(3, PLAN.reset(0, at_step=1), recipe)
    elastic: Any = ended.replicas[0].runtime.elastic
    assert elastic.view_number == 2
    assert elastic.roster.view.members == ("0", "1", "2")
    assert len(ended.models) == 3
    for model in ended.models:
        assert all(torch.equal(model[name], tensor) for name, tensor in plain.models[0].items())
    check(ended)


def test_the_rank_of_a_replica_that_was_lost_is_not_used_again() -> None:
    with pytest.raises(ConfigError, match="rank 1 comes in again"):
        run(3, PLAN.crash(1, at_step=3).join(1, at_step=6))
