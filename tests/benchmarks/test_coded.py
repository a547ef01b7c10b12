"""The benchmark of coded training: its rows, bytes that follow from the codes, ratios of times."""

from __future__ import annotations

import pytest

from benchmarks.coded import curve, encoding, joins, rounds
from benchmarks.coded.answers import EXACT, full_rank, needed
from benchmarks.coded.codes import Replication
from benchmarks.coded.descent import PARTS
from benchmarks.coded.world import noise, run
from farflung.coded import MDS
from farflung.coded.coordinator import Settings
from farflung.devices import DeviceProfile


@pytest.mark.parametrize(
    ("code", "transposed", "partitions_sent"),
    [
        ("mds", "repair", 2 * 4),
        ("rlnc", "repair", 2 * 2),
        ("mds", "columns", 2 * 4 + 3 + 2),
        ("rlnc", "columns", 4 + 3 + 2),
    ],
)
def test_encoding_sends_what_the_code_asks_for(
    code: str, transposed: encoding.Transposed, partitions_sent: int
) -> None:
    partition = 8 * encoding.ROWS_EACH * encoding.FEATURES_OF_K * 4
    assert encoding.sent(code, 6, 4, transposed)["encoding"] == partitions_sent * partition


def test_any_k_answers_of_mds_decode_and_copies_need_some_more() -> None:
    assert needed(MDS(), 6, 4, 20) == [0] * 20
    assert set(needed(Replication(), 8, 4, 20)) > {1, 2}


@pytest.mark.parametrize("missing", EXACT)
def test_binary_matrices_are_of_full_rank_as_often_as_counted(missing: int) -> None:
    assert full_rank("binary", missing, 0, 4_000) == pytest.approx(EXACT[missing], abs=0.03)


def test_times_are_compared_seed_by_seed() -> None:
    assert rounds.faster([[2.0, 4.0], [9.0]], [[1.0, 1.0], [3.0]]) == [3.0, 3.0]
    assert rounds.faster([[4.0], [1.0]], [[1.0], [2.0]]) == [0.5, 4.0]
    assert rounds.summary([[1.0, 2.0], [3.0]])["median_s"] == 2.0


def test_an_iteration_takes_what_its_blocks_take_where_nothing_slows_devices() -> None:
    device = DeviceProfile(forward_s=rounds.DEVICE.forward_s)
    parts = noise(rounds.ROWS, rounds.FEATURES, rounds.DEVICES)
    ran = run(parts, rounds.UNCODED.settings(1), rounds.both_products(2), device=device)
    assert ran.found == pytest.approx([2 * rounds.DATA_S / rounds.DEVICES] * 2)


def test_a_pause_does_not_count_and_lets_devices_end_what_they_are_at() -> None:
    whole = rounds.times(rounds.Coded("mds", 8), 1, quick=True)
    rested = rounds.times(rounds.Coded("mds", 8), 1, quick=True, pause_s=rounds.REST_S)
    assert all(after <= before for before, after in zip(map(sum, whole), map(sum, rested), strict=True))
    assert sum(map(sum, rested)) < sum(map(sum, whole))


def test_bytes_of_training_are_those_of_three_kinds() -> None:
    settings = Settings(partitions=2, devices=3, code="mds", redundancy=0, pieces=1)
    ran = run(noise(8, 4, 2), settings, rounds.both_products(1))
    assert all(ran.sent[kind] > 0 for kind in PARTS)


@pytest.mark.thorough
def test_the_simulated_encoding_rows_are_ratios_of_bytes() -> None:
    (small, large) = encoding.rows_alone(quick=True).values()
    assert small.ours == large.ours == 0.5
    assert small.simulated
    assert small.config["members_nbytes"]["rlnc"] > 0


def test_the_curve_ends_at_mds_and_its_bytes_are_those_that_are_sent() -> None:
    (mds,) = [point for point in curve.points() if (point.law, point.devices) == ("mds", 20)]
    found = curve.measure(mds, 5)
    assert found["encoding_bytes_over_mds"] == {"rows": 1.0, "rows and columns": 1.0}
    assert found["extra_answers"] == found["not_decoded_by_all"] == 0
    balanced = curve.measure(curve.Point(6, 4, "balanced", 0.5), 5)["encoding_bytes_over_mds"]
    assert balanced == {"rows": 1 / 2, "rows and columns": (4 + 3 + 2) / (8 + 3 + 2)}


def test_sparse_rows_are_never_zero_and_of_their_density() -> None:
    rows = curve.Point(400, 10, "masked", 0.1).rows(0)[10:]
    assert bool(rows.any(dim=1).all())
    assert float((rows != 0).double().mean()) == pytest.approx(0.1 / (1 - 0.9**10), rel=0.1)


@pytest.mark.thorough
def test_devices_that_join_fetch_half_of_the_partitions() -> None:
    nbytes, rows = joins.joined("rlnc", "repair", 0, 4, 3)
    partition = 8 * encoding.ROWS_EACH * encoding.FEATURES_OF_K * 4
    assert nbytes == 3 * [2 * partition]
    assert [len(one) for one in rows] == [4, 5, 6, 7]
