"""Spoken words: WAV files, log-mel spectrograms, the official archive and the ready-made file."""

from __future__ import annotations

import dataclasses
import io
import math
import wave
from pathlib import Path

import numpy as np
import pytest
import torch

from farflung.data import speech_commands
from farflung.data.log_mel import BANDS, FRAMES, RATE, log_mel, read_wav
from farflung.data.source import File
from farflung.errors import DataError
from tests.data.test_archive import pack

SECOND = torch.arange(RATE) / RATE


def wav(samples: torch.Tensor, *, channels: int = 1, rate: int = RATE) -> bytes:
    out = io.BytesIO()
    with wave.open(out, "wb") as clip:
        clip.setnchannels(channels)
        clip.setsampwidth(2)
        clip.setframerate(rate)
        clip.writeframes((samples * 32767).round().to(torch.int16).numpy().astype("<i2").tobytes())
    return out.getvalue()


def tone(hz: float, level: float = 0.5) -> torch.Tensor:
    return level * torch.sin(2 * math.pi * hz * SECOND)


def test_wav_round_trip_and_padding() -> None:
    samples = tone(440.0)
    torch.testing.assert_close(read_wav("a.wav", wav(samples)), samples, atol=1e-4, rtol=0)
    short = read_wav("a.wav", wav(samples[:5000]))
    torch.testing.assert_close(short[:5000], samples[:5000], atol=1e-4, rtol=0)
    assert short.shape == (RATE,)
    assert not bool(short[5000:].any())
    assert read_wav("a.wav", wav(torch.cat([samples, samples]))).shape == (RATE,)


def test_wav_of_another_kind() -> None:
    with pytest.raises(
        DataError, match=r"a\.wav: expected 1 channel of 2 bytes at 16000 Hz, found 2 of 2 at 8000"
    ):
        read_wav("a.wav", wav(tone(440.0), channels=2, rate=8000))
    with pytest.raises(DataError, match=r"a\.wav: not a WAV file, or truncated"):
        read_wav("a.wav", b"RIFF")
    with pytest.raises(DataError, match=r"a\.wav: truncated: expected 32000 bytes of sound, found 31000"):
        read_wav("a.wav", wav(tone(440.0))[:-1000])


def test_spectrogram_agrees_with_its_definition() -> None:
    """Against sums written out: reflection, Hann window, discrete Fourier transform, triangles on HTK's mel scale."""
    clip = torch.randn(RATE, generator=torch.Generator().manual_seed(0)) * 0.1
    picture = log_mel(clip[None])[0]
    assert picture.shape == (BANDS, FRAMES)
    padded = np.pad(clip.double().numpy(), 200, mode="reflect")
    window = 0.5 - 0.5 * np.cos(2 * np.pi * np.arange(400) / 400)
    mel_ends = [2595 * math.log10(1 + hz / 700) for hz in (20.0, 8000.0)]
    corners = [700 * (10 ** (m / 2595) - 1) for m in np.linspace(mel_ends[0], mel_ends[1], 66)]
    for frame in (0, 50, 100):
        power = np.abs(np.fft.rfft(padded[160 * frame : 160 * frame + 400] * window)) ** 2
        for band in (0, 10, 40, 63):
            low, peak, high = corners[band : band + 3]
            total = sum(
                p * max(0.0, min((40.0 * k - low) / (peak - low), (high - 40.0 * k) / (high - peak)))
                for k, p in enumerate(power)
            )
            decibel = min(40.0, max(-80.0, 10 * math.log10(max(total, 1e-10))))
            assert abs(int(picture[band, frame]) - (decibel + 80) / 120 * 255) <= 0.51


def test_a_higher_tone_lies_in_a_higher_band() -> None:
    pictures = log_mel(torch.stack([tone(300.0), tone(1000.0), tone(4000.0), torch.zeros(RATE)]))
    low, middle, high = (int(picture[:, 50].argmax()) for picture in pictures[:3])
    assert 0 < low < middle < high < BANDS
    assert not bool(pictures[3].any()), "silence is the floor"


def test_the_window_is_periodic() -> None:
    """A tone on a multiple of 40 Hz then reaches no other frequency than its two neighbours."""
    clip = 0.5 * torch.sin(2 * math.pi * 2000.0 * torch.arange(RATE, dtype=torch.float64) / RATE)
    column = log_mel(clip.to(torch.float32)[None])[0, :, 50]
    assert int(column.max()) > 200
    assert int((column > 60).sum()) < 6


WORDS = ("no", "up", "yes")


