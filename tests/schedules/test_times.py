"""What schedules hide, in virtual time, to the digit."""

from __future__ import annotations

import pytest

from farflung.comm import predict_cost_s
from farflung.network import NetworkProfile
from farflung.sim import LinkModel
from farflung.types import Decision
from farflung.workloads import Quadratic
from tests.schedules.runs import Run

pytestmark = pytest.mark.usefixtures("unframed")

DIM = 2_000
NBYTES = 4 * DIM
RIDER = 6 * 8
"""Weight, loss, non-finite losses and whose, stops."""


def period(run: Run, first: int, last: int) -> float:
    """Seconds for each step, from the end of one to that of another."""
    times = [float(event["t"]) for event in run.steps(last + 1).step_events()]  # type: ignore[arg-type]
    return (times[last] - times[first]) / (last - first)


def run_of(schedule: str, compute_s: float, link: LinkModel, size: int = 4) -> Run:
    """Steps of ``compute_s`` seconds, of one bucket that is ready at the end."""
    samples = 1
    return Run(
        schedule,
        size,
        {"collective": "direct"},
        link,
        compute_s / 3 / samples,
        workload=lambda: Quadratic(dim=DIM, samples=16),
        settings={"batch_size": samples, "steps": 99},
    )


@pytest.mark.parametrize("width", [1, 2, 3])
@pytest.mark.parametrize("ratio", [0.25, 1.0, 2.5])
def test_a_pipelined_step_takes_the_longest_of_three(width: int, ratio: float) -> None:
    """max(A, C, (A + C) / K) where all of C is bytes."""
    link = LinkModel(0.0, 4e5)
    c = predict_cost_s(NetworkProfile.create_uniform(link, 4), "direct", NBYTES, metadata_nbytes=RIDER)
    a = c / ratio
    found = period(run_of(f"pipelined({width})", a, link), 6, 18)
    assert found == pytest.approx(max(a, c, (a + c) / width), rel=1e-6)


@pytest.mark.parametrize("width", [1, 2, 3, 5])
def test_where_an_exchange_is_latency_a_wider_pipeline_hides_more(width: int) -> None:
    """Latency keeps no link busy: a step takes max(A, (A + C) / K)."""
    a, latency = 0.1, 0.125
    found = period(run_of(f"pipelined({width})", a, LinkModel(latency), 2), 10, 10 + 6 * width)
    assert found == pytest.approx(max(a, (a + 2 * latency) / width), rel=1e-9)


@pytest.mark.parametrize("delay", [0, 1, 3, 4, 8])
def test_a_delay_hides_latency_that_it_covers_and_no_more(delay: int) -> None:
    """Two latencies of 0.15 s under ``delay`` steps of 0.1 s; what sticks out is waited for once in a delay."""
    a, latency = 0.1, 0.15
    found = period(run_of(f"delayed({delay})", a, LinkModel(latency), 2), 10, 10 + 3 * (delay + 1))
    assert found == pytest.approx(max(a, (a + 2 * latency) / (delay + 1)), rel=1e-9)
    waited = run_of(f"delayed({delay})", a, LinkModel(latency), 2).steps(12).step_events()[-1]["exposed_s"]
    assert (waited == pytest.approx(0.0, abs=1e-12)) == (delay >= 3)


@pytest.mark.parametrize(("period_", "fits"), [(1, False), (4, False), (5, True)])
def test_bytes_are_hidden_if_a_block_is_long_enough_for_them(period_: int, fits: bool) -> None:
    a = 0.1
    busy = predict_cost_s(
        NetworkProfile.create_uniform(LinkModel(0.0, 1e6), 2), "direct", NBYTES, metadata_nbytes=RIDER
    )
    link = LinkModel(0.2, 1e6 * busy / (4.5 * a))
    found = period(run_of(f"delayed(16, {period_})", a, link, size=2), 39, 159)
    # Where they do not fit, the links are busy all the time; the two halves of exchanges meet in turns.
    assert found == pytest.approx(a if fits else 4.5 * a / period_, rel=1e-6 if fits else 0.02)


def test_a_delay_of_its_own_choice_covers_what_was_measured() -> None:
    a, latency = 0.1, 0.17
    run = run_of("delayed('auto')", a, LinkModel(latency), size=2).steps(30)
    found: list[Decision] = run.world.decisions.entries
    assert [(decision.name, decision.step) for decision in found] == [("times", 3)]
    assert found[0].value["exchange_s"] == pytest.approx(2 * latency)  # type: ignore[index, call-overload]
    assert found[0].value["step_s"] == pytest.approx(a)  # type: ignore[index, call-overload]
    for replica in run.replicas:
        assert replica.engine._schedule_state["delay"] == 4
    events = run.step_events()
    assert all(event["exposed_s"] == pytest.approx(0.0, abs=1e-12) for event in events[10:])
    assert all(event["exposed_s"] == pytest.approx(2 * latency) for event in events[:3])


def test_events_tell_of_every_exchange() -> None:
    run = run_of("delayed(4, 2)", 0.1, LinkModel(0.03), size=2).steps(10).flush()
    told = [event for event in run.events[1] if event["event"] == "exchange"]
    assert [(event["step"], event["due_step"]) for event in told] == [
        (1, 5),
        (3, 7),
        (5, 9),
        (7, 11),
        (9, 13),
    ]
    for event in told:
        assert event["t"] == pytest.approx(float(event["began_s"]) + 0.06)  # type: ignore[arg-type]
        assert event["bytes_sent"] == NBYTES + RIDER
    assert [event["in_flight"] for event in run.step_events()] == [0, 1, 1, 2, 2, 2, 2, 2, 2, 2]
