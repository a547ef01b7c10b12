"""Coordinator and devices: exact products while devices come, go, fall silent and are lost."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from benchmarks.coded.codes import LAWS
from farflung.coded import record as record_module
from farflung.coded.blocks import MAX_CHUNK_NBYTES, BlockStore, Draft, RowBlock
from farflung.coded.coordinator import Coordinator
from farflung.coded.messages import Fetch, MalformedMessage
from farflung.coded.record import Record
from farflung.decisions import DecisionLog
from farflung.errors import BadSamples, RunLost
from farflung.faults import FaultPlan
from farflung.state_trees import save_tree
from tests.coded_runs import FEATURES, Notes, Run, Seen, part, products_agree

EXACT = 1e-9
PLAN = FaultPlan()


@pytest.mark.parametrize(
    ("code", "options"),
    [
        ("rlnc", {}),
        ("mds", {"pieces": 1}),
        (LAWS["binary"], {"transposed": "repair"}),
        ("benchmarks.coded.codes:Replication", {"pieces": 3}),
    ],
)
def test_both_products_are_exact(code: str, options: dict[str, Any]) -> None:
    seen = Run(settings={"code": code, **options})(products_agree())
    assert seen.found < EXACT
    assert not seen.coordinator.counters.num_refused
    assert not any(0 in pair for pair in seen.sent["encoding"])
    kinds = {kind for kind, pairs in seen.sent.items() if any(to == 0 for _, to in pairs)}
    assert kinds == {"members", "answers"}, "the coordinator gets no features, but labels, and products"


# --- who gets what ----------------------------------------------------------------------------------------------------


def test_an_rlnc_device_fetches_and_holds_what_it_drew_alone() -> None:
    settings = {"code": "rlnc", "redundancy": 0, "transposed": "repair"}
    run = Run(8, 12, settings=settings, data=partial(part, features=8, rows=8))
    seen = run(products_agree(1, run.data))
    blocks = [block for block in seen.coordinator.registry.list_blocks("rows") if block.raw_unknown is None]
    assert len(blocks) == 4
    for block in blocks:
        assert block.holder is not None
        drawn = {source + 1 for source in block.coefficients}
        gave = {pair for pair in seen.sent["encoding"] if pair[1] == block.holder}
        assert gave == {(rank, block.holder) for rank in drawn}
        assert run.holdings[block.holder].nbytes == 8 * 8 * 8
    assert seen.total("encoding") == 4 * 4 * 8 * 8 * 8, "balanced masks: half of the partitions each"


# --- losses -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("faults", "transposed"),
    [
        (PLAN.crash(5, at_s=0.3), "repair"),
        (PLAN.crash(2, at_s=0.3).crash(3, at_s=0.6), "repair"),
        (PLAN.crash(1, at_s=0.3).crash(5, at_s=0.5).crash(2, at_s=0.7), "columns"),
        (PLAN.hang(2, at_s=0.3, for_s=10), "columns"),
        (PLAN.cut(3, at_s=0.3, for_s=5), "repair"),
        (PLAN.slow(1, factor=1000, at_s=0.1), "columns"),
        (PLAN.slow(1, factor=1000, at_s=0.1), "repair"),
    ],
    ids=lambda value: value if isinstance(value, str) else "; ".join(map(str, value.faults)),
)
def test_products_stay_exact_after_losses(faults: FaultPlan, transposed: str) -> None:
    seen = Run(faults=faults, settings={"transposed": transposed})(products_agree(20))
    assert seen.found < EXACT
    assert len(seen.notes.of("gone")) == sum(fault.kind == "crash" for fault in faults.faults)


def test_lost_blocks_are_made_up_for() -> None:
    seen = Run(faults=PLAN.crash(2, at_s=0.3))(products_agree(20))
    (gone,) = seen.notes.of("gone")
    assert gone["redundancy"] in ([0, 0], [0, 1], [1, 0])
    assert min(seen.coordinator.registry.compute_redundancy(kind) for kind in ("rows", "columns")) >= 1


def test_a_device_that_hangs_is_silent_until_it_is_heard_again() -> None:
    faults = PLAN.hang(1, at_s=0.3, for_s=4).hang(2, at_s=0.3, for_s=4).hang(5, at_s=0.3, for_s=4)
    seen = Run(faults=faults, settings={"min_timeout_s": 0.5, "redundancy": 0})(products_agree(20))
    assert seen.found < EXACT
    assert {event["rank"] for event in seen.notes.of("silent")} == {1, 2, 5}
    assert {event["rank"] for event in seen.notes.of("heard")} == {1, 2, 5}
    (paused,) = seen.notes.of("paused")
    assert "silent: rank 1, 2, 5" in str(paused["missing"])
    assert seen.notes.of("goes_on")


def test_training_pauses_until_a_lost_partition_comes_back() -> None:
    faults = PLAN.crash(1, at_s=0.3).crash(2, at_s=0.3).crash(3, at_s=0.3)
    faults = faults.join(1, at_s=20.0).join(2, at_s=21.0)
    seen = Run(faults=faults, settings={"redundancy": 0})(products_agree(20))
    assert seen.found < EXACT
    (paused,) = seen.notes.of("paused")
    assert "lost with their devices" in str(paused["missing"])
    assert seen.ended_s > 20


def test_patience_ends_and_names_what_is_missing() -> None:
    faults = PLAN.crash(1, at_s=0.3).crash(2, at_s=0.3).crash(3, at_s=0.3)
    with pytest.raises(
        RunLost,
        match=r"or got further with a block for 7 s: 3 devices are heard of; lost with their devices: part ",
    ):
        Run(faults=faults, settings={"redundancy": 0, "patience_s": 7.0})(products_agree(20))


def test_training_goes_on_without_what_is_lost_where_it_may() -> None:
    faults = PLAN.crash(1, at_s=0.3).crash(2, at_s=0.3).crash(3, at_s=0.3)
    seen = Run(faults=faults, settings={"redundancy": 0, "on_loss": "go_on"})(products_agree(20))
    assert seen.found < EXACT
    lost = {event["partition"] for event in seen.notes.of("lost")}
    assert lost
    assert {one.name for one in seen.coordinator.registry.active_partitions} == {
        f"part {n}" for n in range(4)
    } - lost


def test_a_partition_lost_before_it_was_encoded_is_told() -> None:
    faults = PLAN.crash(2, at_s=0.05)
    run = Run(4, 5, faults=faults, settings={"redundancy": 0, "patience_s": 3.0})
    with pytest.raises(RunLost, match="lost with their devices: part 1"):
        run(products_agree())
    assert [event["partition"] for event in run.notes.of("lost")] == ["part 1"]


def test_rows_that_are_under_way_are_waited_for() -> None:
    """A megabyte takes 50 s from a device to another, longer than either is waited for in silence."""
    settings = {"patience_s": 35.0, "redundancy": 1}
    seen = Run(2, 3, faults=slow_links(3, 1.6e5), data=partial(part, rows=20_000), settings=settings)(encode)
    assert seen.ended_s > 100
    assert seen.notes.of("failed") == []


async def encode(coordinator: Coordinator) -> None:
    del coordinator


def slow_links(devices: int, bandwidth_bps: float) -> FaultPlan:
    plan = FaultPlan()
    for rank in range(1, devices + 1):
        plan = plan.throttle(rank, bandwidth_bps=bandwidth_bps, at_s=0.0)
    return plan


def test_operands_that_are_under_way_are_waited_for() -> None:
    """Weights of 8 MB take 64 s to a device, longer than an answer is waited for in silence."""
    run = Run(2, 2, faults=slow_links(2, 1e6), data=partial(part, features=1000, rows=5))
    run.settings = {"patience_s": 20.0, "redundancy": 0, "transposed": "repair"}

    async def multiply(coordinator: Coordinator) -> float:
        weights = torch.ones(coordinator.features, 1000, dtype=torch.float64)
        product, due = (
            await coordinator.multiply(weights),
            torch.cat([run.data(0)[0], run.data(1)[0]]) @ weights,
        )
        return float((product - due).abs().max())

    seen = run(multiply)
    assert seen.found < EXACT
    assert seen.ended_s > 60


def test_labels_that_are_under_way_are_waited_for() -> None:
    """Those of a million samples take 64 s."""
    data = partial(part, features=1, rows=1_000_000)
    seen = Run(1, 1, faults=slow_links(1, 1e6), data=data, settings={"patience_s": 20.0, "redundancy": 0})(
        encode
    )
    assert seen.ended_s > 60


@pytest.mark.parametrize(("partitions", "transposed"), [(1, "columns"), (3, "repair")])
def test_rows_that_have_come_are_kept_where_a_source_falls_silent(partitions: int, transposed: str) -> None:
    """The next order of the block asks for the others alone, beside those that were under way."""
    maker = partitions + 1

    def fetched(seen: Seen) -> int:
        return sum(nbytes for (_, to), nbytes in seen.sent["encoding"].items() if to == maker)

    settings = {"transposed": transposed, "code": "mds"}
    run = Run(partitions, maker, data=partial(part, features=500, rows=4000), settings=settings)
    needed = fetched(run(encode))
    cut = slow_links(maker, 2e7).cut(maker, peer=1, at_s=5.0, for_s=8.0)
    run = replace(run, faults=cut, holdings={}, notes=Notes())
    seen = run(products_agree(2, run.data), fetch_s=3.0)
    assert seen.found < EXACT
    failed = seen.notes.of("failed")
    assert {event["rank"] for event in failed} == {maker}
    under_way = 4 * MAX_CHUNK_NBYTES * len(failed)
    assert fetched(seen) <= needed + under_way
    assert not run.holdings[maker].drafts


def test_rows_are_waited_for_after_a_source_was_silent() -> None:
    """They take 64 s, longer than a run waits without progress; the first order fails early."""
    faults = slow_links(2, 2e6).cut(2, peer=1, at_s=8.0, for_s=30.0)
    data = partial(part, features=500, rows=4000)
    settings = {"transposed": "repair", "patience_s": 20.0}
    seen = Run(1, 2, faults=faults, data=data, settings=settings)(encode, fetch_s=10.0)
    assert seen.notes.of("failed")
    assert seen.ended_s > 60


def test_a_sum_that_is_not_whole_begins_anew_with_other_terms() -> None:
    into, first, second = torch.ones(2, 3), frozenset({(1, 0.5), (2, 0.5)}), frozenset({(3, 1.0)})
    draft = Draft(RowBlock.from_tensor(into))
    missing = draft.find_missing_terms(-1, 0, first, into)
    assert missing == first
    assert not into.any()
    missing.discard((1, 0.5))
    into.fill_(1.0)
    assert draft.find_missing_terms(-1, 0, first, into) == {(2, 0.5)}
    assert into.all()
    missing = draft.find_missing_terms(-1, 0, second, into)
    assert missing == second
    assert not into.any()
    missing.clear()
    into.fill_(1.0)
    assert draft.find_missing_terms(-1, 0, first, into) == set()
    assert into.all(), "a sum that is whole stays, whatever its terms were"


def test_who_gets_nothing_from_another_is_asked_now_and_then_until_patience_ends() -> None:
    settings = {"patience_s": 20.0, "min_timeout_s": 0.8}
    run = Run(3, 4, holdings={2: _Withheld("part 1", *part(1))}, settings=settings)
    with pytest.raises(
        RunLost,
        match="or got further with a block for 20 s: 4 devices are heard of; column blocks",
    ):
        run(products_agree())
    failed = [event for event in run.notes.of("failed") if event["rank"] != 2]
    assert {(event["blamed"], event["why"]) for event in failed} == {(2, "it has no such block")}
    makers, looks, kinds = len({event["rank"] for event in failed}), 20.0 / (5 * 0.8), 2
    assert makers > 1
    assert 3 * makers < len(failed) <= kinds * makers * (3 + looks + 1)


class _Withheld(BlockStore):
    def read_rows(self, request: Fetch) -> torch.Tensor:
        raise MalformedMessage("not to be had")


def test_too_few_devices_are_named() -> None:
    with pytest.raises(RunLost, match="6 of 7 devices and 4 of 4 partitions have come"):
        Run(4, 7, faults=PLAN.crash(7, at_s=0.0), settings={"patience_s": 5.0})(products_agree())


# --- coming and leaving -----------------------------------------------------------------------------------------------


def test_a_device_without_data_makes_up_for_a_loss() -> None:
    faults = PLAN.crash(2, at_s=0.3).crash(5, at_s=0.3).join(7, at_s=1.0)
    seen = Run(later=[None], faults=faults)(products_agree(25))
    assert seen.found < EXACT
    for kind in ("rows", "columns"):
        assert any(block.holder == 7 for block in seen.coordinator.registry.list_ready_blocks(kind))


@pytest.mark.parametrize("after_ms", range(5, 60, 10))
def test_a_device_that_is_lost_as_it_meets_the_others_is_no_fault_of_theirs(after_ms: int) -> None:
    """They report that they are ready for it when the coordinator knows already that it is gone, or came again."""
    gone_s = 0.2 + after_ms / 1e3
    faults = PLAN.join(7, at_s=0.2).crash(7, at_s=gone_s).join(7, at_s=gone_s + 0.01)
    seen = Run(later=[None], faults=faults)(products_agree(15))
    assert seen.found < EXACT
    assert not seen.coordinator.counters.num_refused
    assert any(block.holder == 7 for block in seen.coordinator.registry.list_ready_blocks("rows"))


def test_devices_without_data_get_complementary_blocks() -> None:
    faults = PLAN.join(9, at_s=0.2).join(10, at_s=0.4)
    seen = Run(8, 8, later=[None, None], faults=faults, settings={"redundancy": 0})(products_agree(20))
    assert seen.found < EXACT
    first, second = (
        block.coefficients.keys()
        for block in seen.coordinator.registry.list_ready_blocks("rows")
        if block.raw_unknown is None
    )
    assert len(first) == len(second) == 4
    assert first | second == set(range(8))


@pytest.mark.parametrize("transposed", ["columns", "repair"])
def test_new_data_are_taken_in(transposed: str) -> None:
    run = Run(later=[9], faults=PLAN.join(7, at_s=0.2), settings={"transposed": transposed})
    seen = run(products_agree(12))
    assert seen.found < EXACT
    registry = seen.coordinator.registry
    assert [one.name for one in registry.active_partitions] == [*(f"part {n}" for n in range(4)), "part 9"]
    assert any(
        4 in block.coefficients for block in registry.list_ready_blocks("rows") if block.raw_unknown is None
    )


def test_a_device_that_leaves_hands_its_data_over_first() -> None:
    run = Run()

    async def body(coordinator: Coordinator) -> float:
        before: Any = await products_agree(3)(coordinator)
        run.attending[2].leave()
        after: Any = await products_agree(10)(coordinator)
        return float(max(before, after))

    seen = run(body)
    assert seen.found < EXACT
    assert 2 not in seen.coordinator.registry.devices
    holders = {
        block.holder
        for block in seen.coordinator.registry.list_ready_blocks("rows")
        if block.raw_unknown == 1
    }
    assert holders
    assert holders.isdisjoint({2, None})


def test_a_coordinator_comes_again_with_what_it_kept_and_what_devices_hold() -> None:
    first = Run()
    before = first(products_agree(3))
    again = Run(holdings=first.holdings, notes=Notes())
    again.notes.kept = first.notes.kept
    seen = again(products_agree(3))
    assert seen.found < EXACT
    assert "encoding" not in seen.sent, "nothing is made anew"
    assert seen.coordinator.registry.to_tree()["blocks"] == before.coordinator.registry.to_tree()["blocks"]


def test_labels_are_written_when_a_partition_comes_and_at_no_order_or_block(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = list[tuple[str, bool]]()

    def noting(path: Path, tree: dict[str, Any]) -> None:
        save_tree(path, tree)
        with safe_open(path, framework="pt") as file:
            written.append((path.stem, bool(file.keys())))

    monkeypatch.setattr(record_module, "save_tree", noting)
    run = Run(later=[9], faults=PLAN.crash(2, at_s=0.3).join(7, at_s=1.0))
    with closing(Record(tmp_path)) as record:
        run.notes = record  # type: ignore[assignment]
        registry = run(products_agree(25)).coordinator.registry
    assert written.count(("labels", True)) == 2, "of the first partitions, and with that of the new device"
    assert written.count(("registry", False)) > 10, "without a tensor"
    with closing(Record(tmp_path)) as record:
        again = record.load_registry()
    assert again is not None
    assert [one.name for one in again.partitions] == [*(f"part {n}" for n in range(4)), "part 9"]
    assert all(
        torch.equal(a.labels, b.labels) for a, b in zip(again.partitions, registry.partitions, strict=True)
    )


@pytest.mark.parametrize("options", [{}, {"transposed": "repair", "redundancy": 0}], ids=str)
def test_a_coordinator_comes_again_to_devices_that_have_kept_nothing(options: dict[str, Any]) -> None:
    first = Run(settings=options)
    first(products_agree(3))
    again = Run(settings=options)
    again.notes.kept = first.notes.kept
    seen = again(products_agree(3))
    assert seen.found < EXACT
    if not options:
        assert min(seen.coordinator.registry.compute_redundancy(kind) for kind in ("rows", "columns")) >= 1


# --- bad input --------------------------------------------------------------------------------------------------------


def test_partitions_of_unlike_width_are_turned_away_by_name() -> None:
    faults = PLAN.join(7, at_s=0.2)
    run = Run(later=[9], faults=faults, data=lambda number: part(number, FEATURES + (number == 9)))
    seen = run(products_agree(20, run.data))
    assert seen.found < EXACT
    (turned,) = seen.notes.of("turned_away")
    assert "partition 'part 9' has 11 features, and those that are there have 10" in str(turned["why"])


def test_a_partition_is_there_once() -> None:
    seen = Run(later=[2], faults=PLAN.join(7, at_s=0.2))(products_agree(20))
    (turned,) = seen.notes.of("turned_away")
    assert "'part 2' is there already" in str(turned["why"])


def test_labels_are_those_of_before() -> None:
    run = Run(faults=PLAN.crash(2, at_s=0.3).join(2, at_s=1.0), holdings=_Forgetful())

    def data(number: int) -> tuple[torch.Tensor, torch.Tensor]:
        features, labels = part(number)
        return features, -labels if run.notes.of("gone") else labels

    run.data = data
    seen = run(products_agree(30))
    (turned,) = seen.notes.of("turned_away")
    assert "was there with other labels" in str(turned["why"])


class _Forgetful(dict[int, BlockStore]):
    def __contains__(self, rank: object) -> bool:
        return False


# --- again ----------------------------------------------------------------------------------------------------------


def test_a_run_made_again_has_the_same_bits_whoever_is_slow() -> None:
    """Which answers a product is decoded of depends on who was fast; it is a decision, so the log tells it."""

    async def bits(coordinator: Coordinator) -> list[torch.Tensor]:
        random, found = torch.Generator().manual_seed(0), list[torch.Tensor]()
        coordinator.activate_partitions()
        for _ in range(10):
            weights = torch.randn(FEATURES, 2, generator=random, dtype=torch.float64)
            found.append(await coordinator.multiply(weights))
            found.append(await coordinator.multiply_transposed(found[-1]))
        return found

    first = DecisionLog()
    due = Run(decisions=first)(bits).found
    slow = PLAN.slow(1, factor=300, at_s=0.1).slow(4, factor=100, at_s=0.1)
    other = Run(faults=slow)(bits).found
    again = Run(faults=slow, decisions=DecisionLog(replay=first.entries))(bits).found
    assert not all(map(torch.equal, other, due)), "who is slow makes a difference"
    assert all(map(torch.equal, again, due))
    assert {decision.name for decision in first.entries} == {"answers"}


# --- products that are not finite -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("transposed", "product"),
    [("columns", "multiply"), ("columns", "multiply_transposed"), ("repair", "multiply_transposed")],
)
def test_a_product_that_is_not_finite_ends_the_run_at_once(transposed: str, product: str) -> None:
    def large(number: int) -> tuple[Any, Any]:
        data, labels = part(number)
        return data.abs() * 1e200, labels

    times = list[float]()

    async def body(coordinator: Coordinator) -> None:
        coordinator.activate_partitions()
        length = coordinator.features if product == "multiply" else coordinator.samples
        times.append(coordinator.elapsed_s)
        with pytest.raises(BadSamples, match="a product of the samples is not finite in float64"):
            await getattr(coordinator, product)(torch.full((length, 1), 1e200, dtype=torch.float64))
        times.append(coordinator.elapsed_s)
        with pytest.raises(BadSamples, match="a product of the samples is not finite in float64"):
            await getattr(coordinator, product)(torch.full((length, 1), torch.inf, dtype=torch.float64))
        assert coordinator.elapsed_s == times[-1]

    Run(data=large, settings={"transposed": transposed})(body)
    assert times[1] - times[0] < 1


def test_one_device_whose_products_are_not_finite_is_done_without() -> None:
    run = Run(3, 6)

    async def body(coordinator: Coordinator) -> Any:
        holding = run.holdings[1]
        assert holding.data is not None
        holding.data.fill_(torch.nan)
        return await products_agree()(coordinator)

    seen = run(body)
    assert seen.found < EXACT
    assert seen.coordinator.counters.num_refused > 0
