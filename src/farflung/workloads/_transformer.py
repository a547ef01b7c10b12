"""A small decoder-only transformer."""

from __future__ import annotations

import math

from torch import Tensor, nn
from torch.nn import functional as F
from typing_extensions import override

__all__ = ["Transformer"]

SPREAD = 0.02
"""Standard deviation of initial weights."""


class Transformer(nn.Module):
    """Predicts what follows each position of a window from the positions up to it.

    Norms come before each half of a block, no layer has a bias, and the weights of the embedding are those of the
    output. Initial weights are normal with a standard deviation of 0.02, and that over the root of twice the layers
    where a block adds to what passes by.

    Args:
      symbols: of the alphabet.
      length: of the longest window.
      layers: blocks.
      heads: of attention in each; a divisor of ``width``.
      width: numbers for each position.
    """

    def __init__(self, symbols: int, length: int, layers: int, heads: int, width: int) -> None:
        super().__init__()
        self.symbol = nn.Embedding(symbols, width)
        self.place = nn.Embedding(length, width)
        self.blocks = nn.ModuleList(_Block(heads, width) for _ in range(layers))
        self.norm = nn.LayerNorm(width, bias=False)
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=SPREAD)
        for block in self.blocks:
            assert isinstance(block, _Block)
            for adds in (block.out, block.down):
                nn.init.normal_(adds.weight, std=SPREAD / math.sqrt(2 * layers))

    @override
    def forward(self, symbols: Tensor) -> Tensor:
        """Logits of what follows each position, shape ``(n, length, symbols)``."""
        states = self.symbol(symbols) + self.place.weight[: symbols.shape[1]]
        for block in self.blocks:
            states = block(states)
        return F.linear(self.norm(states), self.symbol.weight)


class _Block(nn.Module):
    """Attention to earlier positions, and two layers for each position by itself."""

    def __init__(self, heads: int, width: int) -> None:
        super().__init__()
        self.heads = heads
        self.before_attention = nn.LayerNorm(width, bias=False)
        self.queries_keys_values = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.before_layers = nn.LayerNorm(width, bias=False)
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)

    @override
    def forward(self, states: Tensor) -> Tensor:
        states = states + self.out(self._attended(self.before_attention(states)))
        layers: Tensor = self.down(F.gelu(self.up(self.before_layers(states))))
        return states + layers

    def _attended(self, states: Tensor) -> Tensor:
        many, length, width = states.shape
        parts = self.queries_keys_values(states).view(many, length, 3, self.heads, width // self.heads)
        queries, keys, values = parts.permute(2, 0, 3, 1, 4)
        attended: Tensor = F.scaled_dot_product_attention(queries, keys, values, is_causal=True)
        return attended.transpose(1, 2).reshape(many, length, width)
