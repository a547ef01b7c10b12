"""The timing models: their equations, their limits, and what virtual time says."""

from __future__ import annotations

import pytest

from benchmarks.delayed.model import delayed_s, fedavg_s, scalability, synchronous_s
from benchmarks.pipe_sgd.model import Cluster, period_s, ring_s, server_s
from farflung.errors import ConfigError
from farflung.schedules import Delayed, Pipelined, Synchronous
from farflung.sim import Costs, LinkModel, timeline
from farflung.types import Bucket, Schedule, TensorSpec
from tests.schedules.runs import Run

ONE = [Bucket(0, TensorSpec((1,)))]


def played(schedule: Schedule, compute_s: float, latency_s: float, busy_s: float, steps: int = 300) -> float:
    """The period, over a multiple of every cycle here."""
    costs = Costs(compute_s / 3, 2 * compute_s / 3, latency_s=latency_s, busy_s=lambda _: busy_s)
    return timeline(schedule, ONE, costs, steps).period_s(120)


# --- equations --------------------------------------------------------------------------------------------------


def test_the_server_pays_more_than_the_ring_by_the_factor_of_the_model() -> None:
    for p in (2, 4, 16):
        cluster = Cluster(p, beta_s=1e-9)
        assert server_s(cluster, 1e8) / ring_s(cluster, 1e8) == pytest.approx(p**2 / (p - 1))
    assert ring_s(Cluster(1, 1.0, 1.0, 1.0, 1.0), 1e9) == 0.0


def test_width_2_is_as_good_as_any_larger() -> None:
    for a, c in [(1.0, 0.2), (1.0, 1.0), (0.3, 2.0)]:
        assert period_s(a, c) == a + c
        assert period_s(a, c, 2) == max(a, c) == period_s(a, c, 5)
        assert period_s(a, c, 4, limited=False) == (a + c) / 4
        assert 1 <= period_s(a, c) / period_s(a, c, 2) <= 2


@pytest.mark.parametrize(("latency", "busy", "delay"), [(0.479, 0.0, 2), (0.635, 0.25, 3)])
def test_a_delay_hides_what_it_is_as_long_as(latency: float, busy: float, delay: int) -> None:
    assert delayed_s(0.3, latency, busy, delay=delay) == 0.3
    assert delayed_s(0.3, latency, busy, delay=delay - 1) > 0.3
    assert delayed_s(0.3, 1.0, 0.2, delay=0) == pytest.approx(synchronous_s(0.3, 1.0, 0.2))
    assert delayed_s(0.3, 1.0, 0.2, delay=0, period=4) == pytest.approx(fedavg_s(0.3, 1.0, 0.2, period=4))
    assert scalability(0.3, synchronous_s(0.3, 29.7)) == pytest.approx(0.01)


# --- the same from transfers ------------------------------------------------------------------------------------


@pytest.mark.parametrize("width", [1, 2, 3])
@pytest.mark.parametrize(("a", "c"), [(1.0, 0.3), (1.0, 1.0), (0.5, 2.0)])
def test_a_pipeline_played_takes_its_period(width: int, a: float, c: float) -> None:
    assert played(Pipelined(width), a, 0.0, c) == pytest.approx(period_s(a, c, width))


@pytest.mark.parametrize(("delay", "period"), [(0, 1), (3, 1), (2, 4), (4, 4), (5, 4), (11, 4), (14, 5)])
@pytest.mark.parametrize(("latency", "busy"), [(0.0, 0.0), (0.35, 0.0), (1.25, 0.05), (0.1, 0.15)])
def test_a_delay_played_takes_its_period(delay: int, period: int, latency: float, busy: float) -> None:
    found = played(Delayed(delay, period), 0.1, latency, busy)
    assert found == pytest.approx(delayed_s(0.1, latency, busy, delay=delay, period=period))


def test_gradients_leave_before_the_optimizer() -> None:
    costs = Costs(0.1, 0.2, 0.1, latency_s=0.3)
    gradients = timeline(Pipelined(2), ONE, costs, 5).moves[0]
    updates = timeline(Delayed(1), ONE, costs, 5).moves[0]
    assert (gradients.began_s, updates.began_s) == pytest.approx((0.3, 0.4))


def test_buckets_leave_while_backward_goes_on() -> None:
    buckets = [Bucket(index, TensorSpec((1,))) for index in range(4)]
    costs = Costs(0.1, 0.4, busy_s=lambda _: 0.15)
    run = timeline(Synchronous(), buckets, costs, 2)
    assert [move.began_s for move in run.moves[:4]] == pytest.approx([0.2, 0.3, 0.4, 0.5])
    assert run.ends_s[0] == pytest.approx(0.2 + 4 * 0.15)


def test_coding_takes_turns_beside_backward_and_the_network() -> None:
    buckets = [Bucket(index, TensorSpec((1,))) for index in range(2)]
    costs = Costs(
        0.1, 0.4, latency_s=0.05, busy_s=lambda _: 0.1, encode_s=lambda _: 0.3, decode_s=lambda _: 0.02
    )
    run = timeline(Synchronous(), buckets, costs, 1)
    assert [move.began_s for move in run.moves] == pytest.approx([0.3, 0.5])
    # Encoded by 0.6 and sent by 0.7, there at 0.75; the second is encoded by 0.9, and only then is the first decoded.
    assert [move.ended_s for move in run.moves] == pytest.approx([0.92, 1.07])


@pytest.mark.parametrize(
    "schedule",
    ["synchronous", "pipelined(2)", "pipelined(4)", "delayed(2)", "delayed(3, 2)", "delayed('auto')"],
)
@pytest.mark.parametrize("latency", [0.02, 0.11, 0.3])
def test_transfers_played_end_when_virtual_time_says(schedule: str, latency: float) -> None:
    """An exchange on two replicas, of latency alone."""
    run = Run(schedule, 2, {"collective": "direct"}, LinkModel(latency), 0.1 / 12).steps(30)
    exchange = [event for event in run.events[0] if event["event"] == "exchange"]
    took = float(exchange[0]["t"]) - float(exchange[0]["began_s"])  # type: ignore[arg-type]
    costs = Costs(0.1 / 3, 0.2 / 3, latency_s=took)
    wanted = timeline(run.replicas[0].parts.schedule, ONE, costs, 30).ends_s
    assert [event["t"] for event in run.step_events()] == pytest.approx(wanted)


def test_bad_input_is_refused() -> None:
    for make in (
        lambda: Cluster(0),
        lambda: Cluster(2, alpha_s=-1.0),
        lambda: period_s(1.0, 1.0, 0),
        lambda: delayed_s(0.1, 0.1, delay=-1),
        lambda: fedavg_s(0.1, 0.1, period=0),
        lambda: timeline(Synchronous(), ONE, Costs(0.1, 0.1), 3).period_s(3),
    ):
        with pytest.raises(ConfigError):
            make()
