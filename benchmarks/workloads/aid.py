"""The Aerial Image Dataset at 64 x 64: 10,000 colour images in 30 classes, of which a fixed fifth is for testing.

There is no official split; here the 2,000 images whose SHA-256 of seed and name is smallest are the test set.
Needs Pillow (the extra ``dev``) to decode JPEG; two versions of its decoder may differ by one level in a pixel.

Reference: Xia et al., "AID: A Benchmark Dataset for Performance Evaluation of Aerial Scene Classification", 2017.
"""

from __future__ import annotations

import hashlib
import io
from functools import partial
from pathlib import Path
from typing import cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from typing_extensions import override

from farflung.data.datasets import TensorDataset
from farflung.data.images import Compose, Normalize, RandomFlip, RandomShift
from farflung.data.source import File, Location, Source, iter_members, locate
from farflung.errors import DataError
from farflung.extras import require_modules
from farflung.types import Workload
from farflung.workloads import Classification
from farflung.workloads.classification import build_mercury_settings, build_settings
from farflung.workloads.models import BATCH_NORM_MOMENTUM

__all__ = ["SOURCE", "full_network", "load", "mobilenet", "mobilenetv2", "read", "small_network"]

SOURCE = Source(
    name="aid-64",
    title="10,000 aerial images, colour 64x64, 30 classes",
    licence="research use, AID authors",
    homepage="https://captain-whu.github.io/AID/",
    files=(File("aid-64.tar"),),
    instructions="get AID from https://captain-whu.github.io/AID/, scale the images to 64x64 and put a tar of "
    "<Class>/<file>.jpg into FARFLUNG_DATA/aid-64/aid-64.tar",
    samples=(8_000, 2_000),
)

NORMALIZE = Normalize((0.398, 0.409, 0.368), (0.214, 0.190, 0.184))
_SPLIT_SEED = 0


def mobilenet() -> Workload:
    """AID at 64 x 64 with a small MobileNetV2.

    Test accuracy with the defaults (1,000 steps of 32, four epochs, seed 0): 54.6 % of 30 classes. A linear model:
    25.8 % after 2,000 steps.
    """
    return Classification(
        name="aid/mobilenet",
        build_network=partial(small_network, 30),
        load_data=load,
        defaults=build_settings(batch_size=32, learning_rate=0.03, weight_decay=1e-4, steps=1000),
    )


def mobilenetv2() -> Workload:
    """AID at 64 x 64 with MobileNetV2, 2.3 million parameters, as Mercury's paper has it.

    The paper does not say how large its pictures are. For two cores there is :func:`mobilenet`.
    """
    return Classification(
        name="aid/mobilenetv2",
        build_network=partial(full_network, 30),
        load_data=load,
        defaults=build_mercury_settings(batch_size=32),
    )


# --- samples --------------------------------------------------------------------------------------------------------


def load() -> tuple[TensorDataset, TensorDataset]:
    """Training and test set; training images are shifted by up to 6 pixels and mirrored at random.

    Raises:
      DataError: absent, truncated or altered file.
      MissingExtra: Pillow is not installed.
    """
    return read(locate(SOURCE), count=10_000, classes=30)


def read(found: Location, *, count: int, classes: int) -> tuple[TensorDataset, TensorDataset]:
    """Reads the archive in ``found``; ``count`` images in ``classes`` classes there must be.

    Raises:
      DataError: truncated, another number of images or classes, or an image that is not 64 x 64.
      MissingExtra: Pillow is not installed.
    """
    require_modules("data set aid-64", "PIL", extra="dev")
    path = found.get_path(SOURCE.files[0].name)
    images = dict(sorted(iter_members(path, lambda name: name.lower().endswith(".jpg"))))
    names = sorted({name.split("/")[0] for name in images})
    if (len(images), len(names)) != (count, classes):
        raise DataError(
            f"{path}: expected {count} images in {classes} classes, found {len(images)} in {len(names)}"
        )
    pixels = torch.from_numpy(np.stack([_decode(path, *item) for item in images.items()]))
    labels = torch.tensor([names.index(name.split("/")[0]) for name in images])
    keys = [hashlib.sha256(f"{_SPLIT_SEED}/{name}".encode()).digest() for name in images]
    ranked = sorted(range(count), key=keys.__getitem__)
    test, train = (torch.tensor(sorted(ids)) for ids in (ranked[: count // 5], ranked[count // 5 :]))
    origin = f"aid-64, {found.folder}"
    augment = Compose(RandomShift(6), RandomFlip())
    return (
        TensorDataset(pixels[train], labels[train], labels[train], NORMALIZE, augment, origin=origin),
        TensorDataset(pixels[test], labels[test], labels[test], NORMALIZE, origin=origin),
    )


def _decode(path: Path, name: str, content: bytes) -> npt.NDArray[np.uint8]:
    from PIL import Image

    try:
        with Image.open(io.BytesIO(content), formats=["JPEG"]) as image:
            size, values = image.size, np.asarray(image.convert("RGB"), dtype=np.uint8)
    except (OSError, ValueError) as error:
        raise DataError(f"{path}: {name}: not a whole JPEG image ({error})") from None
    if size != (64, 64):
        raise DataError(f"{path}: {name}: expected 64 x 64 pixels, found {size[0]} x {size[1]}")
    return values.transpose(2, 0, 1)


# --- models ---------------------------------------------------------------------------------------------------------


def small_network(classes: int) -> nn.Module:
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


def full_network(classes: int) -> nn.Module:
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
