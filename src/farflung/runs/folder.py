"""What a run leaves on disk."""

from __future__ import annotations

import json
import shutil
import tempfile
import weakref
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from farflung.decisions import DecisionLog, decision_json, read_decisions
from farflung.errors import CheckpointError, ConfigError, DataError
from farflung.files import held, json_of, read_text, reading, write_json, write_text, writing
from farflung.replica import Checkpoints
from farflung.telemetry import Event, read_events
from farflung.types import Decision, Json

__all__ = ["RunFolder", "Scratch"]


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
        self.traffic_picture = path / "traffic.png"
        self.curves = path / "tensorboard"
        self.summary = path / "summary.json"
        self.model = path / "model.safetensors"
        self.log = path / "workers.log"
        self.decisions = path / "decisions.jsonl"
        self.replay = path / "replay.jsonl"
        self.traffic = path / "traffic.jsonl"

    def check(self) -> None:
        """Finds out whether a run can be kept here, before anything is done for it.

        Raises:
          ConfigError: another run is in it, or it is no folder.
        """
        with writing(self.path):
            if self.path.exists() and not self.path.is_dir():
                raise ConfigError(f"{self.path}: a file: a run is kept in a folder")
            if self.config.exists() and not self.resumed:
                raise ConfigError(
                    f"{self.path} holds a run already: choose another --out, or continue it with --resume"
                )

    @contextmanager
    def begun(self, config: Mapping[str, Json], replay: Path | str | None = None) -> Iterator[None]:
        """Makes the folder and stores the configuration, and the decisions of another run that this one makes again;
        inside, no other process makes a run here.

        Raises:
          BadInput: another process makes a run here, another run is in it, it cannot be written, or ``replay`` is no
            decision log; the folder has not been made then.
        """
        again = None if replay is None else read_decisions(Path(replay))
        if again == []:
            raise ConfigError(f"{replay}: holds no whole decision; give the decisions.jsonl of a run")
        self.check()
        with writing(self.path):
            self.path.mkdir(parents=True, exist_ok=True)
        with held(self.path, "makes a run"):
            self.check()  # another process may have made one since
            if again is not None:
                write_text(self.replay, "".join(f"{decision_json(decision)}\n" for decision in again))
            write_json(self.config, dict(config))
            yield

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
        if not self.config.exists():
            raise CheckpointError(f"{self.path}: no run there ({self.config.name} is missing)")
        return self._object(self.config)

    def stored_summary(self) -> dict[str, Json]:
        """How the run in it ended.

        Raises:
          CheckpointError: it has not, or the file is damaged.
        """
        return self._object(self.summary)

    def _object(self, path: Path) -> dict[str, Json]:
        with reading(path, "damaged; start the run anew", CheckpointError):
            found = json_of(read_text(path))
            if not isinstance(found, dict):
                raise TypeError(f"keys and values were due, not {type(found).__name__}")
            return found

    def telemetry(self, rank: int) -> Path:
        """The events of one rank."""
        return self.path / "telemetry" / f"rank-{rank}.jsonl"

    def events(self) -> dict[int, list[Event]]:
        """All events, by rank.

        Raises:
          DataError: they cannot be read; names file and line.
        """
        found = {}
        for file in sorted((self.path / "telemetry").glob("rank-*.jsonl")):
            with reading(file, "damaged", DataError):
                found[int(file.stem.removeprefix("rank-"))] = read_events(file)
        return found

    def refused(self, rank: int | None = None) -> Counter[str]:
        """How many messages and connections of strangers a rank has refused, over all legs of the run; not given: all.

        Raises:
          DataError: the events cannot be read.
        """
        found: Counter[str] = Counter()
        for file in (
            [self.telemetry(rank)] if rank is not None else (self.path / "telemetry").glob("rank-*.jsonl")
        ):
            with reading(file, "damaged", DataError), file.open(encoding="utf-8") as lines:
                for line in lines:
                    if '"refused"' in line and (event := json.loads(line))["event"] == "refused":
                        found.update({what: event[what] for what in ("messages", "connections")})
        return found

    def checkpoints(self, rank: int, size: int, *, leader: bool, any_size: bool = False) -> Checkpoints:
        """The run's checkpoints as one replica sees them."""
        return Checkpoints(self.path / "checkpoints", rank, size, leader=leader, any_size=any_size)


class Scratch:
    """A folder that is gone once nothing knows this object any more, at the latest with the process."""

    def __init__(self) -> None:
        with writing(Path(tempfile.gettempdir())):
            self.path = Path(tempfile.mkdtemp(prefix="farflung-"))
        weakref.finalize(self, shutil.rmtree, self.path, ignore_errors=True)
