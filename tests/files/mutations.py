"""Files that are damaged on purpose: an example of each kind, who reads it, and what is done to it."""

from __future__ import annotations

import gzip
import random
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from farflung.cli.options import read_settings
from farflung.cli.simulate import Simulate
from farflung.comm.keys import load_keys, make_keys
from farflung.config import list_settings
from farflung.data.fashion_mnist import read_idx
from farflung.devices import CodingRates, Moment, load_device
from farflung.files import prefix_errors
from farflung.runs import Run, RunFolder, RunOptions, SimulatedConfig, prepare_run, retime, simulate
from farflung.state_trees import load_tree
from farflung.types import Cost

NETWORK = """\
[default]
latency_s = 0.02
bandwidth_bps = 50e6
[[site]]
name = "office"
nodes = 2
inside = { latency_s = 0.0005 }
up_bps = 100e6
exit_bps = "evening"
[[site]]
name = "field"
nodes = 2
medium = "cell"
[[link]]
from = "office"
to = "field"
both_ways = true
latency_s = 0.045
jitter_s = 0.01
loss = 0.001
[[medium]]
name = "cell"
bandwidth_bps = "night"
[[trace]]
name = "evening"
times_s = [0, 60, 120]
bandwidth_bps = [20e6, 5e6, 10e6]
end_s = 180
after = "repeat"
[[trace]]
name = "night"
file = "cell.csv"
end_s = 180
after = "hold"
"""
TRACE = "0,20e6\n60.5,5e6\n120,10e6\n"
DEVICE = """\
slowdown = 2.0
memory_nbytes = 4000000000
optimizer_s = 0.001
cores = 1.0
message_s = 0.0001
[[coding]]
operation = "encode"
method = "int8"
numel = [10, 1000]
seconds = [0.001, 0.01]
[[layer]]
numel = 10
forward_s = 0.001
backward_s = 0.002
[[occasional]]
probability = 0.1
factor = 3.0
[[scheduled]]
begin_s = 1.0
end_s = 2.0
factor = 4.0
ranks = [0, 2]
"""
FAULTS = """\
[[fault]]
kind = "slow"
rank = 1
at_s = 30.0
factor = 4
[[fault]]
kind = "cut"
rank = 2
at_step = 100
peer = 0
[[fault]]
kind = "lose"
rank = 2
at_s = 90.0
loss = 0.02
"""
SETTINGS = """\
workload = "synthetic/quadratic"
recipe = "synchronous"
codec = "topk(density=0.5)"
steps = 4
batch-size = 4
learning-rate = 0.05
seed = 7
partition = "iid"
network = "wifi-10mbps"
device = "cpu-core"
"""
JSON_SETTINGS = (
    '{"workload": "synthetic/quadratic", "steps": 4, "momentum": 0.5, "optimizer": "sgd(nesterov=True)"}'
)


DECIDING: dict[str, Any] = {
    "workload": "synthetic/quadratic", "recipe": "synchronous(collective=auto)", "schedule": "delayed('auto')",
    "stream": "rate(300.0, least=1, most=4, backlog=6, full='drop_oldest')", "steps": 9, "workers": 2, "batch_size": 4,
    "evaluate_every": 0, "checkpoint_every": 0,
}  # fmt: skip
"""A run that decides whatever there is to decide."""


@dataclass(frozen=True)
class Kind:
    """A kind of file.

    Args:
      path: of the example.
      read: reads it, and makes of it what the commands make of it.
    """

    path: Path
    read: Callable[[Path], object]


def examples(folder: Path) -> dict[str, Kind]:
    """One small file of each kind, that is read without an error."""
    for name, text in {
        "net.toml": NETWORK,
        "cell.csv": TRACE,
        "device.toml": DEVICE,
        "faults.toml": FAULTS,
        "settings.toml": SETTINGS,
        "settings.json": JSON_SETTINGS,
    }.items():
        (folder / name).write_text(text)
    public, _ = make_keys(folder / "keys", "here")
    idx = bytes((0, 0, 8, 3, 0, 0, 0, 5, 0, 0, 0, 4, 0, 0, 0, 3, *range(60)))
    (folder / "data-idx3-ubyte.gz").write_bytes(gzip.compress(idx))
    run = folder / "run"
    simulate(
        "synthetic/quadratic", "synchronous(codec=topk(density=0.5), collective=auto)", out=run, steps=2, workers=2,
        momentum=0.5, batch_size=4, network="wifi-10mbps",
    )  # fmt: skip
    decided = folder / "decided"
    simulate(out=decided, **DECIDING)
    kept = run / "checkpoints" / "step-00000002"
    return {
        "network": Kind(folder / "net.toml", lambda path: _world(network=path)),
        "trace": Kind(folder / "cell.csv", lambda path: _world(network=path.with_name("net.toml"))),
        "device": Kind(folder / "device.toml", lambda path: _world(device=path)),
        "faults": Kind(folder / "faults.toml", lambda path: _world(faults=path)),
        "settings": Kind(folder / "settings.toml", _settings),
        "settings as JSON": Kind(folder / "settings.json", _settings),
        "secret key": Kind(folder / "keys" / "here.secret", lambda path: load_keys(path.parent)),
        "public key": Kind(public, lambda path: load_keys(path.parent)),
        "data": Kind(folder / "data-idx3-ubyte.gz", lambda path: read_idx(path, (5, 4, 3))),
        "configuration": Kind(run / "config.json", lambda path: _resumed(path.parent)),
        "summary": Kind(run / "summary.json", _summary),
        "telemetry": Kind(run / "telemetry" / "rank-0.jsonl", lambda path: retime(path.parents[1], network="4g")),
        "traffic": Kind(run / "traffic.jsonl", lambda path: retime(path.parent, network="4g")),
        "decisions": Kind(decided / "decisions.jsonl", _replayed),
        "own decisions": Kind(
            decided / "decisions" / "rank-1.jsonl", lambda path: _replayed(path.parents[1] / "decisions.jsonl")
        ),
        "shared part of a checkpoint": Kind(kept / "shared.safetensors", lambda path: _resumed(path.parents[2])),
        "own part of a checkpoint": Kind(kept / "rank-1-of-2.safetensors", lambda path: _resumed(path.parents[2])),
        "model": Kind(run / "model.safetensors", load_tree),
    }  # fmt: skip


