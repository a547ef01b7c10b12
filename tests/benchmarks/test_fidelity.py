"""The fidelity benchmark: networks and recipes by seed, the order of recipes, cells that are kept."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from benchmarks.common import Expected, Kept, Measured, Result
from benchmarks.common import kept as kept_module
from benchmarks.common.results import store
from benchmarks.fidelity import networks, run
from benchmarks.fidelity.cells import Cell
from benchmarks.fidelity.networks import DELAY_MS, DRAWN, LOSS, RATE_MBPS, drawn
from benchmarks.fidelity.order import Timed, agreement, tau, without_one
from benchmarks.fidelity.recipes import DENSE, EACH, RECIPES, UNPACED, dealt
from farflung.network import NetworkProfile, find_network

NODES = 4


def profiles(seed: int, folder: Path) -> list[NetworkProfile]:
    found = []
    for name, text in drawn(seed, NODES).items():
        file = folder / f"{name}.toml"
        file.write_text(text, encoding="utf-8")
        found.append(find_network(str(file)))
    return found


# --- networks ---------------------------------------------------------------------------------------------------


def test_a_seed_draws_the_same_networks_again_and_another_seed_others() -> None:
    assert drawn(3, NODES) == drawn(3, NODES)
    assert not set(drawn(3, NODES).values()) & set(drawn(4, NODES).values())


@pytest.mark.parametrize("seed", range(5))
def test_drawn_networks_cover_their_ranges_and_keep_to_them(seed: int, tmp_path: Path) -> None:
    found = profiles(seed, tmp_path)
    assert [profile.nodes for profile in found] == [NODES] * DRAWN
    strata = Counter(
        math.floor(
            DRAWN * math.log(1e3 * profile.get_link(0, 1).latency_s / DELAY_MS[0]) / math.log(DELAY_MS[1])
            + 1e-2
        )
        for profile in found
    )
    assert max(strata.values()) <= 2, "rounding may move one into the next"
    assert len(strata) >= DRAWN - 1
    losses = sorted(profile.get_link(0, 1).loss for profile in found)
    assert losses[: DRAWN // 2] == [0.0] * (DRAWN // 2)
    assert LOSS[0] * 0.9 <= losses[DRAWN // 2] <= losses[-1] <= LOSS[1]
    for profile in found:
        most, one = profile.sites
        ways = [float(str(bps)) / 1e6 for site in (most, one) for bps in (site.up_bps, site.down_bps)]
        assert RATE_MBPS[0] * 0.99 <= min(ways) <= max(ways) <= RATE_MBPS[1] * 1.01
        assert max(ways[0] / ways[1], ways[1] / ways[0]) <= networks.ONE_WAY[1] * 1.01
        assert ways[0] / ways[2] == pytest.approx(ways[1] / ways[3], rel=0.02)
        assert 0.99 <= ways[0] / ways[2] <= networks.ONE_NODE[1] * 1.01


@pytest.mark.parametrize(("name", "profile"), networks.HARD.items())
def test_hard_networks_are_what_their_names_say(name: str, profile: str, tmp_path: Path) -> None:
    file = tmp_path / "network.toml"
    file.write_text(profile, encoding="utf-8")
    network = find_network(str(file))
    most, one = network.sites
    link = network.get_link(0, 1)
    assert network.nodes == NODES
    up_bps, down_bps, slow_bps = (float(str(bps)) for bps in (most.up_bps, most.down_bps, one.up_bps))
    said = {
        "asymmetric 8:1": down_bps / up_bps == 8,
        "200 ms one way": link.latency_s == 0.2,
        "300 ms one way": link.latency_s == 0.3,
        "one slow node": up_bps / slow_bps == 10,
        "1 % loss": link.loss == 0.01,
        "2 % loss": link.loss == 0.02,
    }
    assert [difficulty for difficulty, is_there in said.items() if is_there] == [name]


# --- recipes ----------------------------------------------------------------------------------------------------


def test_every_recipe_meets_as_many_networks_as_any_other() -> None:
    names = [f"network {number}" for number in range(16)]
    found = dealt(names, seed=1)
    assert list(found) == names
    assert all(len(set(recipes)) == EACH + 1 and DENSE in recipes for recipes in found.values())
    uses = Counter(recipe for recipes in found.values() for recipe in recipes if recipe != DENSE)
    assert set(uses) == set(RECIPES) - {DENSE}
    assert max(uses.values()) - min(uses.values()) <= 1
    assert dealt(names, seed=2) != found == dealt(names, seed=1)


# --- order ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("timed", "expected"),
    [
        ([(1.0, 0.0, 0.9), (2.0, 0.0, 1.7), (3.0, 0.0, 2.8)], (3, 3)),
        ([(1.0, 0.0, 3.0), (2.0, 0.0, 2.0), (3.0, 0.0, 1.0)], (-3, 3)),
        ([(1.0, 0.0, 1.0), (1.01, 0.0, 0.5)], (0, 0)),
        ([(1.0, 0.05, 1.0), (1.1, 0.03, 0.5)], (0, 0)),
        ([(1.0, 0.03, 1.0), (1.1, 0.03, 0.5)], (-1, 1)),
        ([(1.0, 0.0, 1.0), (2.0, 0.0, 1.0)], (0, 1)),
        ([(1.0, 0.0, 1.0)], (0, 0)),
    ],
    ids=["kept", "reversed", "too close", "within the spread", "beyond it", "equal in virtual time", "alone"],
)
def test_pairs_that_the_lab_tells_apart_are_compared(
    timed: list[tuple[float, float, float]], expected: tuple[int, int]
) -> None:
    assert agreement([Timed(*one) for one in timed]) == expected


def test_networks_count_by_their_pairs() -> None:
    found = [(6, 6), (-1, 1), (0, 0)]
    assert tau(found) == pytest.approx(5 / 7)
    assert without_one(found) == (-1.0, 1.0)
    assert tau([(0, 0)]) is None


def test_the_median_of_others_lies_between_ordered_errors() -> None:
    assert run.median_within([0.3]) == (0.3, 0.3)
    assert run.median_within([float(one) for one in range(100)]) == (40.0, 60.0)


# --- cells ------------------------------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Of a benchmark without results."""
    monkeypatch.setattr(run, "FOLDER", tmp_path)
    monkeypatch.setattr(kept_module, "commit_here", lambda: "now")
    return tmp_path


