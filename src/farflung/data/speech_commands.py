"""Google Speech Commands: single words of one second as log-mel spectrograms (see :mod:`farflung.data.log_mel`).

Three sets: the official archives of version 0.01 (30 words) and 0.02 (35 words), with the test set that their
``testing_list.txt`` names, and ``speech-commands-9``, a speaker-disjoint selection of nine words of version 0.01 whose
spectrograms come ready in one file. Those of an archive take minutes to compute; they are kept in the cache, as
``log-mel.npz`` in the data set's folder.

Reference: Warden, "Speech Commands", 2018, arXiv:1804.03209.
"""

from __future__ import annotations

import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Literal, TypeAlias

import numpy as np
import torch
from torch import Tensor

from farflung.data.archive import members
from farflung.data.catalog import CATALOG
from farflung.data.datasets import TensorDataset
from farflung.data.images import Normalize, RandomShift
from farflung.data.log_mel import BANDS, FRAMES, log_mel, read_wav
from farflung.data.source import Source, cache_folder, locate, verify
from farflung.errors import DataError

__all__ = ["SOURCES", "WORDS", "Version", "load", "read_archive", "read_features"]

Version: TypeAlias = Literal["nine", "v0.01", "v0.02"]

_CHUNK = 512

SOURCES: dict[Version, Source] = {
    "nine": CATALOG["speech-commands-9"],
    "v0.01": CATALOG["speech-commands-v0.01"],
    "v0.02": CATALOG["speech-commands-v0.02"],
}
"""Each set by its version."""

_FEATURES = SOURCES["nine"].files[0].name

WORDS: dict[Version, int] = {"nine": 9, "v0.01": 30, "v0.02": 35}
"""Number of words in each."""

_CLIPS = {"v0.01": 64_727, "v0.02": 105_829}

NORMALIZE = Normalize((0.395,), (0.182,))


def load(version: Version = "nine") -> tuple[TensorDataset, TensorDataset]:
    """Training and test set; training spectrograms are shifted by up to 4 cells in time and pitch.

    Raises:
      DataError: absent, truncated or altered files.
    """
    source = SOURCES[version]
    found = locate(source)
    features = found.path(_FEATURES)
    if found.names != (_FEATURES,):
        features = cache_folder() / source.name / _FEATURES
        if not features.is_file():
            archive = found.path(source.files[0].name)
            verify(archive, source.files[0])
            read_archive(archive, features, clips=_CLIPS[version], words=WORDS[version])
    test = "dev" if version == "nine" else "test"
    return read_features(features, source.name, words=WORDS[version], test=test)


def read_features(path: Path, name: str, *, words: int, test: str) -> tuple[TensorDataset, TensorDataset]:
    """Reads spectrograms: ``train_x``, ``train_y``, the same of the ``test`` set, and ``words``.

    Args:
      path: the ``.npz`` file.
      name: of the data set, for reports.
      words: how many words there must be.
      test: what the arrays of the test set begin with.

    Raises:
      DataError: truncated, or arrays of other shapes, types or words.
    """
    keys = ("train_x", "train_y", f"{test}_x", f"{test}_y", "words")
    try:
        with path.open("rb") as stream, np.load(stream, allow_pickle=False) as stored:
            arrays = {key: stored[key] for key in keys}
    except (OSError, EOFError, ValueError, KeyError, zipfile.BadZipFile) as error:
        raise DataError(f"{path}: not the expected arrays, or truncated ({error})") from None
    if arrays["words"].shape != (words,):
        raise DataError(f"{path}: expected {words} words, found {len(arrays['words'])}")
    sets: list[TensorDataset] = []
    for split in ("train", test):
        x, y = arrays[f"{split}_x"], arrays[f"{split}_y"]
        if x.dtype != np.uint8 or x.shape != (len(y), BANDS, FRAMES) or (len(y) and int(y.max()) >= words):
            raise DataError(
                f"{path}: expected {split}_x of uint8 (n, {BANDS}, {FRAMES}) and words 0 to {words - 1}, "
                f"found {x.dtype} {x.shape} for {len(y)} words up to {int(y.max(initial=0))}"
            )
        labels = torch.from_numpy(y.astype(np.int64))
        sets.append(
            TensorDataset(
                torch.from_numpy(x).unsqueeze(1),
                labels,
                labels,
                transform=NORMALIZE,
                augment=None if sets else RandomShift(4),
                origin=f"{name}, {path.parent}",
            )
        )
    return sets[0], sets[1]


def read_archive(archive: Path, features: Path, *, clips: int, words: int) -> None:
    """Computes the spectrograms of an official archive and writes them to ``features``, whole or not at all.

    Args:
      archive: a tar of ``<word>/<speaker>_nohash_<n>.wav`` and ``testing_list.txt``.
      features: the ``.npz`` file to write.
      clips: spoken words there must be.
      words: different ones there must be.

    Raises:
      DataError: truncated, or other clips than there should be.
    """
    tested: set[str] = set()
    names: list[str] = []
    pictures: list[Tensor] = []
    waiting: list[Tensor] = []
    for name, content in _clips(archive):
        if name == "testing_list.txt":
            tested.update(content.decode().split())
            continue
        names.append(name)
        waiting.append(read_wav(f"{archive}: {name}", content))
        if len(waiting) == _CHUNK:
            pictures.append(log_mel(torch.stack(waiting)))
            waiting.clear()
    if waiting:
        pictures.append(log_mel(torch.stack(waiting)))
    spoken = sorted({name.split("/")[0] for name in names})
    if len(names) != clips or len(spoken) != words or not tested:
        raise DataError(
            f"{archive}: expected {clips} clips of {words} words and a list of those for testing, "
            f"found {len(names)} of {len(spoken)} and {len(tested)} listed"
        )
    order = sorted(range(len(names)), key=names.__getitem__)
    everything = torch.cat(pictures)
    labels = np.array([spoken.index(name.split("/")[0]) for name in names], dtype=np.uint8)
    test = [i for i in order if names[i] in tested]
    train = [i for i in order if names[i] not in tested]
    features.parent.mkdir(parents=True, exist_ok=True)
    part = features.with_name(features.name + ".part")
    with part.open("wb") as out:
        np.savez(
            out,
            train_x=everything[train].numpy(),
            train_y=labels[train],
            test_x=everything[test].numpy(),
            test_y=labels[test],
            words=np.array(spoken),
        )
    part.replace(features)


def _clips(archive: Path) -> Iterator[tuple[str, bytes]]:
    """The spoken words and the list; background noise is neither."""
    return members(
        archive,
        lambda name: (
            name == "testing_list.txt" or (name.endswith(".wav") and not name.startswith("_background"))
        ),
    )
