"""Gradient codes: whoever is missing, the others make the whole."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from farflung.errors import ConfigError
from farflung.gradient_coding import GradientCode, gradient_code
from tests.helpers import same_bits


@st.composite
def codes(draw: st.DrawFn) -> GradientCode:
    """Of either construction."""
    stragglers = draw(st.integers(0, 6))
    if draw(st.booleans()):
        size = (stragglers + 1) * draw(st.integers(1, 3))
        return gradient_code("fractional_repetition", size, stragglers, draw(st.integers(0, 99)))
    size = draw(st.integers(stragglers + 1, 12))
    return gradient_code("cyclic", size, stragglers, draw(st.integers(0, 99)))


@given(codes(), st.data())
def test_any_that_are_enough_decode(code: GradientCode, data: st.DataObject) -> None:
    alive = data.draw(st.permutations(range(code.size)))[: code.needed]
    found = code.decoding(alive)
    assert float((found @ code.matrix[alive] - 1).abs().max()) < 1e-9
    gradients = torch.randn(code.size, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    coded = [code.coefficients(rank) @ gradients[list(code.shares[rank])] for rank in alive]
    assert torch.allclose(found @ torch.stack(coded), gradients.sum(dim=0), rtol=0, atol=1e-7)


@given(codes())
def test_each_replica_has_as_many_shares_and_each_share_as_many_replicas(code: GradientCode) -> None:
    stragglers = code.size - code.needed
    assert {len(set(shares)) for shares in code.shares} == {stragglers + 1}
    held = [share for shares in code.shares for share in shares]
    assert all(held.count(share) == stragglers + 1 for share in range(code.size))
    for rank, shares in enumerate(code.shares):
        assert set(code.matrix[rank].nonzero().flatten().tolist()) == set(shares)


def test_cyclic_rows_begin_at_their_own_share_and_are_in_the_kernel() -> None:
    code = gradient_code("cyclic", 5, 2, 7)
    assert code.shares == ((0, 1, 2), (1, 2, 3), (2, 3, 4), (3, 4, 0), (4, 0, 1))
    assert code.matrix.diag().tolist() == [1.0] * 5
    assert int(torch.linalg.matrix_rank(code.matrix)) == 3
    assert torch.linalg.svdvals(code.matrix)[-2:].max() < 1e-12


def test_groups_repeat_shares() -> None:
    code = gradient_code("fractional_repetition", 6, 2, 0)
    assert code.shares == ((0, 1, 2),) * 3 + ((3, 4, 5),) * 3
    for alive in itertools.combinations(range(6), 4):
        found = code.decoding(alive).tolist()
        for group in (range(3), range(3, 6)):
            there = [rank for rank in alive if rank in group]
            for rank in there:
                assert found[alive.index(rank)] == pytest.approx(1 / len(there))


def test_shares_are_repeated_where_that_is_possible() -> None:
    assert gradient_code("auto", 4, 1, 3).shares == gradient_code("fractional_repetition", 4, 1, 3).shares
    assert gradient_code("auto", 5, 1, 3).shares == gradient_code("cyclic", 5, 1, 3).shares
    assert torch.equal(gradient_code("auto", 3, 0, 3).matrix, torch.eye(3, dtype=torch.float64))


def test_a_code_is_of_the_runs_seed() -> None:
    one = gradient_code("cyclic", 6, 2, 5).matrix
    gradient_code.cache_clear()
    assert same_bits(gradient_code("cyclic", 6, 2, 5).matrix, one)
    assert not torch.equal(gradient_code("cyclic", 6, 2, 6).matrix, one)


@pytest.mark.parametrize("construction", ["cyclic", "fractional_repetition"])
def test_too_few_are_refused(construction: str) -> None:
    with pytest.raises(ConfigError, match="ranks 0, 1 of 4 do not make the whole gradient"):
        gradient_code(construction, 4, 1, 0).decoding([0, 1])


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (("cyclic", 4, 4), "stragglers 4 must be below the number of replicas, which is 4"),
        (("auto", 1, 1), "stragglers 1 must be below the number of replicas, which is 1"),
        (("cyclic", 4, -1), "stragglers -1 must be at least 0"),
        (("fractional_repetition", 4, 2), "groups of stragglers \\+ 1 = 3, and there are 4"),
        (("mds", 4, 1), "construction 'mds' must be one of auto, cyclic, fractional_repetition"),
    ],
)
def test_there_is_not_every_code(given: tuple[str, int, int], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        gradient_code(*given, 0)
