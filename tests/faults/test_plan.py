"""Fault plans: what they may say, where they come from, and when an injector strikes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from farflung.errors import ConfigError, UnknownName, Unsupported
from farflung.faults import (
    FAULTS,
    TEMPORARY_KINDS,
    ActiveFaults,
    Fault,
    FaultEnvironment,
    FaultInjector,
    FaultPlan,
    LinkCondition,
    load_faults,
)


def test_methods_make_the_faults_of_their_names() -> None:
    plan = FaultPlan()
    for kind in FAULTS:
        more = {"slow": {"factor": 2.0}, "throttle": {"bandwidth_bps": 1e6}, "lose": {"loss": 0.1}}.get(
            kind, {}
        )
        plan = getattr(plan, kind)(
            1, at_step=3, **more, **({"for_s": 2.0} if kind in TEMPORARY_KINDS else {})
        )
    assert [fault.kind for fault in plan.faults] == list(FAULTS)
    assert {(fault.rank, fault.at_step, fault.at_s) for fault in plan.faults} == {(1, 3, None)}
    assert {fault.kind for fault in plan.faults if fault.for_s == 2.0} == set(TEMPORARY_KINDS)
    assert FaultPlan().cut(0, 2, at_s=1.5).faults == (Fault("cut", 0, at_s=1.5, peer=2),)
    assert FaultPlan().reset(0, group=(1,), at_s=1.5).faults == (Fault("reset", 0, at_s=1.5, group=(1,)),)
    assert FaultPlan().restore(0, 2, at_s=1.5).faults == (Fault("restore", 0, at_s=1.5, peer=2),)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"kind": "burn"}, "unknown fault 'burn'; known: crash, cut, "),
        ({"kind": "corrupt"}, "unknown fault 'corrupt'; did you mean"),
        ({"rank": -1}, "rank = -1: must be 0 or more"),
        ({"at_step": None}, "at_step, at_s: give one of them"),
        ({"at_s": 1.0}, "at_step, at_s: give one of them"),
        ({"at_step": -1}, "at_step = -1: must be 0 or more"),
        ({"at_step": None, "at_s": float("nan")}, "at_s = nan: must be a number of seconds"),
        (
            {"at_step": None, "at_s": -3.0},
            "at_s = -3.0: must be a number of seconds, 0 or more; the first step",
        ),
        ({"for_s": 2.0}, "for_s = 2.0: only cut, hang, lose, slow, throttle last for a time"),
        ({"kind": "cut", "for_s": 0.0}, "for_s = 0.0: must be a number of seconds above 0"),
        ({"kind": "cut", "for_s": float("inf")}, "for_s = inf: must be a number of seconds above 0"),
        ({"factor": 2.0}, "factor = 2.0: slow needs one, and nothing else has one"),
        ({"kind": "slow"}, "factor = None: slow needs one"),
        ({"kind": "slow", "factor": 0.0}, "factor = 0.0: must be above 0"),
        ({"kind": "throttle"}, "bandwidth_bps = None: throttle needs one"),
        ({"kind": "throttle", "bandwidth_bps": 0.0}, "bandwidth_bps = 0.0: must be above 0"),
        ({"kind": "throttle", "bandwidth_bps": float("nan")}, "bandwidth_bps = nan: must be above 0"),
        ({"loss": 0.1}, "loss = 0.1: lose needs one, and nothing else has one"),
        ({"kind": "lose"}, "loss = None: lose needs one"),
        ({"kind": "lose", "loss": 1.0}, "loss = 1.0: must be a fraction of packets"),
        ({"peer": 2}, "peer = 2: only cut, reset, throttle, lose, restore have one"),
        ({"kind": "cut", "peer": 1}, "peer = 1: must be another rank"),
        ({"group": (2,)}, "group = (2,): only cut, reset, throttle, lose, restore have one"),
        ({"one_way": True}, "one_way = True: only cut, reset, throttle, lose, restore have one"),
        ({"kind": "cut", "group": (1,)}, "group = [1]: must be other ranks than rank and peer"),
        ({"kind": "reset", "one_way": True}, "one_way: a connection is closed at both ends"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_makes_no_sense_is_refused(given: dict[str, Any], says: str) -> None:
    with pytest.raises((ConfigError, UnknownName)) as caught:
        Fault(**{"kind": "crash", "rank": 1, "at_step": 3, **given})
    assert str(caught.value).startswith(says)


def test_a_world_refuses_what_it_cannot_carry_by_name() -> None:
    plan = FaultPlan().crash(1, at_step=3).join(4, at_s=2.0)
    plan.check(5, {"crash", "join"}, "this world")
    with pytest.raises(Unsupported, match=r"join of rank 4 at 2 s: this world supports only crash"):
        plan.check(5, {"crash"}, "this world")
    with pytest.raises(ConfigError, match=r"join of rank 4 at 2 s: there are only ranks 0 to 3"):
        plan.check(4, {"crash", "join"}, "this world")
    with pytest.raises(
        ConfigError, match=r"cut of rank 0 from rank 9 at step 1: there are only ranks 0 to 3"
    ):
        FaultPlan().cut(0, 9, at_step=1).check(4, {"cut"}, "this world")


def test_who_joins_before_anything_else_is_not_there_at_the_start() -> None:
    plan = FaultPlan().join(1, at_step=5).leave(2, at_step=3).join(2, at_step=4).join(3, at_s=2.0)
    assert plan.leave(3, at_s=1.0).crash(4, at_s=0.0).joining_ranks == {1}
    assert plan.leave(3, at_s=3.0).leave(0, at_s=0.0).slow(3, factor=2.0, at_step=1).joining_ranks == {1, 3}
    with pytest.raises(ConfigError, match="rank 3 comes and goes at steps and at times"):
        _ = plan.crash(3, at_step=1).joining_ranks


def test_faults_of_a_connection_concern_both_ways() -> None:
    assert set(FaultPlan().cut(1, at_s=0.0).faults[0].iter_links(3)) == {(1, 0), (0, 1), (1, 2), (2, 1)}
    assert set(FaultPlan().lose(1, 2, loss=0.1, at_s=0.0).faults[0].iter_links(3)) == {(1, 2), (2, 1)}
    halves = FaultPlan().cut(0, group=(1,), one_way=True, at_s=0.0).faults[0]
    assert set(halves.iter_links(4)) == {(0, 2), (0, 3), (1, 2), (1, 3)}
    assert str(halves) == "cut of rank 0 and 1 one way at 0 s"


def test_faults_add_up_until_they_are_restored() -> None:
    plan = FaultPlan().throttle(1, bandwidth_bps=5.0, at_s=0.0).lose(1, loss=0.5, at_s=1.0).cut(1, at_s=2.0)
    plan = plan.hang(1, at_s=2.0).slow(1, factor=3.0, at_s=2.0)
    standing = ActiveFaults(3)
    for fault in plan.faults:
        standing.add(fault)
    assert standing.get_condition(0, 1) == standing.get_condition(1, 2) == LinkCondition(True, 0.5, 5.0)
    assert (standing.is_hung(1), standing.get_slowdown(1), standing.is_hung(0)) == (True, 3.0, False)
    for fault in FaultPlan().restore(1, 0, at_s=3.0).restore(1, at_s=4.0).faults:
        standing.add(fault)
        assert standing.get_condition(0, 1) == LinkCondition()
        assert (
            (standing.get_condition(1, 2) == LinkCondition()) == (fault.peer is None) != standing.is_hung(1)
        )
    assert standing.get_slowdown(1) == 1.0


def test_what_is_undone_uncovers_what_it_covered() -> None:
    standing = ActiveFaults(2)
    cut, slow, slower = (
        FaultPlan()
        .cut(1, at_s=0.0)
        .throttle(1, bandwidth_bps=5.0, at_s=0.0)
        .throttle(0, bandwidth_bps=2.0, at_s=1.0)
    ).faults
    for fault in (cut, slow, slower):
        standing.add(fault)
    seen = []
    for fault in (slower, cut, cut, slow):  # the second time it is undone already
        standing.remove(fault)
        seen.append(standing.get_condition(0, 1))
    through = LinkCondition(bandwidth_bps=5.0)
    assert seen == [LinkCondition(is_cut=True, bandwidth_bps=5.0), through, through, LinkCondition()]


# --- files ------------------------------------------------------------------------------------------------------


def test_a_file_is_read(tmp_path: Path) -> None:
    path = tmp_path / "faults.toml"
    path.write_text(
        '[[fault]]\nkind = "slow"\nrank = 1\nat_s = 30\nfactor = 4\n'
        '[[fault]]\nkind = "cut"\nrank = 2\nat_step = 100\npeer = 0\nfor_s = 3\n'
    )
    assert load_faults(path) == FaultPlan().slow(1, factor=4.0, at_s=30.0).cut(2, 0, at_step=100, for_s=3.0)
    path.write_text(
        '[[fault]]\nkind = "throttle"\nrank = 1\nat_s = 30\nbandwidth_bps = 1e6\n'
        '[[fault]]\nkind = "lose"\nrank = 2\nat_step = 100\npeer = 0\nloss = 0.02\n'
    )
    assert load_faults(path) == FaultPlan().throttle(1, bandwidth_bps=1e6, at_s=30.0).lose(
        2, 0, loss=0.02, at_step=100
    )


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('[[fault]]\nkind = "crash"\nat_s = 1', ": fault 1: rank is missing"),
        ('[[fault]]\nkind = "crash"\nrank = 1.5\nat_s = 1', ": fault 1: rank = 1.5: must be a whole number"),
        ('[[fault]]\nkind = "crash"\nrank = 1', ": fault 1: at_step, at_s: give one of them"),
        ('[[fault]]\nkind = "crash"\nrank = 1\nat_s = 1\nwhen = 2', ": fault 1: unknown key 'when'; known: "),
        ("[fault]\nrank = 1", ": fault = "),
        ("fautl = 1", ": unknown key 'fautl'; did you mean fault?"),
        ("[[fault", ": not TOML ("),
    ],
)
def test_one_line_names_file_and_key(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "faults.toml"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_faults(path)
    assert str(caught.value).startswith(f"{path}{says}")
    assert "\n" not in str(caught.value)


# --- when -------------------------------------------------------------------------------------------------------


class Recorder(FaultEnvironment):
    """A stage that only notes what happens."""

    def __init__(self) -> None:
        super().__init__(4)
        self.struck: list[str] = []
        self.timed: dict[float, Callable[[], None]] = {}
        self.over = False

    def read_clock(self) -> float:
        return 4.0

    def call_at(self, time_s: float, fn: Callable[[], None]) -> None:
        self.timed[time_s] = fn

    def inject(self, fault: Fault) -> None:
        self.struck.append(str(fault))

    def is_over(self) -> bool:
        return self.over

    def revert(self, fault: Fault) -> None:
        self.struck.append(f"end of {fault}")


def test_an_injector_strikes_at_times_and_after_steps() -> None:
    stage = Recorder()
    plan = FaultPlan().hang(1, at_step=2).crash(1, at_step=2).join(3, at_step=1).slow(0, factor=2, at_s=5.0)
    inject = FaultInjector(plan, stage)
    for rank, event, step in [(1, "begin", 0), (1, "step", 0), (0, "evaluation", 2), (0, "step", 1)]:
        inject({"event": event, "rank": rank, "step": step})
    assert stage.struck == []
    inject({"event": "step", "rank": 1, "step": 1})
    assert stage.struck == ["hang of rank 1 at step 2", "crash of rank 1 at step 2"]
    inject({"event": "step", "rank": 0, "step": 0})
    assert stage.struck[2:] == ["join of rank 3 at step 1"]
    stage.timed[5.0]()
    assert stage.struck[3:] == ["slow of rank 0 at 5 s"]


def test_an_injector_undoes_what_lasts_for_a_time() -> None:
    stage = Recorder()
    inject = FaultInjector(FaultPlan().cut(1, at_step=2, for_s=3.0), stage)
    inject({"event": "step", "rank": 1, "step": 1})
    assert stage.timed.keys() == {7.0}
    stage.timed[7.0]()
    assert stage.struck[1:] == ["end of cut of rank 1 at step 2 for 3 s"]


def test_a_resumed_replica_tells_its_steps_at_its_beginning() -> None:
    stage = Recorder()
    inject = FaultInjector(FaultPlan().crash(1, at_step=20), stage)
    inject({"event": "begin", "rank": 1, "step": 20})
    assert stage.struck == ["crash of rank 1 at step 20"]


def test_an_injector_warns_of_what_has_not_struck_before_the_end(caplog: pytest.LogCaptureFixture) -> None:
    stage = Recorder()
    plan = FaultPlan().cut(1, at_step=2).crash(2, at_step=9).slow(0, factor=2, at_s=5.0)
    inject = FaultInjector(plan, stage)
    inject({"event": "step", "rank": 1, "step": 1})
    stage.over = True
    stage.timed[5.0]()
    assert inject.missed_faults == plan.faults[1:]
    inject.warn_of_missed_faults()
    assert [record.getMessage() for record in caplog.records] == [
        "2 of 3 faults never struck, for the run or their replica had ended: crash of rank 2 at step 9, slow of rank 0 "
        "at 5 s"
    ]
    caplog.clear()
    FaultInjector(FaultPlan(plan.faults * 2), stage).warn_of_missed_faults()
    assert caplog.records[0].getMessage().endswith("slow of rank 0 at 5 s and 3 more")
    caplog.clear()
    FaultInjector(FaultPlan(), stage).warn_of_missed_faults()
    assert caplog.records == []
