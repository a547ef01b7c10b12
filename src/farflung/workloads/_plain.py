"""Plain convolutional networks in the manner of VGG: 3 x 3 filters, halved by pooling, dense layers at the end."""

from __future__ import annotations

from torch import nn

__all__ = ["vgg"]


def vgg(
    shape: tuple[int, int, int],
    widths: tuple[int | None, ...],
    hidden: int,
    classes: int,
    *,
    norm: bool = False,
) -> nn.Module:
    """Convolutions of the given widths, then two dense layers.

    Without ``norm`` there is no batch norm, as in the original: in trainings of a few hundred steps its running
    statistics lag behind the weights. Filters start as He et al. 2015 (arXiv:1502.01852) propose, without which deep
    plain networks hardly begin to learn.

    Args:
      shape: channels, height and width of the input.
      widths: of each convolution; ``None`` halves the picture.
      hidden: width of the first dense layer.
      classes: outputs.
      norm: puts batch norm behind each convolution.

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
