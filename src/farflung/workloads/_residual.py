"""Residual networks for images of 32 x 32: small ones, and those for large images with another stem."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from typing_extensions import override

__all__ = ["BATCH_NORM_MOMENTUM", "resnet", "resnet18", "resnet50"]

BATCH_NORM_MOMENTUM = 0.3
"""Share of a new batch in the running statistics: they then follow the last few batches instead of the last ten, since
in the first epoch weights move so fast that older statistics cost 2 to 4 points of accuracy."""


def resnet(depth: int, classes: int) -> nn.Module:
    """Three stages of 16, 32 and 64 channels with ``(depth - 2) / 6`` blocks each; shortcuts without parameters.

    Args:
      depth: 8, 14, 20, ...
      classes: outputs.

    References: He et al. 2015, arXiv:1512.03385, section 4.2 (shortcuts of option A).
    """
    blocks = (depth - 2) // 6
    layers: list[nn.Module] = [nn.Conv2d(3, 16, 3, padding=1, bias=False), _norm(16), nn.ReLU()]
    width = 16
    for stage in (16, 32, 64):
        for _ in range(blocks):
            layers.append(_Block(width, stage))
            width = stage
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, classes))


def resnet18(classes: int) -> nn.Module:
    """Two blocks of two convolutions in each of four stages of 64, 128, 256 and 512 channels.

    Args:
      classes: outputs.

    References: He et al. 2015, arXiv:1512.03385, table 1; for small images the stem is one 3 x 3 convolution, without
      pooling.
    """
    return _four_stages(_Basic, (2, 2, 2, 2), classes)


def resnet50(classes: int) -> nn.Module:
    """3, 4, 6 and 3 bottlenecks in four stages of 256, 512, 1,024 and 2,048 channels; see :func:`resnet18`."""
    return _four_stages(_Bottleneck, (3, 4, 6, 3), classes)


def _four_stages(
    block: type[_Basic | _Bottleneck], counts: tuple[int, int, int, int], classes: int
) -> nn.Module:
    layers: list[nn.Module] = [*_conv(3, 64, 3), nn.ReLU()]
    width = 64
    for stage, count in enumerate(counts):
        for index in range(count):
            layers.append(block(width, 64 << stage, 2 if stage and not index else 1))
            width = block.expansion * 64 << stage
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, classes))


def _conv(width: int, out: int, kernel: int, stride: int = 1) -> list[nn.Module]:
    return [nn.Conv2d(width, out, kernel, stride, kernel // 2, bias=False), nn.BatchNorm2d(out)]


class _Basic(nn.Module):
    expansion = 1

    def __init__(self, width: int, inner: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(*_conv(width, inner, 3, stride), nn.ReLU(), *_conv(inner, inner, 3))
        self.shortcut = _projection(width, inner, stride)

    @override
    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.body(x) + self.shortcut(x))


class _Bottleneck(nn.Module):
    expansion = 4

    def __init__(self, width: int, inner: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            *_conv(width, inner, 1),
            nn.ReLU(),
            *_conv(inner, inner, 3, stride),
            nn.ReLU(),
            *_conv(inner, 4 * inner, 1),
        )
        self.shortcut = _projection(width, 4 * inner, stride)

    @override
    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.body(x) + self.shortcut(x))


def _projection(width: int, out: int, stride: int) -> nn.Module:
    """The shortcut of option B: nothing where the shape stays, else a 1 x 1 convolution."""
    return nn.Identity() if (width, stride) == (out, 1) else nn.Sequential(*_conv(width, out, 1, stride))


def _norm(width: int) -> nn.Module:
    return nn.BatchNorm2d(width, momentum=BATCH_NORM_MOMENTUM)


class _Block(nn.Module):
    def __init__(self, width: int, out: int) -> None:
        super().__init__()
        self.stride = out // width
        self.more = out - width
        self.conv1 = nn.Conv2d(width, out, 3, stride=self.stride, padding=1, bias=False)
        self.norm1 = _norm(out)
        self.conv2 = nn.Conv2d(out, out, 3, padding=1, bias=False)
        self.norm2 = _norm(out)

    @override
    def forward(self, x: Tensor) -> Tensor:
        y = self.norm2(self.conv2(torch.relu(self.norm1(self.conv1(x)))))
        shortcut = F.pad(x[:, :, :: self.stride, :: self.stride], (0, 0, 0, 0, 0, self.more))
        return torch.relu(y + shortcut)
