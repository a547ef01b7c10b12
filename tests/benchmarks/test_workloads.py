"""The benchmarks' own workloads: their models, and data in the official formats."""

from __future__ import annotations

import dataclasses
import gzip
import io
import json
import math
import os
import subprocess
import sys
import wave
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy.io import savemat

from benchmarks.common.worlds import replicas_in
from benchmarks.workloads import aid, covtype, news, speech_commands, svhn
from benchmarks.workloads.speech_commands import BANDS, FRAMES, RATE, log_mel, read_wav
from farflung.config import Training
from farflung.data import TensorDataset
from farflung.data.catalog import lookup_source
from farflung.data.source import File, Location, Source
from farflung.errors import DataError
from farflung.loop import Replica
from farflung.seeding import create_generator
from farflung.sim import VirtualWorld
from farflung.types import Batch
from farflung.workloads import create_workload
from tests.covering import thorough
from tests.data.test_source import pack

ROOT = Path(__file__).parents[2]

# Of each: shape of an input, values of its integers (0: floats), classes, parameters, and the mean loss of seed 0's
# model on 4 samples that are drawn from seed 1, without dropout. MobileNetV2 for ImageNet has 3,504,872 parameters.
GOLDEN: dict[str, tuple[tuple[int, ...], int, int, int, float]] = {
    "ag-news/attentive-lstm": ((48,), 10_000, 4, 16_840_388, 1.38087),
    "ag-news/lstm": ((48,), 10_000, 4, 707_076, 1.56655),
    "aid/mobilenet": ((3, 64, 64), 0, 30, 175_854, 3.41196),
    "aid/mobilenetv2": ((3, 64, 64), 0, 30, 2_262_302, 3.39712),
    "newsgroups/lstm": ((96,), 10_000, 20, 709_140, 3.17732),
    "speech-commands/vgg": ((1, 64, 101), 0, 9, 159_177, 2.27324),
    "speech-commands/vgg13": ((1, 64, 101), 0, 35, 9_807_587, 4.02920),
    "svhn/resnet18": ((3, 32, 32), 0, 10, 11_173_962, 2.32688),
    "svhn/resnet8": ((3, 32, 32), 0, 10, 75_290, 2.28971),
}


MADE_BY = {
    "ag-news/attentive-lstm": "news:ag_news_attentive_lstm",
    "ag-news/lstm": "news:ag_news_lstm",
    "aid/mobilenet": "aid:mobilenet",
    "aid/mobilenetv2": "aid:mobilenetv2",
    "newsgroups/lstm": "news:newsgroups_lstm",
    "speech-commands/vgg": "speech_commands:vgg",
    "speech-commands/vgg13": "speech_commands:vgg13",
    "svhn/resnet18": "svhn:resnet18",
    "svhn/resnet8": "svhn:resnet8",
}
SOURCES = (
    "news:NEWSGROUPS", "news:AG_NEWS", "aid:SOURCE", "speech_commands:NINE", "speech_commands:V0_01",
    "speech_commands:V0_02", "svhn:SOURCE",
)  # fmt: skip


@pytest.mark.parametrize("name", SOURCES)
def test_data_sets_are_found_by_module(name: str) -> None:
    assert isinstance(lookup_source(f"benchmarks.workloads.{name}"), Source)


@pytest.mark.parametrize(
    "name", ["svhn/resnet8", *thorough(*(each for each in GOLDEN if each != "svhn/resnet8"))]
)
def test_models_and_data(name: str) -> None:
    """Names are those of stored results."""
    task = create_workload(f"benchmarks.workloads.{MADE_BY[name]}")
    assert task.name == name
    shape, values, classes, parameters, first = GOLDEN[name]
    random = torch.Generator().manual_seed(1)
    inputs = (
        torch.randint(values, (4, *shape), generator=random)
        if values
        else torch.randn(4, *shape, generator=random)
    )
    batch = Batch(inputs, torch.randint(classes, (4,), generator=random))
    model = task.build_model(torch.Generator().manual_seed(0)).eval()
    assert sum(parameter.numel() for parameter in model.parameters()) == parameters
    with torch.no_grad():
        assert task.compute_losses(model, batch).mean().item() == pytest.approx(first, rel=1e-3)
    try:
        train, _ = task.load_datasets()
    except DataError as error:
        assert "was not found" in str(error)  # noqa: PT017
        pytest.skip(str(error))
    taken = train.take(torch.tensor([2, 0, 1]), train=True)
    assert (taken.inputs.shape[1:], taken.inputs.dtype) == (batch.inputs.shape[1:], batch.inputs.dtype)
    assert train.labels is not None
    assert int(train.labels.max()) == classes - 1


