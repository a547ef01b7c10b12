"""Steps of one size, by signs."""

from __future__ import annotations

import torch

from farflung.config import Training


def test_each_number_moves_by_the_rate_against_the_sign_of_its_gradient() -> None:
    p = torch.nn.Parameter(torch.tensor([1.0, 2.0, -3.0, 4.0]))
    other = torch.nn.Parameter(torch.ones(2))
    settings = Training(1, 1, 0.1, momentum=0.9, weight_decay=0.5, optimizer="sign_sgd")
    optimizer = settings.make_optimizer([p, other])
    p.grad = torch.tensor([1e-9, -7.0, 3.0, 0.0])
    optimizer.step()
    expected = 0.95 * torch.tensor([1.0, 2.0, -3.0, 4.0]) - 0.1 * torch.tensor([1.0, -1.0, 1.0, 0.0])
    torch.testing.assert_close(p.detach(), expected)
    assert other.tolist() == [1.0, 1.0]
