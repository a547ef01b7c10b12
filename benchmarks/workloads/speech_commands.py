"""Google Speech Commands: single words of one second as log-mel spectrograms, one byte per cell.

Three sets: the official archives of version 0.01 (30 words) and 0.02 (35 words), with the test set that their
``testing_list.txt`` names, and ``speech-commands-9``, a speaker-disjoint selection of nine words of version 0.01 whose
spectrograms come ready in one file. Those of an archive take minutes to compute; they are kept in the cache, as
``log-mel.npz`` in the data set's folder.

Spectrograms are of 16 kHz, with a Hann window of 400 samples every 160, centred with reflection; 64 triangular bands
equally wide on HTK's mel scale from 20 Hz to 8 kHz, not normalised; 10 log10 of the power, clamped to [-80, 40] dB and
scaled to 0..255.

Reference: Warden, "Speech Commands", 2018, arXiv:1804.03209.
"""

from __future__ import annotations

import io
import math
import wave
from functools import cache, partial
from pathlib import Path
from typing import Literal, TypeAlias

import numpy as np
import torch
from torch import Tensor

from farflung.data.datasets import TensorDataset
from farflung.data.images import Normalize, RandomShift
from farflung.data.source import File, Source, get_cache_folder, iter_members, locate, verify
from farflung.errors import ConfigError, DataError
from farflung.files import wrap_read_errors
from farflung.types import Workload
from farflung.workloads import Classification
from farflung.workloads import vgg as plain
from farflung.workloads.classification import build_mercury_settings, build_settings

__all__ = [
    "BANDS",
    "FRAMES",
    "NINE",
    "RATE",
    "SOURCES",
    "V0_01",
    "V0_02",
    "WORDS",
    "Version",
    "load",
    "log_mel",
    "read_archive",
    "read_features",
    "read_wav",
    "vgg",
    "vgg13",
]

Version: TypeAlias = Literal["nine", "v0.01", "v0.02"]

_CHUNK = 512

_ADDRESS = "http://download.tensorflow.org/data/"

NINE = Source(
    name="speech-commands-9",
    title="4,500 + 500 spoken words, 9 words, log-mel 64x101",
    licence="CC BY 4.0",
    homepage="https://arxiv.org/abs/1804.03209",
    files=(File("log-mel.npz"),),
    instructions="it comes as one file, log-mel.npz; without it take all words of the official archive: "
    'data="v0.02", fetched with: farflung data fetch benchmarks.workloads.speech_commands:V0_02',
    samples=(4_500, 500),
)

V0_01 = Source(
    name="speech-commands-v0.01",
    title="64,727 spoken words, 30 words, WAV 16 kHz",
    licence="CC BY 4.0",
    homepage="https://arxiv.org/abs/1804.03209",
    files=(
        File(
            "speech_commands_v0.01.tar.gz",
            1489096277,
            _ADDRESS + "speech_commands_v0.01.tar.gz",
            sha256="743935421bb51cccdb6bdd152e04c5c70274e935c82119ad7faeec31780d811d",
        ),
    ),
    instructions="fetch it with: farflung data fetch benchmarks.workloads.speech_commands:V0_01",
    layouts=(("log-mel.npz",),),
)

V0_02 = Source(
    name="speech-commands-v0.02",
    title="105,829 spoken words, 35 words, WAV 16 kHz",
    licence="CC BY 4.0",
    homepage="https://arxiv.org/abs/1804.03209",
    files=(
        File(
            "speech_commands_v0.02.tar.gz",
            2428923189,
            _ADDRESS + "speech_commands_v0.02.tar.gz",
            sha256="af14739ee7dc311471de98f5f9d2c9191b18aedfe957f4a6ff791c709868ff58",
        ),
    ),
    instructions="fetch it with: farflung data fetch benchmarks.workloads.speech_commands:V0_02",
    layouts=(("log-mel.npz",),),
)

SOURCES: dict[Version, Source] = {"nine": NINE, "v0.01": V0_01, "v0.02": V0_02}
"""Each set by its version."""

_FEATURES = SOURCES["nine"].files[0].name

WORDS: dict[Version, int] = {"nine": 9, "v0.01": 30, "v0.02": 35}
"""Number of words in each."""

_CLIPS = {"v0.01": 64_727, "v0.02": 105_829}

NORMALIZE = Normalize((0.395,), (0.182,))
RATE = 16_000
BANDS = 64
FRAMES = 101

_WINDOW, _HOP = 400, 160
_LOWEST_HZ, _HIGHEST_HZ = 20.0, 8_000.0
_FLOOR_DB, _CEILING_DB = -80.0, 40.0


def vgg(data: Version = "nine") -> Workload:
    """Speech Commands with four convolutions and two dense layers.

    Accuracy on the nine words' 500 test clips, spoken by people not heard in training, with the defaults (600 steps
    of 32, seeds 0 and 1): 90.2 and 85.2 %. A linear model: 45.8 % after 2,000 steps. Versions 0.01 and 0.02 have not
    been measured.

    Args:
      data: ``nine`` words, or all of version ``v0.01`` or ``v0.02``.
    """
    _check(data)
    return Classification(
        name="speech-commands/vgg",
        build_network=partial(plain, (1, 64, 101), (16, None, 32, None, 64, None, 64, None), 64, WORDS[data]),
        load_data=partial(load, data),
        defaults=build_settings(batch_size=32, learning_rate=0.01, weight_decay=1e-4, steps=600),
    )