@pytest.mark.thorough
def test_the_installed_command_finds_them_in_a_checkout(tmp_path: Path) -> None:
    """Its script's folder is on Python's path, the current one is not."""
    command = Path(sys.executable).with_name("farflung")
    if not command.exists():
        pytest.skip("farflung is not installed here")
    places = {
        "PYTHONPATH": str(ROOT / "src"),
        "FARFLUNG_DATA": str(tmp_path),
        "FARFLUNG_CACHE": str(tmp_path),
    }
    done = subprocess.run(
        [command, "simulate", "--workload", "benchmarks.workloads.aid:mobilenet", "--steps", "1"],
        cwd=ROOT, env={**os.environ, **places}, capture_output=True, text=True, timeout=100, check=False,
    )  # fmt: skip
    assert done.returncode == 2
    assert done.stderr.startswith("farflung: aid-64 was not found: looked in ")


# --- Covertype ------------------------------------------------------------------------------------------------------


def test_average_precision_is_that_of_scikit_learn() -> None:
    """On replicas that share the test set; scores of one bin count as equal."""
    from sklearn.metrics import average_precision_score

    random = torch.Generator().manual_seed(0)
    inputs = torch.randn(1001, 54, generator=random)
    targets = (inputs[:, 0] + torch.randn(1001, generator=random) > 2).long()
    data = TensorDataset(inputs, targets)
    task = covtype.RareClass(
        "covtype/test", partial(covtype._network, 8, 8, 2), lambda: (data, data), covtype._DEFAULTS
    )

    async def evaluated(replica: Replica) -> float:
        return (await replica.evaluate()).metric

    world = VirtualWorld(3)
    training = Training(batch_size=4, steps=1, learning_rate=0.1, seed=5)
    found = world.run([evaluated(one) for one in replicas_in(world, task, training, {})])
    assert found == [found[0]] * 3
    logits = task.build_model(create_generator(5, "model"))(inputs).detach()
    margins = ((logits[:, 1] - logits[:, 0] + 16) * 32).long()
    assert found[0] == pytest.approx(average_precision_score(targets, margins), abs=1e-12)


@pytest.mark.parametrize(
    ("made", "share"), [(covtype.mlp, 0.0), *thorough((covtype.cottonwood, 0.0047), (covtype.aspen, 0.0163))]
)
def test_rare_classes_of_covertype(made: Callable[[], Any], share: float) -> None:
    task = made()
    assert create_workload(f"benchmarks.workloads.covtype:{made.__name__}").name == task.name
    try:
        train, test = task.load_datasets()
    except DataError as error:
        pytest.skip(str(error))
    if share:
        assert float(torch.cat([train.targets, test.targets]).double().mean()) == pytest.approx(
            share, abs=2e-4
        )


# --- AID ------------------------------------------------------------------------------------------------------------


def jpeg(level: int, size: int = 64) -> bytes:
    image = pytest.importorskip("PIL.Image")
    out = io.BytesIO()
    image.new("RGB", (size, size), (level, 0, 255 - level)).save(out, "JPEG", quality=95)
    return out.getvalue()


def photographs(**changed: bytes) -> dict[str, bytes]:
    files = {f"{'Beach' if i % 2 else 'Airport'}/{i}.jpg": jpeg(20 * i) for i in range(10)}
    return {**files, **{f"Airport/{name}.jpg": content for name, content in changed.items()}}


