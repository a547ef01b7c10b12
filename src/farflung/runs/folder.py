"""What a run leaves on disk."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
import weakref
from collections.abc import Mapping
from pathlib import Path

from farflung.errors import CheckpointError, ConfigError
from farflung.replica import Checkpoints
from farflung.runtime import DecisionLog, decision_json, read_decisions
from farflung.telemetry import Event, read_events
from farflung.types import Decision, Json

__all__ = ["RunFolder", "Scratch", "write_json", "write_text"]


class RunFolder:
    """What a run leaves behind: configuration, telemetry, checkpoints, the trained model, pictures, logs.

    Args:
      path: the folder.
      resumed: whether it holds a run already that goes on here.
    """

    def __init__(self, path: Path, *, resumed: bool = False) -> None:
        self.path, self.resumed = path, resumed
        self.config = path / "config.json"
        self.picture = path / "run.png"
        self.partition_picture = path / "partition.png"
        self.curves = path / "tensorboard"
        self.summary = path / "summary.json"
        self.model = path / "model.safetensors"
        self.log = path / "workers.log"
        self.decisions = path / "decisions.jsonl"
        self.replay = path / "replay.jsonl"
        self.traffic = path / "traffic.jsonl"

    def create(self, config: Mapping[str, Json], replay: Path | None = None) -> None:
        """Makes the folder and stores the configuration, and the decisions of another run that this one makes again.

        Raises:
          ConfigError: another run is in it, or ``replay`` is no decision log.
        """
        again = None if replay is None else read_decisions(replay)
        if self.config.exists() and not self.resumed:
            raise ConfigError(
                f"{self.path} holds a run already: choose another --out, or continue it with --resume"
            )
        self.path.mkdir(parents=True, exist_ok=True)
        if again is not None:
            write_text(self.replay, "".join(f"{decision_json(decision)}\n" for decision in again))
        write_json(self.config, dict(config))

    def decision_log(self) -> DecisionLog:
        """Keeps the run's decisions in the folder, and makes those again that are to be replayed."""
        return DecisionLog(self.decisions, read_decisions(self.replay) if self.replay.exists() else None)

    def decided(self) -> list[Decision]:
        """What the run has decided so far, for all replicas and each for itself."""
        made = self.decisions.exists() or self.decisions.with_suffix("").exists()
        return read_decisions(self.decisions) if made else []

    def stored_config(self) -> dict[str, Json]:
        """The settings of the run in it.

        Raises:
          CheckpointError: there is none, or it is damaged.
        """
        try:
            stored = json.loads(self.config.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise CheckpointError(f"{self.path}: no run there ({self.config.name} is missing)") from None
        except ValueError:
            stored = None
        if not isinstance(stored, dict):
            raise CheckpointError(f"{self.config}: damaged; start the run anew")
        return stored

    def telemetry(self, rank: int) -> Path:
        """The events of one rank."""
        return self.path / "telemetry" / f"rank-{rank}.jsonl"

    def events(self) -> dict[int, list[Event]]:
        """All events, by rank."""
        files = (self.path / "telemetry").glob("rank-*.jsonl")
        return {int(file.stem.removeprefix("rank-")): list(read_events(file)) for file in sorted(files)}

    def checkpoints(self, rank: int, size: int, *, leader: bool) -> Checkpoints:
        """The run's checkpoints as one replica sees them."""
        return Checkpoints(self.path / "checkpoints", rank, size, leader=leader)


class Scratch:
    """A folder that is gone once nothing knows this object any more, at the latest with the process."""

    def __init__(self) -> None:
        self.path = Path(tempfile.mkdtemp(prefix="farflung-"))
        weakref.finalize(self, shutil.rmtree, self.path, ignore_errors=True)


def write_json(path: Path, value: Json) -> None:
    """Writes a file that appears whole or not at all."""
    write_text(path, json.dumps(value, indent=2) + "\n")


def write_text(path: Path, text: str) -> None:
    """Writes a file that appears whole or not at all."""
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    partial.write_text(text, encoding="utf-8")
    partial.replace(path)
