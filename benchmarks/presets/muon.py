"""Muon for the hidden matrices of a transformer and AdamW for everything else, as one torch optimizer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from typing_extensions import override

__all__ = ["MuonAdamW", "MuonAdamWSettings"]


class MuonAdamW(torch.optim.Optimizer):
    """Torch's Muon, whose updates have the size of AdamW's, and torch's AdamW, with a learning rate in common.

    Args:
      hidden: matrices for Muon.
      others: parameters for AdamW.
      lr: learning rate of both.
      weight_decay: of both.
      betas: of AdamW; the first is Muon's momentum.

    Reference: Thérien et al. 2025 (MuLoCo, arXiv 2505.23725), section 3; the sizes of updates by Liu et al. 2025.
    """

    def __init__(
        self,
        hidden: Sequence[nn.Parameter],
        others: Sequence[nn.Parameter],
        *,
        lr: float,
        weight_decay: float,
        betas: tuple[float, float],
    ) -> None:
        self._inner: tuple[torch.optim.Optimizer, ...] = (
            torch.optim.Muon(hidden, lr, weight_decay, momentum=betas[0], adjust_lr_fn="match_rms_adamw"),
            torch.optim.AdamW(others, lr, betas, weight_decay=weight_decay),
        )
        super().__init__([group for inner in self._inner for group in inner.param_groups], {})
        self._link()

    def _link(self) -> None:
        """Let the two work on this optimizer's groups and state."""
        for inner, group in zip(self._inner, self.param_groups, strict=True):
            inner.param_groups, inner.state = [group], self.state

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self._link()

    @override
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        assert closure is None
        for inner in self._inner:
            inner.step()


@dataclass(frozen=True, slots=True, kw_only=True)
class MuonAdamWSettings:
    """The settings of :class:`MuonAdamW` for a transformer: its hidden matrices are those of its width.

    Args:
      width: the numbers for each position; a matrix with another side than its multiples is no hidden one.
      symbols: of the alphabet, by which an embedding and the head are known.
      betas: see there.
    """

    width: int = 128
    symbols: int = 256
    betas: tuple[float, float] = (0.9, 0.99)

    def make(
        self,
        parameters: Sequence[nn.Parameter],
        *,
        learning_rate: float,
        momentum: float,
        weight_decay: float,
    ) -> MuonAdamW:
        del momentum

        def is_hidden(parameter: nn.Parameter) -> bool:
            sides = parameter.shape
            return (
                len(sides) == 2 and self.symbols not in sides and not any(side % self.width for side in sides)
            )

        hidden = [one for one in parameters if is_hidden(one)]
        others = [one for one in parameters if not is_hidden(one)]
        return MuonAdamW(hidden, others, lr=learning_rate, weight_decay=weight_decay, betas=self.betas)
