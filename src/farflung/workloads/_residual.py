"""Residual networks for images of 32 x 32."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

__all__ = ["BATCH_NORM_MOMENTUM", "resnet"]

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

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm2(self.conv2(torch.relu(self.norm1(self.conv1(x)))))
        shortcut = F.pad(x[:, :, :: self.stride, :: self.stride], (0, 0, 0, 0, 0, self.more))
        return torch.relu(y + shortcut)
