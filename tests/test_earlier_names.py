"""Names of 0.1 still work, each with a warning that says what stands in its place; until 0.3."""

from __future__ import annotations

import warnings
from importlib import import_module

import pytest
import torch

from farflung import attach
from farflung.wall import LaunchEnv

MOVED = {
    ("runtime", "decisions"): "DecisionLog decision_json read_decisions",
    ("runtime", "sim"): "FleetTimes VirtualClock VirtualRuntime VirtualWorld time_fleet",
    ("runtime", "wall"): "Pace WallRuntime interface_to_master measured_network",
    ("comm", "sim"): "LinkModel VirtualCommunicator VirtualNetwork",
    ("timing", "calibration"): (
        "Calibration CodingTask MessageCosts Sharing Spread calibrate coding_points coding_tasks company "
        "forward_flops ladder message_costs peak_nbytes tensors_like"
    ),
    ("timing", "sim"): (
        "Costs Move RecordedReplica Retimed Timeline Traffic TrafficRecorder retimed_events timeline"
    ),
}


@pytest.mark.parametrize(("before", "now"), MOVED, ids="-".join)
def test_a_name_that_has_moved_is_given_from_where_it_is(before: str, now: str) -> None:
    earlier, home = import_module(f"farflung.{before}"), import_module(f"farflung.{now}")
    for name in MOVED[before, now].split():
        said = rf"farflung\.{before}\.{name} is now farflung\.{now}\.{name}; .* 0\.3"
        with pytest.warns(DeprecationWarning, match=said) as found:
            assert getattr(earlier, name) is getattr(home, name)
        assert [warning.filename for warning in found] == [__file__]


def test_from_imports_warn_where_they_stand() -> None:
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("default")
        from farflung.comm import VirtualNetwork  # type: ignore[attr-defined]  # noqa: F401
        from farflung.runtime import Seat
    assert Seat is LaunchEnv
    assert [warning.filename for warning in found] == [__file__, __file__]


def test_a_name_that_never_was_is_no_attribute() -> None:
    for module in ("comm", "runtime", "timing"):
        with pytest.raises(AttributeError, match="Nothing"):
            _ = import_module(f"farflung.{module}").Nothing


def test_a_seat_is_a_launch_environment() -> None:
    with pytest.warns(DeprecationWarning, match=r"LaunchEnv\.read"):
        assert LaunchEnv.taken({"RANK": "1", "WORLD_SIZE": "2"}) == LaunchEnv(1, 2, 1, 2)
    model = torch.nn.Linear(2, 1)
    with pytest.warns(DeprecationWarning, match="launch_env=") as found:
        attach(model, torch.optim.SGD(model.parameters(), lr=0.1), seat=LaunchEnv(0, 1, 0, 1)).finish()
    assert [warning.filename for warning in found] == [__file__]