def test_aid(tmp_path: Path) -> None:
    path = pack(tmp_path / "aid-64.tar", photographs(), "w")
    found = Location(tmp_path, (path.name,), "folder")
    train, test = aid.read(found, count=10, classes=2)
    assert (len(train), len(test)) == (8, 2)
    assert torch.bincount(torch.cat([train.targets, test.targets])).tolist() == [5, 5]
    assert bool((train.targets.diff() >= 0).all()), "by name, whatever the order in the archive"
    reds = sorted(torch.cat([train.inputs, test.inputs])[:, 0].float().mean(dim=(1, 2)).tolist())
    assert all(abs(red - 20 * i) < 3 for i, red in enumerate(reds))
    with pytest.raises(DataError, match="expected 11 images in 2 classes, found 10 in 2"):
        aid.read(found, count=11, classes=2)
    pack(path, photographs(cut=jpeg(10)[:200]), "w")
    with pytest.raises(DataError, match=r"Airport/cut\.jpg: not a whole JPEG image"):
        aid.read(found, count=11, classes=2)
    pack(path, photographs(large=jpeg(10, 80)), "w")
    with pytest.raises(DataError, match=r"Airport/large\.jpg: expected 64 x 64 pixels, found 80 x 80"):
        aid.read(found, count=11, classes=2)


# --- news -----------------------------------------------------------------------------------------------------------

OFFICIAL = '"3","Fears for T N","Unions say\\they are ""sad"""\n"1","War","and peace"\n'


def stories(folder: Path, train: str, name: str = "train.csv") -> Location:
    (folder / name).write_text(train)
    (folder / "test.csv").write_text(OFFICIAL)
    return Location(folder, (name, "test.csv"), "folder")


def test_ag_news(tmp_path: Path) -> None:
    train, test = news.read_ag_news(stories(tmp_path, OFFICIAL), counts=(2, 2), length=8, size=50)
    assert train.targets.tolist() == test.targets.tolist() == [2, 0]
    taken = train.take(torch.tensor([1]), train=True).inputs
    assert taken.dtype == torch.int64
    assert (taken[0] != news.PADDING).tolist() == [True] * 3 + [False] * 5
    small = stories(tmp_path, '"some text",3\nmore,0\n', "train-5000.csv")
    train, test = news.read_ag_news(small, counts=(2, 2), length=4, size=50)
    assert (train.targets.tolist(), test.targets.tolist()) == ([3, 0], [2, 0])


@pytest.mark.parametrize(
    ("train", "message"),
    [
        (OFFICIAL[:-5], "row 2 is not as expected"),
        (OFFICIAL.splitlines()[0], "expected 2 rows, found 1"),
        ('"5","a","b"\n', r"row 2 is not as expected \(there are four classes\)"),
        ('"1","a"\n', "row 1 is not as expected"),
    ],
)
def test_damaged_ag_news(tmp_path: Path, train: str, message: str) -> None:
    with pytest.raises(DataError, match=rf"train\.csv: {message}"):
        news.read_ag_news(stories(tmp_path, train), counts=(2, 2), length=4, size=50)


def post(subject: str, body: str) -> str:
    return f"From: a@b\nSubject: {subject}\nOrganization: Giveaway\n\n{body}"


TRAIN = [("sci.space", post("Moon", "rockets rockets")), ("rec.autos", post("Re: car", "wheels"))]
TEST = [("rec.autos", post("car", "a moon"))]


