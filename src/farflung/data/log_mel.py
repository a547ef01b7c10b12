"""Sound to pictures: log-mel power spectrograms of one-second clips, one byte per cell.

16 kHz, Hann window of 400 samples every 160, centred with reflection; 64 triangular bands equally wide on HTK's mel
scale from 20 Hz to 8 kHz, not normalised; 10 log10 of the power, clamped to [-80, 40] dB and scaled to 0..255.
"""

from __future__ import annotations

import io
import math
import wave
from functools import cache

import numpy as np
import torch
from torch import Tensor

from farflung.errors import DataError

__all__ = ["BANDS", "FRAMES", "RATE", "log_mel", "read_wav"]

RATE = 16_000
BANDS = 64
FRAMES = 101

_WINDOW, _HOP = 400, 160
_LOWEST_HZ, _HIGHEST_HZ = 20.0, 8_000.0
_FLOOR_DB, _CEILING_DB = -80.0, 40.0


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
