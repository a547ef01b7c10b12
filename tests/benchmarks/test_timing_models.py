"""The timing models: their equations, their limits, and what virtual time says."""

from __future__ import annotations

import math

import pytest

from benchmarks.delayed.model import delayed_s, fedavg_s, scalability, synchronous_s
from benchmarks.pipe_sgd.model import Cluster, period_s, ring_s, server_s
from farflung.errors import ConfigError
from farflung.sim import LinkModel
from tests.covering import thorough
from tests.schedules.runs import Run

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


# --- the same in virtual time -----------------------------------------------------------------------------------


def timed(schedule: str, latency: float, bandwidth: float = math.inf) -> float:
    """Seconds of each step of two replicas that compute for 0.1 s, over a multiple of every cycle here."""
    run = Run(schedule, 2, {"collective": "direct"}, LinkModel(latency, bandwidth), 0.1 / 12).steps(180)
    ends = [float(event["t"]) for event in run.step_events()]  # type: ignore[arg-type]
    return (ends[-1] - ends[-121]) / 120


@pytest.mark.parametrize("width", [1, 2, 3])
@pytest.mark.parametrize("bandwidth", [20e3, *thorough(2e3)])
def test_a_pipeline_takes_its_period(width: int, bandwidth: float) -> None:
    busy = timed("synchronous", 0.0, bandwidth) - 0.1
    assert timed(f"pipelined({width})", 0.0, bandwidth) == pytest.approx(period_s(0.1, busy, width))


@pytest.mark.parametrize(("delay", "period"), [(0, 1), (3, 1), (5, 4), (14, 5)])
@pytest.mark.parametrize("latency", [0.05, *thorough(0.35)])
def test_a_delay_takes_its_period(delay: int, period: int, latency: float) -> None:
    took = timed("synchronous", latency) - 0.1
    found = timed(f"delayed({delay}, {period})", latency)
    assert found == pytest.approx(delayed_s(0.1, took, delay=delay, period=period))


def test_bad_input_is_refused() -> None:
    for make in (
        lambda: Cluster(0),
        lambda: Cluster(2, alpha_s=-1.0),
        lambda: period_s(1.0, 1.0, 0),
        lambda: delayed_s(0.1, 0.1, delay=-1),
        lambda: fedavg_s(0.1, 0.1, period=0),
    ):
        with pytest.raises(ConfigError):
            make()
