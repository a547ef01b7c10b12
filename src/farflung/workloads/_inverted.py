"""Inverted residual blocks: MobileNetV2, and cut down to pictures of 64 x 64."""

from __future__ import annotations

from typing import cast

from torch import Tensor, nn
from typing_extensions import override

from farflung.workloads._residual import BATCH_NORM_MOMENTUM

__all__ = ["mobilenet", "mobilenetv2"]


def mobilenet(classes: int) -> nn.Module:
    """A stem, seven inverted residual blocks of 16 to 96 channels, and the mean of a 4 x 4 picture.

    Args:
      classes: outputs.

    References: Sandler et al. 2018, arXiv:1801.04381; expansion 4 in place of 6, widths halved.
    """
    layers: list[nn.Module] = [*_conv(3, 16, 3, stride=2)]
    width = 16
    for out, stride in ((16, 1), (24, 2), (24, 1), (48, 2), (48, 1), (96, 2), (96, 1)):
        layers.append(_Inverted(width, out, stride))
        width = out
    layers += _conv(width, 192, 1)
    return nn.Sequential(
        *layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(0.1), nn.Linear(192, classes)
    )


def mobilenetv2(classes: int) -> nn.Module:
    """MobileNetV2 of width 1: 17 inverted residual blocks, with 32 pixels of the picture to each of the last ones.

    Args:
      classes: outputs.

    References: Sandler et al. 2018, arXiv:1801.04381, table 2.
    """
    layers: list[nn.Module] = [*_conv(3, 32, 3, stride=2, momentum=0.1)]
    width = 32
    for expansion, out, count, stride in (
        (1, 16, 1, 1),
        (6, 24, 2, 2),
        (6, 32, 3, 2),
        (6, 64, 4, 2),
        (6, 96, 3, 1),
        (6, 160, 3, 2),
        (6, 320, 1, 1),
    ):
        for index in range(count):
            layers.append(_Inverted(width, out, 1 if index else stride, expansion, momentum=0.1))
            width = out
    layers += _conv(width, 1280, 1, momentum=0.1)
    return nn.Sequential(
        *layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(0.2), nn.Linear(1280, classes)
    )


def _conv(
    width: int,
    out: int,
    kernel: int,
    *,
    stride: int = 1,
    groups: int = 1,
    momentum: float = BATCH_NORM_MOMENTUM,
) -> list[nn.Module]:
    conv = nn.Conv2d(width, out, kernel, stride, kernel // 2, groups=groups, bias=False)
    return [conv, nn.BatchNorm2d(out, momentum=momentum), nn.ReLU6()]


class _Inverted(nn.Module):
    def __init__(
        self,
        width: int,
        out: int,
        stride: int,
        expansion: int = 4,
        *,
        momentum: float = BATCH_NORM_MOMENTUM,
    ) -> None:
        super().__init__()
        wide = expansion * width
        self.body = nn.Sequential(
            *(_conv(width, wide, 1, momentum=momentum) if expansion > 1 else []),
            *_conv(wide, wide, 3, stride=stride, groups=wide, momentum=momentum),
            nn.Conv2d(wide, out, 1, bias=False),
            nn.BatchNorm2d(out, momentum=momentum),
        )
        self.residual = stride == 1 and width == out

    @override
    def forward(self, x: Tensor) -> Tensor:
        y = cast("Tensor", self.body(x))
        return x + y if self.residual else y
