"""Makes the packaged subset of Fashion-MNIST from the official files.

The choice depends on the seed and the official order alone: of each class, the images with the smallest SHA-256 of
``seed/split/index``. With the same zlib the files come out byte for byte the same; ``--check`` compares what is in
the package with what would be written, content first.

    FARFLUNG_DATA=... python scripts/make_fashion_subset.py [--check] [FOLDER]
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import sys
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from farflung.data.fashion_mnist import SOURCE, load
from farflung.data.source import PACKAGED

SEED = 20240229
PER_CLASS = {"train": 1_000, "t10k": 200}


def chosen(labels: Tensor, split: str) -> Tensor:
    """Ids of the subset's samples of one split, ascending."""
    ids: list[int] = []
    for label in range(10):
        members = torch.nonzero(labels == label).flatten().tolist()
        members.sort(key=lambda i: hashlib.sha256(f"{SEED}/{split}/{i}".encode()).digest())
        ids += members[: PER_CLASS[split]]
    return torch.tensor(sorted(ids))


def packed(values: Tensor) -> bytes:
    """``values`` as a gzipped IDX file of bytes; the same each time with the same zlib."""
    array = values.to(torch.uint8).contiguous().numpy()
    header = bytes((0, 0, 8, array.ndim)) + np.array(array.shape, ">u4").tobytes()
    return gzip.compress(header + array.tobytes(), compresslevel=9, mtime=0)


def subset() -> dict[str, bytes]:
    """The four files."""
    files: dict[str, bytes] = {}
    for split, data in zip(("train", "t10k"), load("full"), strict=True):
        ids = chosen(data.targets, split)
        files[f"{split}-images-idx3-ubyte.gz"] = packed(data.inputs[ids, 0])
        files[f"{split}-labels-idx1-ubyte.gz"] = packed(data.targets[ids])
    return files


def main() -> int:
    """Writes or checks the four files."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", nargs="?", type=Path, default=PACKAGED / SOURCE.name)
    parser.add_argument("--check", action="store_true", help="write nothing; fail when the files differ")
    options = parser.parse_args()
    bad = 0
    for name, content in subset().items():
        path = options.folder / name
        digest = hashlib.sha256(gzip.decompress(content)).hexdigest()
        if options.check:
            there = path.read_bytes()
            same = gzip.decompress(there) == gzip.decompress(content)
            bad += not same
            note = "same bytes" if there == content else "same content" if same else "DIFFERENT"
            print(f"{name}: {note}")
        else:
            options.folder.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
            print(f"{name}: {len(content)} bytes, content sha256 {digest}")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
