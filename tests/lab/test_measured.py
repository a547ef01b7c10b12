"""When a pair fits its profile, what a packet's bytes are, and what the command line says."""

from __future__ import annotations

import math
import sys
from dataclasses import replace

import pytest

from farflung.cli.main import insert_dashes, main
from farflung.errors import ConfigError
from farflung.lab import PairMeasurement, apply_measured_delays
from farflung.lab.measure import _evaluate_train, compute_expected
from farflung.lab.tun import HEADER_NBYTES, build_address, compute_wire_nbytes, parse_node
from farflung.network import Link, NetworkProfile, find_network
from farflung.network.link import BandwidthTrace


@pytest.mark.parametrize(
    ("latency_s", "bandwidth_bps", "fits"),
    [
        (0.05, 20e6, True),
        (0.054, 21e6, True),
        (0.056, 20e6, False),
        (0.044, 20e6, False),
        (0.05, 17e6, False),
        (0.05, 23e6, False),
        (math.inf, 20e6, False),
        (0.05, 0.0, False),
    ],
)
def test_a_pair_fits_within_a_tenth(latency_s: float, bandwidth_bps: float, fits: bool) -> None:
    assert PairMeasurement(0, 1, latency_s, 0.05, bandwidth_bps, 20e6).is_accurate is fits


@pytest.mark.parametrize(
    ("loss", "expected_loss", "packets", "fits"),
    [
        (0.0, 0.0, 400, True),
        (0.01, 0.0, 400, True),  # a few packets prove nothing
        (0.02, 0.0, 400, False),
        (0.02, 0.02, 400, True),
        (0.045, 0.02, 400, True),
        (0.06, 0.02, 400, False),
        (0.0, 0.02, 50, True),
        (0.0, 0.1, 400, False),
        (0.0, 0.5, 0, True),  # not measured
    ],
)
def test_a_pair_may_lose_what_chance_explains(
    loss: float, expected_loss: float, packets: int, fits: bool
) -> None:
    assert PairMeasurement(0, 1, 0.05, 0.05, 20e6, 20e6, loss, expected_loss, packets).is_accurate is fits


def test_lost_packets_take_nothing_off_the_speed() -> None:
    every = _evaluate_train([(0.001 * number, number) for number in range(100)], 100)
    half = _evaluate_train([(0.001 * number, number) for number in range(0, 100, 2)], 100)
    assert half.bandwidth_bps == pytest.approx(every.bandwidth_bps)
    assert (every.loss, half.loss) == (0.0, 0.5)
    assert _evaluate_train([], 100).loss == 1.0


def test_a_link_is_expected_to_have_its_bandwidth_whole() -> None:
    lossy = replace(Link(0.02, 20e6), loss=0.02)
    assert compute_expected(NetworkProfile.create_uniform(lossy, 2))[0, 1][1] == 20e6


def test_a_link_that_is_down_at_first_cannot_be_measured() -> None:
    trace = BandwidthTrace((0.0, 1.0), (0.0, 1e6), 10.0)
    with pytest.raises(ConfigError, match="a link is down at first"):
        compute_expected(NetworkProfile.create_uniform(Link(0.02, trace), 2))


def test_very_short_delays_are_not_held_finely() -> None:
    assert PairMeasurement(0, 1, 190e-6, 100e-6, 1e9, 1e9).is_accurate
    assert not PairMeasurement(0, 1, 290e-6, 100e-6, 1e9, 1e9).is_accurate


def test_what_to_expect_is_the_narrowest_capacity() -> None:
    pairs = compute_expected(find_network("wifi-shared-100mbps").with_nodes(3))
    assert len(pairs) == 6
    latency, bandwidth = pairs[0, 1]
    assert 0.002 < latency < 0.0021
    assert bandwidth == 50e6


