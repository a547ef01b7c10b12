"""Networks of the workloads: convolutional ones for small images, and two for sequences of symbols."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from typing_extensions import override

__all__ = ["BATCH_NORM_MOMENTUM", "NextSymbol", "Transformer", "resnet", "resnet18", "resnet50", "vgg"]

BATCH_NORM_MOMENTUM = 0.3
"""Share of a new batch in the running statistics, which then follow a few batches instead of ten. Weights move so
fast in the first epoch that older statistics cost 2 to 4 points of accuracy."""
_INITIAL_STD = 0.02
"""Standard deviation of a transformer's initial weights."""


def resnet(depth: int, classes: int) -> nn.Module:
    """Builds a residual network of three stages of 16, 32 and 64 channels with ``(depth - 2) // 6`` blocks each.

    Args:
      depth: Number of layers: 8, 14, 20, ...
      classes: Number of outputs.

    References: He et al. 2015, arXiv:1512.03385, section 4.2 (shortcuts of option A, without parameters).
    """
    blocks = (depth - 2) // 6
    layers: list[nn.Module] = [nn.Conv2d(3, 16, 3, padding=1, bias=False), _build_norm(16), nn.ReLU()]
    width = 16
    for stage in (16, 32, 64):
        for _ in range(blocks):
            layers.append(_ResidualBlock(width, stage))
            width = stage
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, classes))


def resnet18(classes: int) -> nn.Module:
    """Builds ResNet-18: two blocks of two convolutions in each of four stages of 64, 128, 256 and 512 channels.

    Args:
      classes: Number of outputs.

    References: He et al. 2015, arXiv:1512.03385, table 1; for small images the stem is one 3 x 3 convolution, without
      pooling.
    """
    return _build_resnet(_Basic, (2, 2, 2, 2), classes)


def resnet50(classes: int) -> nn.Module:
    """Builds ResNet-50: 3, 4, 6 and 3 bottlenecks in stages of 256 to 2,048 channels; see :func:`resnet18`."""
    return _build_resnet(_Bottleneck, (3, 4, 6, 3), classes)


def _build_resnet(
    block: type[_Basic | _Bottleneck], counts: tuple[int, int, int, int], classes: int
) -> nn.Module:
    layers: list[nn.Module] = [*_build_conv(3, 64, 3), nn.ReLU()]
    width = 64
    for stage, count in enumerate(counts):
        for index in range(count):
            layers.append(block(width, 64 << stage, 2 if stage and not index else 1))
            width = block.expansion * 64 << stage
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, classes))


def _build_conv(width: int, out: int, kernel: int, stride: int = 1) -> list[nn.Module]:
    return [nn.Conv2d(width, out, kernel, stride, kernel // 2, bias=False), nn.BatchNorm2d(out)]


class _Basic(nn.Module):
    expansion = 1

    def __init__(self, width: int, inner: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            *_build_conv(width, inner, 3, stride), nn.ReLU(), *_build_conv(inner, inner, 3)
        )
        self.shortcut = _build_shortcut(width, inner, stride)

    @override
    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.body(x) + self.shortcut(x))


class _Bottleneck(nn.Module):
    expansion = 4

    def __init__(self, width: int, inner: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            *_build_conv(width, inner, 1),
            nn.ReLU(),
            *_build_conv(inner, inner, 3, stride),
            nn.ReLU(),
            *_build_conv(inner, 4 * inner, 1),
        )
        self.shortcut = _build_shortcut(width, 4 * inner, stride)

    @override
    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.body(x) + self.shortcut(x))


def _build_shortcut(width: int, out: int, stride: int) -> nn.Module:
    """Builds the shortcut of option B: identity if the shape stays, else a 1 x 1 convolution."""
    return (
        nn.Identity() if (width, stride) == (out, 1) else nn.Sequential(*_build_conv(width, out, 1, stride))
    )


def _build_norm(width: int) -> nn.Module:
    return nn.BatchNorm2d(width, momentum=BATCH_NORM_MOMENTUM)


class _ResidualBlock(nn.Module):
    """Residual block of two convolutions with batch norms, and a shortcut padded with zero channels."""

    def __init__(self, width: int, out: int) -> None:
        super().__init__()
        self.stride = out // width
        self.new_channels = out - width
        self.conv1 = nn.Conv2d(width, out, 3, stride=self.stride, padding=1, bias=False)
        self.norm1 = _build_norm(out)
        self.conv2 = nn.Conv2d(out, out, 3, padding=1, bias=False)
        self.norm2 = _build_norm(out)

    @override
    def forward(self, x: Tensor) -> Tensor:
        y = self.norm2(self.conv2(torch.relu(self.norm1(self.conv1(x)))))
        shortcut = F.pad(x[:, :, :: self.stride, :: self.stride], (0, 0, 0, 0, 0, self.new_channels))
        return torch.relu(y + shortcut)


