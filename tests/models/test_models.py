"""Laws that hold for any model, whatever its tensors: DDP's gradients, means for evaluation, checkpoints."""

from __future__ import annotations

from importlib.util import find_spec
from itertools import cycle
from typing import Any

import pytest
import torch

from tests.covering import thorough
from tests.models.architectures import ARCHITECTURES
from tests.pool import Pool

RECIPES = {
    "delayed": "delayed(schedule=delayed(delay=2))",
    "diloco": "diloco(schedule=diloco(sync_every=3))",
    "topk": "synchronous(codec=error_feedback(topk(0.01)))",
    "int8": "synchronous(codec=int8)",
    "local_sgd": "local_sgd(schedule=local_sgd(sync_every=3))",
}
AVERAGED = list(zip(ARCHITECTURES, cycle(RECIPES)))
"""Each model under a recipe, in turn."""
RESUMED = list(zip(ARCHITECTURES, cycle(("delayed", "diloco", "topk"))))
"""Each model where a checkpoint has updates under way, an anchor or residuals, in turn."""


def run_pair(pool: Pool, job: str, name: str, **arguments: str) -> list[Any]:
    """Returns what a job gives on two replicas; skips the test where the model's library is not installed."""
    if ARCHITECTURES[name].needs_transformers and find_spec("transformers") is None:
        pytest.skip("transformers is not installed: see the extra transformers")
    return pool.run(2, f"tests.models.jobs.{job}", name=name, **arguments)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_a_model_trains_as_under_ddp(pool: Pool, name: str) -> None:
    one, other = run_pair(pool, "equals_ddp", name)
    assert one == other
    assert one["hook"] == one["ddp"]
    assert one["attach"] == one["ddp"]
    assert one["tensors"] >= ARCHITECTURES[name].least_tensors


@pytest.mark.parametrize(
    ("name", "how"),
    [
        *AVERAGED,
        *thorough(*((name, "local_sgd") for name in ARCHITECTURES if (name, "local_sgd") not in AVERAGED)),
    ],
)
def test_only_what_trains_is_averaged(pool: Pool, name: str, how: str) -> None:
    one, other = run_pair(pool, "averages", name, how=RECIPES[how])
    for key in ("inside", "end"):
        assert one[key] == other[key]
    for key in ("changed", "lost"):
        assert one[key] == other[key] == []
    statistics = (one["own statistics"], other["own statistics"], one["mean statistics"])
    for first, second, mean in zip(*statistics, strict=True):
        torch.testing.assert_close(mean, (first + second) / 2)


@pytest.mark.parametrize(("name", "how"), RESUMED)
def test_a_model_goes_on_from_a_checkpoint(pool: Pool, name: str, how: str) -> None:
    for whole, resumed in run_pair(pool, "resumes", name, how=RECIPES[how]):
        assert resumed == whole
