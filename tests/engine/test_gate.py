"""The gate between exchanges and samples that change owner."""

from __future__ import annotations

from farflung.engine.gate import LinkGate
from farflung.sim import VirtualWorld


def gates(*, under_way: bool, overlaps: bool) -> tuple[VirtualWorld, LinkGate]:
    world = VirtualWorld(1)
    return world, LinkGate(world.runtimes[0], lambda: under_way, has_overlap=overlaps)


def opened(world: VirtualWorld, gate: LinkGate, rest_s: float = 0.0) -> float:
    return world.run([gate.wait_open(rest_s)])[0]


def test_it_is_open_at_first_and_whenever_nobody_has_shut_it() -> None:
    world, gate = gates(under_way=True, overlaps=False)
    assert opened(world, gate) == 0.0
    gate.release()
    assert opened(world, gate) == 0.0


def test_who_comes_while_it_is_shut_waits() -> None:
    world, gate = gates(under_way=False, overlaps=False)
    gate.close()
    gate.close()
    world.clock.call_at(2.0, gate.release)
    assert opened(world, gate) == 2.0
    assert opened(world, gate) == 2.0


def test_who_waits_goes_on_waiting_where_it_was_open_for_no_time() -> None:
    world, gate = gates(under_way=False, overlaps=False)
    gate.close()

    def for_no_time() -> None:
        gate.release()
        gate.close()

    world.clock.call_at(1.0, for_no_time)
    world.clock.call_at(3.0, gate.release)
    assert opened(world, gate) == 3.0


def test_rests_are_for_exchanges_that_nobody_waits_for() -> None:
    for under_way, overlaps, rested_s in [(True, True, 0.5), (False, True, 0.0), (True, False, 0.0)]:
        world, gate = gates(under_way=under_way, overlaps=overlaps)
        assert opened(world, gate, 0.5) == rested_s
        world, gate = gates(under_way=under_way, overlaps=overlaps)
        gate.close()
        world.clock.call_at(0.25, gate.release)
        assert opened(world, gate, 0.5) == max(0.25, rested_s)
