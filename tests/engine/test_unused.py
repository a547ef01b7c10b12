"""Parameters that no loss ever reaches stay as they are, whatever carries the others, and cost next to nothing."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import farflung
from farflung.codecs import CODECS
from farflung.engine.buckets import build_buckets
from farflung.engine.units import UnitState
from farflung.engine.unused import UnusedParameters
from farflung.recipes import Recipe
from farflung.reducers import REDUCERS
from farflung.types import Bucket, CodecState, StateSlot, TensorSpec

PARTS = [
    *({"codec": codec} for codec in sorted(CODECS)),
    {"codec": "error_feedback(sign())"},
    *({"reducer": reducer} for reducer in sorted(set(REDUCERS) - {"codec", "gradiveq"})),
    {"reducer": "gradiveq(warm_up=0, sample_steps=2)"},
    {"schedule": "pipelined(2)"},
    {"schedule": "delayed(2)"},
    {"schedule": "delayed(2, pull='swap')"},
]


class Spare(nn.Module):
    """Two layers of which one is used."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.spare = nn.Linear(6, 2), nn.Conv2d(6, 2, 3)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.used(x)
        return y


def task(model: type[nn.Module]) -> farflung.TorchWorkload:
    points = torch.randn(64, 6, generator=torch.Generator().manual_seed(0))
    data = TensorDataset(points, (points.sum(dim=1) > 0).long())
    return farflung.TorchWorkload(model, data, data, nn.functional.cross_entropy)


def trained(model: type[nn.Module], steps: int, **parts: str) -> farflung.Run:
    return farflung.simulate(
        lambda: task(model),
        Recipe(**parts),  # type: ignore[arg-type]
        network="wifi-10mbps",
        workers=3,
        steps=steps,
        batch_size=8,
        weight_decay=0.1,
    )


@functools.cache
def begun() -> dict[str, Tensor]:
    """The parameters after a step of synchronous SGD."""
    return trained(Spare, 1).state_dict()


def sent(steps: int) -> int:
    found = trained(Spare, steps).summary["bytes_sent_per_replica"]
    assert isinstance(found, int)
    return found


@pytest.mark.filterwarnings("ignore:.* had no part in the loss")
@pytest.mark.parametrize("parts", PARTS, ids=lambda parts: " ".join(parts.values()))
def test_a_spare_layer_stays_as_it_is(parts: dict[str, str]) -> None:
    first, last = begun(), trained(Spare, 6, **parts).state_dict()
    for name in ("spare.weight", "spare.bias"):
        assert torch.equal(first[name], last[name])
    assert not torch.equal(first["used.weight"], last["used.weight"])


@pytest.mark.filterwarnings("ignore:.* had no part in the loss")
def test_what_is_lacked_is_told_once() -> None:
    one, two, three = (sent(steps) for steps in (1, 2, 3))
    assert one > two - one == three - two > 0


def unit_of(*counts: int) -> UnitState:
    """Returns a unit with buckets of so many parameters of one element."""
    buckets = [
        build_buckets([("", nn.Parameter(torch.zeros(1))) for _ in range(count)])[0] for count in counts
    ]
    state = StateSlot(CodecState({}, {}))
    return UnitState(0, Bucket(0, TensorSpec((sum(counts),), torch.float32)), tuple(buckets), state)


def test_places_of_a_unit_are_those_of_its_buckets() -> None:
    unit = unit_of(3, 3)
    assert not unit.zero_places
    unit.buckets[0].zero_places, unit.buckets[1].zero_places = (0, 2), (1,)
    assert unit.zero_places == (0, 2, 4)
    unused = UnusedParameters()
    unused.load_state_dict({"common": {"0": [0, 2, 4]}, "unreached": {"0": [2]}}, {})
    unused.update(unit)
    assert [bucket.unused_places for bucket in unit.buckets] == [{0, 2}, {1}]
    assert [bucket.unreached_places for bucket in unit.buckets] == [{2}, set()]


def test_nothing_is_worked_out_anew_where_nothing_has_changed() -> None:
    """A step costs the same for many unused parameters as for few."""
    unit, unused = unit_of(4), UnusedParameters()
    unused.update(unit)
    before = unit.buckets[0].unused_places
    unused.update(unit)
    assert unit.buckets[0].unused_places is before