def _world(**files: Path) -> None:
    config = SimulatedConfig.resolve(
        {"workload": "synthetic/quadratic", "workers": 4, **{name: str(path) for name, path in files.items()}}
    )
    config.make_world()
    device = config.device if "device" in files else None
    if device is not None:
        found = load_device(Path(str(device)))
        found.compute_seconds(Cost("backward", 3), Moment(0, 1, 1, 1.5))
        (found.coding or CodingRates()).compute_seconds("encode", 500, "int8")


def _settings(path: Path) -> None:
    said = read_settings(path, list_settings(Simulate))
    settings = {name: value for name, value in said.items() if not isinstance(value, Path)}
    with prefix_errors(path):
        prepare_run(SimulatedConfig, settings, options=RunOptions(out=path.with_name("nowhere")))


def _resumed(run: Path) -> None:
    prepare_run(SimulatedConfig, {"steps": 3}, options=RunOptions(resume=run))


def _summary(path: Path) -> None:
    files = RunFolder(path.parent)
    config = SimulatedConfig.resolve({"workload": "synthetic/quadratic"})
    Run(config, files, files.load_summary()).build_table()


def _replayed(path: Path) -> None:
    simulate(replay=path, **DECIDING)


# --- what is done to them -----------------------------------------------------------------------------------------

NUMBER = re.compile(rb"-?\d+(\.\d+)?(e[+-]?\d+)?")
STRANGE = (
    b"-1", b"0", b"1", b"0.5", b"1e999", b"-1e308", b"NaN", b"nan", b"inf", b"Infinity", b"true", b"null", b"{}", b"[]",
    b'"text"', b'"\\ud800"', b"18446744073709551616", b"9" * 400, b"9" * 5000, b"1_0", b"", b"'", b"\xff", b"\0",
    b"[" * 3000, b'{"a":' * 100_000, b"x = {a = " * 3000,
)  # fmt: skip
"""What takes the place of a number, a word or nothing."""


def damaged(content: bytes, draw: random.Random) -> bytes:
    """One mutation, sometimes several."""
    for _ in range(draw.choice((1, 1, 1, 2, 4))):
        content = draw.choice((_flip, _cut, _insert, _remove, _repeat, _number, _word, _line))(content, draw)
    return content


def _spot(content: bytes, draw: random.Random) -> int:
    """Anywhere, the beginning rather often: that is where headers are."""
    return draw.randrange(min(len(content), draw.choice((16, 300, 1 << 30))) + 1)


def _flip(content: bytes, draw: random.Random) -> bytes:
    at = _spot(content, draw)
    return (
        content[:at]
        + bytes(byte ^ (1 << draw.randrange(8)) for byte in content[at : at + 1])
        + content[at + 1 :]
    )


def _cut(content: bytes, draw: random.Random) -> bytes:
    return content[: _spot(content, draw)]


def _insert(content: bytes, draw: random.Random) -> bytes:
    at = _spot(content, draw)
    new = draw.choice((draw.randbytes(draw.randrange(1, 9)), draw.choice(STRANGE)))
    return content[:at] + new + content[at:]


def _remove(content: bytes, draw: random.Random) -> bytes:
    at = _spot(content, draw)
    return content[:at] + content[at + draw.randrange(1, 40) :]


def _repeat(content: bytes, draw: random.Random) -> bytes:
    at = _spot(content, draw)
    return content[:at] + content[at : at + draw.randrange(1, 200)] * 2 + content[at:]


def _number(content: bytes, draw: random.Random) -> bytes:
    return _swapped(content, list(NUMBER.finditer(content)), draw)


def _word(content: bytes, draw: random.Random) -> bytes:
    return _swapped(content, list(re.finditer(rb'"[^"\n]*"|\w+', content)), draw)


def _swapped(content: bytes, places: list[re.Match[bytes]], draw: random.Random) -> bytes:
    if not places:
        return content
    place = draw.choice(places)
    return content[: place.start()] + draw.choice(STRANGE) + content[place.end() :]


def _line(content: bytes, draw: random.Random) -> bytes:
    lines = content.splitlines(keepends=True)
    if lines:
        line = lines.pop(draw.randrange(len(lines)))
        if draw.random() < 0.5:
            lines.insert(draw.randrange(len(lines) + 1), line)
    return b"".join(lines)