def groups_as_lines(folder: Path) -> Location:
    for name, posts in (("train", TRAIN), ("test", TEST)):
        lines = "".join(json.dumps({"group": group, "text": text}) + "\n" for group, text in posts)
        (folder / f"{name}.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
    return Location(folder, ("train.jsonl.gz", "test.jsonl.gz"), "folder")


def groups_as_archive(folder: Path) -> Location:
    files = {
        f"20news-bydate-{kind}/{group}/{number}": text.encode()
        for kind, posts in (("train", TRAIN), ("test", TEST))
        for number, (group, text) in enumerate(posts)
    }
    pack(folder / "20news-bydate.tar.gz", files)
    return Location(folder, ("20news-bydate.tar.gz",), "folder")


@pytest.mark.parametrize("form", [groups_as_lines, groups_as_archive])
def test_newsgroups(tmp_path: Path, form) -> None:
    found = form(tmp_path)
    train, test = news.read_newsgroups(found, counts=(2, 1), groups=2, length=4, size=20)
    assert sorted(train.targets.tolist()) == [0, 1]
    assert test.targets.tolist() == [0]
    space = train.inputs[int(train.targets.argmax())].tolist()
    assert space[1] == space[2] == 2, "the most frequent word"
    assert space[3] == news.PADDING, "neither sender nor organisation"
    assert test.inputs[0].tolist()[1:] == [news.UNKNOWN, space[0], news.PADDING]
    with pytest.raises(DataError, match="expected 3 training posts, found 2"):
        news.read_newsgroups(found, counts=(3, 1), groups=2, length=4, size=20)
    with pytest.raises(DataError, match="expected 3 groups, found 2"):
        news.read_newsgroups(found, counts=(2, 1), groups=3, length=4, size=20)


@pytest.mark.parametrize("form", [groups_as_lines, groups_as_archive])
def test_bodies_of_newsgroups(tmp_path: Path, form) -> None:
    bodies = [
        b"\0".join(text.partition("\n\n")[2].encode() for _, text in sorted(posts)) for posts in (TRAIN, TEST)
    ]
    sets = news.read_bodies(form(tmp_path), counts=(2, 1), length=4, tests=2)
    for body, windows in zip(bodies, sets, strict=True):
        assert bytes(windows.inputs[0].tolist()) == body[:4]
        assert bytes(windows.targets[0].tolist()) == body[1:5]
    assert bytes(sets[0].inputs[1].tolist()) == bodies[0][4:8]
    with pytest.raises(DataError, match="expected 3 training posts, found 2"):
        news.read_bodies(form(tmp_path), counts=(3, 1), length=4)


def test_damaged_newsgroups(tmp_path: Path) -> None:
    found = groups_as_lines(tmp_path)
    (tmp_path / "test.jsonl.gz").write_bytes(gzip.compress(b'{"group": "a", "text": "b"}\n{"group": "a"}\n'))
    with pytest.raises(DataError, match=r"test\.jsonl\.gz: line 2 is not"):
        news.read_newsgroups(found, counts=(2, 1), groups=2, length=4, size=20)


# --- Speech Commands ------------------------------------------------------------------------------------------------

SECOND = torch.arange(RATE) / RATE
WORDS = ("no", "up", "yes")


def wav(samples: torch.Tensor, *, channels: int = 1, rate: int = RATE) -> bytes:
    out = io.BytesIO()
    with wave.open(out, "wb") as clip:
        clip.setnchannels(channels)
        clip.setsampwidth(2)
        clip.setframerate(rate)
        clip.writeframes((samples * 32767).round().to(torch.int16).numpy().astype("<i2").tobytes())
    return out.getvalue()


def tone(hz: float) -> torch.Tensor:
    return 0.5 * torch.sin(2 * math.pi * hz * SECOND)


def test_sound() -> None:
    samples = tone(440.0)
    torch.testing.assert_close(read_wav("a.wav", wav(samples)), samples, atol=1e-4, rtol=0)
    short = read_wav("a.wav", wav(samples[:5000]))
    torch.testing.assert_close(short[:5000], samples[:5000], atol=1e-4, rtol=0)
    assert short.shape == (RATE,)
    assert not bool(short[5000:].any())
    with pytest.raises(
        DataError, match=r"a\.wav: expected 1 channel of 2 bytes at 16000 Hz, found 2 of 2 at 8000"
    ):
        read_wav("a.wav", wav(samples, channels=2, rate=8000))
    with pytest.raises(DataError, match=r"a\.wav: not a WAV file, or truncated"):
        read_wav("a.wav", b"RIFF")
    with pytest.raises(DataError, match=r"a\.wav: truncated: expected 32000 bytes of sound, found 31000"):
        read_wav("a.wav", wav(samples)[:-1000])


def test_a_spectrogram_agrees_with_its_definition() -> None:
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


def spoken(path: Path, *, listed: str = "up/a_nohash_0.wav\nyes/b_nohash_1.wav\n") -> Path:
    files = {
        f"./{word}/{speaker}_nohash_{number}.wav": wav(tone(200.0 * (index + 1))[: 12000 + 500 * number])
        for index, word in enumerate(WORDS)
        for number, speaker in enumerate("abc")
    }
    files["./_background_noise_/hum.wav"] = wav(tone(50.0))
    files["./testing_list.txt"] = listed.encode()
    return pack(path, files)


def test_the_archive_of_words(tmp_path: Path) -> None:
    features = tmp_path / "deep" / "log-mel.npz"
    speech_commands.read_archive(spoken(tmp_path / "a.tar.gz"), features, clips=9, words=3)
    assert [path.name for path in features.parent.iterdir()] == ["log-mel.npz"]
    train, test = speech_commands.read_features(features, "toy", words=3, test="test")
    assert (len(train), len(test)) == (7, 2)
    assert test.targets.tolist() == [1, 2]
    assert torch.bincount(train.targets).tolist() == [3, 2, 2]
    assert torch.equal(test.inputs[0], log_mel(read_wav("", wav(tone(400.0)[:12000]))[None]))


def test_a_damaged_archive_of_words(tmp_path: Path) -> None:
    features = tmp_path / "f.npz"
    with pytest.raises(DataError, match=r"expected 10 clips of 3 words .* found 9 of 3 and 2 listed"):
        speech_commands.read_archive(spoken(tmp_path / "a.tar.gz"), features, clips=10, words=3)
    with pytest.raises(DataError, match="found 9 of 3 and 0 listed"):
        speech_commands.read_archive(spoken(tmp_path / "b.tar.gz", listed=""), features, clips=9, words=3)
    path = spoken(tmp_path / "c.tar.gz")
    path.write_bytes(path.read_bytes()[:-2000])
    with pytest.raises(DataError, match="truncated"):
        speech_commands.read_archive(path, features, clips=9, words=3)
    assert not features.exists()


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
    packed = spoken(folder / "speech_commands_v0.02.tar.gz")
    monkeypatch.setenv("FARFLUNG_DATA", str(mine))
    monkeypatch.setenv("FARFLUNG_CACHE", str(cache))
    with pytest.raises(DataError, match="expected 2428923189 bytes"):
        speech_commands.load("v0.02")
    small = dataclasses.replace(speech_commands.V0_02, files=(File(packed.name),))
    monkeypatch.setitem(speech_commands.SOURCES, "v0.02", small)
    monkeypatch.setitem(speech_commands.WORDS, "v0.02", 3)
    monkeypatch.setitem(speech_commands._CLIPS, "v0.02", 9)
    assert len(speech_commands.load("v0.02")[0]) == 7
    packed.write_bytes(b"not read again")
    assert len(speech_commands.load("v0.02")[0]) == 7


# --- SVHN -----------------------------------------------------------------------------------------------------------


def digits(count: int) -> dict[str, Any]:
    images = np.arange(32 * 32 * 3 * count).reshape(32, 32, 3, count).astype(np.uint8)
    return {"X": images, "y": (np.arange(count, dtype=np.uint8) % 10 + 1)[:, None]}


def test_svhn(tmp_path: Path) -> None:
    found = Location(tmp_path, ("train_32x32.mat", "test_32x32.mat"), "folder")
    for name, count in zip(found.names, (12, 3), strict=True):
        savemat(found.get_path(name), digits(count), do_compression=True)
    train, test = svhn.read(found, counts=(12, 3))
    assert train.targets.tolist() == [1, 2, 3, 4, 5, 6, 7, 8, 9, 0, 1, 2], "10 stands for the digit 0"
    assert len(test) == 3
    images = digits(12)["X"]
    assert torch.equal(train.inputs[7], torch.from_numpy(images[:, :, :, 7].transpose(2, 0, 1).copy()))
    with pytest.raises(
        DataError, match=r"train_32x32\.mat: expected X \(32, 32, 3, 13\) .*\(32, 32, 3, 12\)"
    ):
        svhn.read(found, counts=(13, 3))
    savemat(found.get_path(found.names[1]), {**digits(3), "y": np.zeros((3, 1))})
    with pytest.raises(DataError, match=r"test_32x32\.mat: expected labels 1 to 10, found 0 to 0"):
        svhn.read(found, counts=(12, 3))


@pytest.mark.parametrize("keep", [0, 100, 130, 140, 250, -8, -20])
@pytest.mark.parametrize("compress", [False, True])
def test_truncated_svhn(tmp_path: Path, compress: bool, keep: int) -> None:
    found = Location(tmp_path, ("train_32x32.mat", "test_32x32.mat"), "folder")
    path = found.get_path(found.names[0])
    savemat(path, digits(12), do_compression=compress)
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(DataError, match=r"train_32x32\.mat: "):
        svhn.read(found, counts=(12, 3))