def archive(path: Path, *, listed: str = "up/a_nohash_0.wav\nyes/b_nohash_1.wav\n") -> Path:
    files = {
        f"./{word}/{speaker}_nohash_{number}.wav": wav(tone(200.0 * (index + 1))[: 12000 + 500 * number])
        for index, word in enumerate(WORDS)
        for number, speaker in enumerate("abc")
    }
    files["./_background_noise_/hum.wav"] = wav(tone(50.0))
    files["./testing_list.txt"] = listed.encode()
    files["./README.md"] = b"words"
    return pack(path, files)


def test_official_archive(tmp_path: Path) -> None:
    features = tmp_path / "deep" / "log-mel.npz"
    speech_commands.read_archive(archive(tmp_path / "a.tar.gz"), features, clips=9, words=3)
    assert [path.name for path in features.parent.iterdir()] == ["log-mel.npz"]
    train, test = speech_commands.read_features(features, "toy", words=3, test="test")
    assert (len(train), len(test)) == (7, 2)
    assert test.targets.tolist() == [1, 2]
    assert torch.bincount(train.targets).tolist() == [3, 2, 2]
    assert train.inputs.shape[1:] == (1, BANDS, FRAMES)
    assert torch.equal(test.inputs[0], log_mel(read_wav("", wav(tone(400.0)[:12000]))[None]))


def test_official_archive_that_is_not_whole(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"expected 10 clips of 3 words .* found 9 of 3 and 2 listed"):
        speech_commands.read_archive(archive(tmp_path / "a.tar.gz"), tmp_path / "f.npz", clips=10, words=3)
    with pytest.raises(DataError, match="found 9 of 3 and 0 listed"):
        speech_commands.read_archive(
            archive(tmp_path / "b.tar.gz", listed=""), tmp_path / "f.npz", clips=9, words=3
        )
    path = archive(tmp_path / "c.tar.gz")
    path.write_bytes(path.read_bytes()[:-2000])
    with pytest.raises(DataError, match="truncated"):
        speech_commands.read_archive(path, tmp_path / "f.npz", clips=9, words=3)
    assert not (tmp_path / "f.npz").exists()


def test_damaged_features(tmp_path: Path) -> None:
    path = tmp_path / "f.npz"
    x, y = np.zeros((4, BANDS, FRAMES), np.uint8), np.arange(4, dtype=np.uint8)
    words = np.array(["a", "b", "c", "d"])
    np.savez(path, train_x=x, train_y=y, test_x=x, test_y=y, words=words)
    assert len(speech_commands.read_features(path, "toy", words=4, test="test")[0]) == 4
    with pytest.raises(DataError, match="expected 5 words, found 4"):
        speech_commands.read_features(path, "toy", words=5, test="test")
    with pytest.raises(DataError, match="not the expected arrays"):
        speech_commands.read_features(path, "toy", words=4, test="dev")
    np.savez(path, train_x=x[:, 1:], train_y=y, test_x=x, test_y=y, words=words)
    with pytest.raises(DataError, match=r"expected train_x of uint8 .* found uint8 \(4, 63, 101\)"):
        speech_commands.read_features(path, "toy", words=4, test="test")
    path.write_bytes(path.read_bytes()[:-3000])
    with pytest.raises(DataError, match="truncated"):
        speech_commands.read_features(path, "toy", words=4, test="test")


def test_spectrograms_are_computed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mine, cache = tmp_path / "mine", tmp_path / "cache"
    folder = mine / "speech-commands-v0.02"
    folder.mkdir(parents=True)
    packed = archive(folder / "speech_commands_v0.02.tar.gz")
    monkeypatch.setenv("FARFLUNG_DATA", str(mine))
    monkeypatch.setenv("FARFLUNG_CACHE", str(cache))
    with pytest.raises(DataError, match="expected 2428923189 bytes"):
        speech_commands.load("v0.02")
    source = speech_commands.SOURCES["v0.02"]
    monkeypatch.setitem(
        speech_commands.SOURCES, "v0.02", dataclasses.replace(source, files=(File(packed.name),))
    )
    monkeypatch.setitem(speech_commands.WORDS, "v0.02", 3)
    monkeypatch.setitem(speech_commands._CLIPS, "v0.02", 9)
    train, _ = speech_commands.load("v0.02")
    assert len(train) == 7
    packed.write_bytes(b"not read again")
    assert len(speech_commands.load("v0.02")[0]) == 7
    packed.unlink()
    assert len(speech_commands.load("v0.02")[0]) == 7, "the spectrograms alone are the data set"