def test_every_run_of_the_lab_has_a_seed_of_its_own(folder: Path) -> None:
    kept = Kept(folder, "cells")
    assert run.seed_of(kept) == 1
    row = Expected(run.MEDIAN, "relative", "lower")
    measured = Measured(0.1, (0.1, 0.1), {"seed": 4})
    store(folder, {run.MEDIAN: Result.of(row, measured, commit="before", battery=(), seconds=1.0)})
    assert run.seed_of(kept) == 5
    kept.once({"seed": 4}, dict)
    assert run.seed_of(kept) == 4, "a run of this commit that was stopped goes on"


def test_a_stopped_run_goes_on_where_it_was(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def in_lab(cell: Cell, calibration: str, *, quick: bool) -> dict[str, Any]:
        assert (calibration, quick) == ("a device", False)
        asked.append(f"{cell.network} {cell.recipe}")
        if cell.network == "lan-1g":
            raise RuntimeError(f"lan-1g {run.REFUSED} (2 of 12 pairs)")
        if len(asked) == 3:
            raise KeyboardInterrupt
        return {"lab_s": float(len(asked)), "overran": 0.0}

    def simulated(cell: Cell, lab: Mapping[str, Any], calibration: str) -> dict[str, Any]:
        assert calibration == "a device"
        return dict.fromkeys(("simulated_s", "error", "short_error"), lab["lab_s"])

    monkeypatch.setattr(run, "measured", in_lab)
    monkeypatch.setattr(run, "compared", simulated)
    monkeypatch.setattr(run, "calibrated", lambda cell, recipes, rounds: "a device")
    chosen = [
        Cell(network, "", recipe, 2, paced=False, seed=1)
        for network in ("lan-1g", "wifi-100mbps")
        for recipe in UNPACED[:2]
    ]
    cells = Kept(folder, "cells")
    with pytest.raises(KeyboardInterrupt):
        run.run(chosen, cells, quick=False)
    found, refused = run.run(chosen, cells, quick=False)
    assert ([cell["recipe"] for cell in found], refused) == (list(UNPACED[:2]), ["lan-1g"])
    first, second = UNPACED[:2]
    assert asked[:3] == [f"lan-1g {first}", f"wifi-100mbps {first}", f"wifi-100mbps {second}"]
    assert asked[3:] == [f"lan-1g {first}", f"wifi-100mbps {second}"]
    kept = [
        json.loads(line) for line in (folder / "results" / "parts" / "cells.jsonl").read_text().splitlines()
    ]
    assert sum("device" in line for line in kept) == 1
    assert [cell["error"] for cell in found] == [2.0, 5.0]
    assert not any("error" in line for line in kept), "what is simulated is simulated anew"
