"""Each replica's random numbers are its own, whoever drew in between, and come back after a checkpoint."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from farflung.errors import ConfigError
from farflung.seeding import RandomState, create_generator, derive_seed
from farflung.state_trees import load_tree, save_tree
from farflung.workloads import create_workload
from tests.helpers import same_tree


@pytest.fixture(autouse=True)
def _outside() -> Iterator[None]:
    with RandomState.preserve_globals():
        yield


def draw() -> list[float]:
    """A few numbers from each global generator; an odd number of normals leaves one kept back in two of them."""
    return [
        *torch.rand(3).tolist(),
        *torch.randn(3).tolist(),
        *np.random.random(3).tolist(),
        *np.random.standard_normal(3).tolist(),
        *(random.random() for _ in range(3)),
        *(random.gauss(0, 1) for _ in range(3)),
    ]


def alone(seed: int, count: int) -> list[list[float]]:
    """What a replica draws when nobody else does."""
    with RandomState.preserve_globals():
        RandomState(seed).install()
        return [draw() for _ in range(count)]


# --- switching --------------------------------------------------------------------------------------------------


def test_the_seed_alone_decides() -> None:
    assert alone(1, 2) == alone(1, 2)
    one, other = alone(1, 1)[0], alone(2, 1)[0]
    assert all(a != b for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("turns", ["aabb", "abab", "abba", "bcabcacba"])
def test_replicas_that_take_turns_draw_what_they_draw_alone(turns: str) -> None:
    states = {name: RandomState(seed) for seed, name in enumerate("abc")}
    drawn: dict[str, list[list[float]]] = {name: [] for name in "abc"}
    for name in turns:
        states[name].install()
        drawn[name].append(draw())
    for seed, name in enumerate("abc"):
        assert drawn[name] == alone(seed, len(drawn[name]))


@given(st.lists(st.tuples(st.integers(0, 2), st.sampled_from(["nothing", "normal", "uniform"])), max_size=12))
def test_numpys_second_normal_is_kept_for_whom_it_belongs_to(turns: list[tuple[int, str]]) -> None:
    def number(kind: str) -> float:
        return {"normal": np.random.standard_normal, "uniform": np.random.random}.get(kind, lambda: 0.0)()

    with RandomState.preserve_globals():
        states = [RandomState(seed) for seed in range(3)]
        apart = [np.random.RandomState(seed) for seed in range(3)]
        for who, kind in turns:
            states[who].install()
            wanted = {"normal": apart[who].standard_normal, "uniform": apart[who].random_sample}
            assert number(kind) == wanted.get(kind, lambda: 0.0)()


def test_numpys_generator_may_not_be_of_another_kind() -> None:
    before = np.random.get_bit_generator()  # type: ignore[attr-defined]
    try:
        np.random.set_bit_generator(np.random.PCG64(1))  # type: ignore[attr-defined]
        with pytest.raises(ConfigError, match="PCG64: leave MT19937"):
            RandomState(1).install()
    finally:
        np.random.set_bit_generator(before)  # type: ignore[attr-defined]


def test_installing_it_again_changes_and_costs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    switches: list[Any] = []
    put = torch.set_rng_state

    def counted(state: torch.Tensor) -> None:
        switches.append(1)
        put(state)

    monkeypatch.setattr(torch, "set_rng_state", counted)
    state = RandomState(5)
    drawn = []
    for _ in range(4):
        state.install()
        drawn.append(draw())
    assert len(switches) == 1
    assert drawn == alone(5, 4)


# --- the outside ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fails", [False, True])
def test_a_scope_leaves_the_outside_as_it_was(fails: bool) -> None:
    draw()
    with RandomState.preserve_globals():
        wanted = draw()  # the scope itself puts this back
    try:
        with RandomState.preserve_globals():
            RandomState(1).install()
            draw()
            RandomState(2).install()
            draw()
            if fails:
                raise KeyError
    except KeyError:
        pass
    assert draw() == wanted


def test_a_replica_goes_on_in_the_next_scope() -> None:
    state = RandomState(7)
    drawn = []
    for _ in range(3):
        with RandomState.preserve_globals():
            state.install()
            drawn.append(draw())
    assert drawn == alone(7, 3)


def test_scopes_nest() -> None:
    outer, inner = RandomState(1), RandomState(2)
    outer.install()
    drawn = [draw()]
    with RandomState.preserve_globals():
        inner.install()
        draw()
    outer.install()
    drawn.append(draw())
    assert drawn == alone(1, 2)


# --- checkpoints ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("installed", [True, False])
@pytest.mark.parametrize("through_a_file", [True, False])
def test_a_saved_state_continues_the_sequence(installed: bool, through_a_file: bool, tmp_path: Path) -> None:
    state, other = RandomState(3), RandomState(4)
    state.install()
    draw()
    if not installed:
        other.install()
        draw()
    kept = state.state_dict()
    state.install()
    wanted = [draw(), draw()]
    if through_a_file:
        save_tree(tmp_path / "random.safetensors", kept)
        kept = load_tree(tmp_path / "random.safetensors")
    resumed = RandomState(99)
    resumed.load_state_dict(kept)
    resumed.install()
    assert [draw(), draw()] == wanted
    assert wanted == alone(3, 3)[1:]


def test_loading_into_the_installed_state_takes_effect_at_once() -> None:
    state = RandomState(3)
    state.install()
    kept = state.state_dict()
    wanted = draw()
    state.load_state_dict(kept)
    assert draw() == wanted


def test_a_saved_state_does_not_change_afterwards() -> None:
    state = RandomState(3)
    state.install()
    kept, again = state.state_dict(), state.state_dict()
    draw()
    assert same_tree(kept, again)
    assert not same_tree(kept, state.state_dict())


# --- torch alone ------------------------------------------------------------------------------------------------


def test_a_workload_that_draws_from_torch_alone_has_torchs_state_switched_alone() -> None:
    work = create_workload("synthetic/quadratic")
    states = [RandomState.from_workload(work, seed, torch.device("cpu")) for seed in (1, 2, 1)]
    before = (np.random.get_state()[1].tolist(), random.getstate())  # type: ignore[index]
    drawn = []
    for state in states:
        state.install()
        drawn.append(torch.rand(3).tolist())
    assert drawn[0] == drawn[2] == alone(1, 1)[0][:3] != drawn[1]
    assert before == (np.random.get_state()[1].tolist(), random.getstate())  # type: ignore[index]
    assert states[0].state_dict().keys() == {"torch"}


def test_states_of_both_kinds_take_turns() -> None:
    whole, one = RandomState(3), RandomState(4, is_torch_only=True)
    drawn = []
    for state in (whole, one, whole, one, whole):
        state.install()
        drawn.append(draw())
    assert drawn[::2] == alone(3, 3)


def test_torchs_state_alone_continues_from_a_checkpoint_of_all() -> None:
    whole, one = RandomState(3), RandomState(4, is_torch_only=True)
    one.load_state_dict(whole.state_dict())
    one.install()
    assert torch.rand(3).tolist() == alone(3, 1)[0][:3]


# --- derived seeds ----------------------------------------------------------------------------------------------

labels = st.lists(st.integers(0, 1000) | st.text("abcxyz-", min_size=1), max_size=4).map(tuple)


@given(st.tuples(st.integers(), labels), st.tuples(st.integers(), labels))
def test_unlike_labels_give_unlike_seeds(one: Any, other: Any) -> None:
    a, b = derive_seed(one[0], *one[1]), derive_seed(other[0], *other[1])
    assert 0 <= a < 2**63
    assert (a == b) == (one == other)


def test_labels_do_not_run_together() -> None:
    seeds = {
        derive_seed(1, 1, 1),
        derive_seed(1, 11),
        derive_seed(11, 1),
        derive_seed(111),
        derive_seed(1, "1", "", "1"),
        derive_seed(1, "11", ""),
    }
    assert len(seeds) == 6


def test_derived_seeds_are_the_same_in_every_version() -> None:
    assert derive_seed(0) == 4246866556266386882
    assert derive_seed(7, "replica", 3) == 4988464620024277106


def test_a_generator_depends_on_its_labels_alone() -> None:
    before = torch.get_rng_state()
    one, two = create_generator(1, "model"), create_generator(1, "model")
    torch.rand(5)
    assert torch.equal(torch.rand(4, generator=one), torch.rand(4, generator=two))
    assert not torch.equal(torch.rand(4, generator=one), torch.rand(4, generator=create_generator(1, "data")))
    torch.set_rng_state(before)
