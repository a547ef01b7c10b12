"""Plain convolutional networks in the manner of VGG: 3 x 3 filters, halved by pooling."""

from __future__ import annotations

from torch import nn

__all__ = ["vgg"]


def vgg(channels: int, widths: tuple[int | None, ...], classes: int) -> nn.Module:
    """Convolutions of the given widths with batch norm; ``None`` halves the picture; then the mean of what is left.

    Args:
      channels: of the input.
      widths: of each convolution, or ``None`` for a pooling.
      classes: outputs.

    References: Simonyan & Zisserman 2014, arXiv:1409.1556; batch norm and the mean in place of the large dense
    layers are usual on small pictures.
    """
    layers: list[nn.Module] = []
    for width in widths:
        if width is None:
            layers.append(nn.MaxPool2d(2))
        else:
            layers += [nn.Conv2d(channels, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU()]
            channels = width
    return nn.Sequential(
        *layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(0.1), nn.Linear(channels, classes)
    )