def vgg13(data: Version = "v0.02") -> Workload:
    """Speech Commands with VGG-13, 9.8 million parameters with all 35 words, as Mercury's paper has it.

    With batch norm, and one dense layer of 128 before the last, as in the released code. For two cores there is
    :func:`vgg`.

    Args:
      data: ``nine`` words, or all of version ``v0.01`` or ``v0.02``.
    """
    _check(data)
    return Classification(
        name="speech-commands/vgg13",
        build_network=partial(plain, (1, 64, 101), _VGG13, 128, WORDS[data], norm=True),
        load_data=partial(load, data),
        defaults=build_mercury_settings(batch_size=64),
    )


_VGG13 = (64, 64, None, 128, 128, None, 256, 256, None, 512, 512, None, 512, 512, None)


def _check(data: Version) -> None:
    if data not in SOURCES:
        raise ConfigError(f"data={data!r} is not one of {', '.join(SOURCES)}")


# --- samples --------------------------------------------------------------------------------------------------------


def load(version: Version = "nine") -> tuple[TensorDataset, TensorDataset]:
    """Training and test set; training spectrograms are shifted by up to 4 cells in time and pitch.

    Raises:
      DataError: absent, truncated or altered files.
    """
    source = SOURCES[version]
    found = locate(source)
    features = found.get_path(_FEATURES)
    if found.names != (_FEATURES,):
        features = get_cache_folder() / source.name / _FEATURES
        if not features.is_file():
            archive = found.get_path(source.files[0].name)
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
    with (
        wrap_read_errors(path, "not the expected arrays, or truncated", DataError),
        path.open("rb") as stream,
        np.load(stream, allow_pickle=False) as stored,
    ):
        arrays = {key: stored[key] for key in keys}
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
    for name, content in iter_members(archive, _wanted):
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


def _wanted(name: str) -> bool:
    """Whether it is a spoken word or the list; background noise is neither."""
    return name == "testing_list.txt" or (name.endswith(".wav") and not name.startswith("_background"))


# --- spectrograms ---------------------------------------------------------------------------------------------------


def read_wav(name: str, content: bytes) -> Tensor:
    """One second of samples in [-1, 1): mono, 16 bit, 16 kHz; shorter clips are followed by silence.

    Args:
      name: of the file, for messages.
      content: of the file.

    Raises:
      DataError: another format, or cut short.
    """
    try:
        with wave.open(io.BytesIO(content)) as clip:
            form = (clip.getnchannels(), clip.getsampwidth(), clip.getframerate())
            frames = clip.getnframes()
            data = clip.readframes(frames)
    except (wave.Error, EOFError) as error:
        raise DataError(f"{name}: not a WAV file, or truncated ({error})") from None
    if form != (1, 2, RATE):
        raise DataError(
            f"{name}: expected 1 channel of 2 bytes at {RATE} Hz, found {form[0]} of {form[1]} at {form[2]}"
        )
    if len(data) != 2 * frames:
        raise DataError(f"{name}: truncated: expected {2 * frames} bytes of sound, found {len(data)}")
    samples = torch.zeros(RATE)
    sound = torch.from_numpy(np.frombuffer(data, dtype="<i2").astype(np.float32) / 32768.0)[:RATE]
    samples[: len(sound)] = sound
    return samples


def log_mel(clips: Tensor) -> Tensor:
    """Spectrograms of ``clips``, shape ``(n, 16000)``, as uint8 of shape ``(n, 64, 101)``, low bands first."""
    spectrum = torch.stft(
        clips,
        n_fft=_WINDOW,
        hop_length=_HOP,
        window=torch.hann_window(_WINDOW),
        center=True,
        pad_mode="reflect",
        return_complex=True,
    )
    power = torch.matmul(_bands(), spectrum.abs().square())
    decibel = 10.0 * power.clamp(min=1e-10).log10()
    scaled = (decibel.clamp(_FLOOR_DB, _CEILING_DB) - _FLOOR_DB) * (255.0 / (_CEILING_DB - _FLOOR_DB))
    return scaled.round().to(torch.uint8)


@cache
def _bands() -> Tensor:
    """Weights of each frequency in each band, shape ``(64, 201)``."""
    lowest, highest = (2595.0 * math.log10(1.0 + hz / 700.0) for hz in (_LOWEST_HZ, _HIGHEST_HZ))
    corners = 700.0 * (10.0 ** (np.linspace(lowest, highest, BANDS + 2) / 2595.0) - 1.0)
    frequencies = np.linspace(0.0, RATE / 2, _WINDOW // 2 + 1)
    below, peak, above = corners[:-2, None], corners[1:-1, None], corners[2:, None]
    rising, falling = (frequencies - below) / (peak - below), (above - frequencies) / (above - peak)
    return torch.from_numpy(np.maximum(0.0, np.minimum(rising, falling))).to(torch.float32)
