"""How far replicas are apart, and the pieces in which tensors are sent."""

from __future__ import annotations

import pytest
import torch

from farflung.engine.averaging import _cut_by_size, estimate_max_divergence
from farflung.sim import VirtualWorld


@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e6])
def test_the_spread_is_the_largest_distance_from_the_mean_by_the_norm(scale: float) -> None:
    """Of parameters of one element each, whose sums are themselves; who does not take part counts nothing."""
    values = (
        torch.tensor([[3.0, 4.0, 0.0], [3.0, 4.0, 1.0], [3.0, 5.0, 1.0], [90.0, 90.0, 90.0]]).double() * scale
    )
    compared, world = values[:3], VirtualWorld(4)
    found = world.run(
        [
            estimate_max_divergence(runtime, list(own.split(1)), 0, should_contribute=runtime.comm.rank < 3)
            for runtime, own in zip(world.runtimes, values, strict=True)
        ]
    )
    distance = (compared - compared.mean(dim=0)).norm(dim=1).max()
    wanted = float(distance / compared.square().sum(dim=1).mean().sqrt())
    assert found == pytest.approx([wanted] * 4)


def test_replicas_that_are_equal_are_not_apart_at_all() -> None:
    world, own = VirtualWorld(3), [torch.randn(5, 7), torch.randn(2)]
    assert world.run([estimate_max_divergence(runtime, own, 0) for runtime in world.runtimes]) == [0.0] * 3


@pytest.mark.parametrize(
    ("shape", "count"),
    [((1001,), 5), ((40, 24), 4), ((3, 400), 6), ((), 1), ((0,), 1), ((250,), 1), ((2, 2, 125), 2)],
)
def test_tensors_are_cut_into_as_few_pieces_as_their_rows_allow(shape: tuple[int, ...], count: int) -> None:
    tensor = torch.randn(shape)
    pieces = _cut_by_size(tensor, 1000)
    assert len(pieces) == count
    assert all(piece.nbytes <= 1000 for piece in pieces)
    assert torch.equal(torch.cat([piece.flatten() for piece in pieces]), tensor.flatten())