def vgg(
    shape: tuple[int, int, int],
    widths: tuple[int | None, ...],
    hidden: int,
    classes: int,
    *,
    norm: bool = False,
) -> nn.Module:
    """Builds convolutions of the given widths, then two dense layers.

    The original has no batch norm; in trainings of a few hundred steps its running statistics lag behind the weights.
    Filters are initialised as in He et al. 2015 (arXiv:1502.01852); without it deep plain networks hardly learn.

    Args:
      shape: Channels, height and width of the input.
      widths: Width of each convolution; ``None`` halves the picture.
      hidden: Width of the first dense layer.
      classes: Number of outputs.
      norm: Adds batch norm after each convolution.

    References: Simonyan & Zisserman 2014, arXiv:1409.1556.
    """
    channels, height, width = shape
    layers: list[nn.Module] = []
    for out in widths:
        if out is None:
            layers.append(nn.MaxPool2d(2))
            height, width = height // 2, width // 2
        else:
            conv = nn.Conv2d(channels, out, 3, padding=1)
            nn.init.kaiming_normal_(conv.weight)
            nn.init.zeros_(conv.get_parameter("bias"))
            layers += [conv, *([nn.BatchNorm2d(out)] if norm else []), nn.ReLU()]
            channels = out
    return nn.Sequential(
        *layers,
        nn.Flatten(),
        nn.Dropout(0.1),
        nn.Linear(channels * height * width, hidden),
        nn.ReLU(),
        nn.Linear(hidden, classes),
    )


class NextSymbol(nn.Module):
    """Recurrent model of the next symbol: embedding, LSTM, and one dense layer at every position.

    Args:
      symbols: Number of symbols.
      width: Width of the embedding.
      hidden: Width of the LSTM.
    """

    def __init__(self, symbols: int, width: int, hidden: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(symbols, width)
        self.lstm = nn.LSTM(width, hidden, batch_first=True)
        self.head = nn.Linear(hidden, symbols)
        with torch.no_grad():  # forget gates are open at first
            self.lstm.get_parameter("bias_ih_l0")[hidden : 2 * hidden].fill_(1.0)

    @override
    def forward(self, symbols: Tensor) -> Tensor:
        """Returns logits of the next symbol at each position, shape ``(n, length, symbols)``."""
        states, _ = self.lstm(self.embedding(symbols))
        logits: Tensor = self.head(states)
        return logits


class Transformer(nn.Module):
    """Transformer that predicts the next symbol at each position of a window from the positions up to it.

    Norms come before each half of a block, no layer has a bias, and embedding and output share weights. Initial
    weights are normal with a standard deviation of 0.02; those of layers that add to the residual stream are divided
    by the root of twice the number of layers.

    Args:
      symbols: Number of symbols.
      length: Length of the longest window.
      layers: Number of blocks.
      heads: Attention heads of each block; a divisor of ``width``.
      width: Width of each position.
    """

    def __init__(self, symbols: int, length: int, layers: int, heads: int, width: int) -> None:
        super().__init__()
        self.symbol = nn.Embedding(symbols, width)
        self.place = nn.Embedding(length, width)
        self.blocks = nn.ModuleList(_TransformerBlock(heads, width) for _ in range(layers))
        self.norm = nn.LayerNorm(width, bias=False)
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=_INITIAL_STD)
        for block in self.blocks:
            assert isinstance(block, _TransformerBlock)
            for adds in (block.out, block.down):
                nn.init.normal_(adds.weight, std=_INITIAL_STD / math.sqrt(2 * layers))

    @override
    def forward(self, symbols: Tensor) -> Tensor:
        """Returns logits of the next symbol at each position, shape ``(n, length, symbols)``."""
        states = self.symbol(symbols) + self.place.weight[: symbols.shape[1]]
        for block in self.blocks:
            states = block(states)
        return F.linear(self.norm(states), self.symbol.weight)


class _TransformerBlock(nn.Module):
    """Transformer block: causal attention and two dense layers, each with a layer norm and a residual."""

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
        states = states + self.out(self._compute_attention(self.before_attention(states)))
        layers: Tensor = self.down(F.gelu(self.up(self.before_layers(states))))
        return states + layers

    def _compute_attention(self, states: Tensor) -> Tensor:
        batch_size, length, width = states.shape
        parts = self.queries_keys_values(states).view(batch_size, length, 3, self.heads, width // self.heads)
        queries, keys, values = parts.permute(2, 0, 3, 1, 4)
        attention: Tensor = F.scaled_dot_product_attention(queries, keys, values, is_causal=True)
        return attention.transpose(1, 2).reshape(batch_size, length, width)