def test_delays_that_do_not_fit_are_taken_as_measured() -> None:
    profile = find_network("lan-1g").with_nodes(3)
    wanted = compute_expected(profile)
    fitting = [
        PairMeasurement(*pair, latency + 50e-6, latency, 1e9, speed)
        for pair, (latency, speed) in wanted.items()
    ]
    assert apply_measured_delays(profile, fitting) == profile
    late = [replace(pair, latency_s=pair.expected_latency_s + 2e-4) if pair.src else pair for pair in fitting]
    found = apply_measured_delays(profile, late)
    assert found.get_link(0, 1).latency_s == pytest.approx(3e-4)
    assert found.changes == ("delays as measured",)
    assert (found.sites[0].up_bps, found.nodes) == (1e9, 3)
    assert [pair.is_usable for pair in (late[-1], replace(late[-1], bandwidth_bps=8e8))] == [True, False]


def test_only_the_link_that_is_off_changes() -> None:
    profile = find_network("four-regions").with_nodes(4)
    pairs = [
        PairMeasurement(*pair, latency, latency, speed, speed)
        for pair, (latency, speed) in compute_expected(profile).items()
    ]
    found = apply_measured_delays(profile, [replace(pairs[0], latency_s=2 * pairs[0].latency_s), *pairs[1:]])
    before, after = profile.get_link(0, 1), found.get_link(0, 1)
    assert after.latency_s == pytest.approx(2 * before.latency_s, rel=1e-3)
    assert replace(after, latency_s=before.latency_s) == before
    assert all(
        found.get_link(a, b) == profile.get_link(a, b)
        for a in range(4)
        for b in range(4)
        if a != b and (a, b) != (0, 1)
    )


def packet(dst: int, payload: int, segment: int = 0) -> bytes:
    """A TCP packet with timestamps, cut into segments where told."""
    virtio = bytes([0, 1 if segment else 0, 0, 0]) + segment.to_bytes(2, "little") + bytes(4)
    address = bytes(int(part) for part in build_address(dst).split("."))
    ip = bytes([0x45]) + bytes(8) + bytes([6]) + bytes(2) + address_of_bytes(0) + address
    tcp = bytes(12) + bytes([8 << 4]) + bytes(19)
    return virtio + ip + tcp + bytes(payload)


def address_of_bytes(node: int) -> bytes:
    return bytes(int(part) for part in build_address(node).split("."))


def test_a_large_packet_counts_the_headers_of_its_segments() -> None:
    assert compute_wire_nbytes(packet(1, 1448)) == 1500
    assert compute_wire_nbytes(packet(1, 10 * 1448, 1448)) == 10 * 1500
    assert compute_wire_nbytes(packet(1, 10 * 1448 + 1, 1448)) == 10 * 1500 + 53
    assert compute_wire_nbytes(packet(1, 0)) == 52


@pytest.mark.parametrize("node", [0, 1, 254, 255, 300])
def test_a_packet_says_for_which_node_it_is(node: int) -> None:
    assert parse_node(packet(node, 0)) == node


def test_what_is_for_nobody_is_seen() -> None:
    assert parse_node(bytes(HEADER_NBYTES) + bytes([0x60]) + bytes(39)) == -1


def test_train_needs_no_dashes() -> None:
    farflung = ["--", sys.executable, "-m", "farflung"]
    assert insert_dashes(["lab", "--nodes", "2", "train", "--steps", "3"]) == [
        *("lab", "--nodes", "2", *farflung, "train", "--steps", "3")
    ]
    for untouched in (
        ["train", "--steps", "3"],
        ["lab", "--check"],
        ["lab", "--", "python", "train"],
    ):
        assert insert_dashes(untouched) == untouched


@pytest.mark.parametrize(
    ("args", "says"),
    [
        ([], "no command"),
        (["--", "no-such-program-here"], "no such program"),
        (["--nodes", "0", "--", "true"], "--nodes 0"),
        (["--network", "nowhere", "--", "true"], "unknown network"),
        (["--faults", "nowhere.toml", "--", "true"], "nowhere.toml"),
    ],
)
def test_bad_input_is_one_line(args: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["lab", *args]) == 2
    said = capsys.readouterr().err
    assert says in said
    assert said.count("\n") == 1
