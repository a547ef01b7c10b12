"""What a run leaves on disk."""

from __future__ import annotations

import shutil
import tempfile
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from farflung.decisions import DecisionLog, decision_json, read_decisions
from farflung.errors import ConfigError, DataError
from farflung.files import RunFiles, check_folder, held, reading, write_json, write_text, writing
from farflung.loop import Checkpoints
from farflung.telemetry import Event, read_events
from farflung.types import Decision, Json

__all__ = ["RunFolder", "Scratch"]


class RunFolder(RunFiles):
    """What a run leaves behind: configuration, telemetry, checkpoints, the trained model, logs.

    Args:
      path: the folder.
      resumed: whether it holds a run already that goes on here.
    """

    def __init__(self, path: Path, *, resumed: bool = False) -> None:
        super().__init__(path)
        self.resumed = resumed
        self.curves = path / "tensorboard"
        self.log = path / "workers.log"
        self.decisions = path / "decisions.jsonl"
        self.replay = path / "replay.jsonl"
        self.traffic = path / "traffic.jsonl"

    def check(self) -> None:
        """Finds out whether a run can be kept here, before anything is done for it.

        Raises:
          ConfigError: another run is in it, or it is no folder.
        """
        check_folder(self.path)
        with writing(self.path):
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

    def checkpoints(self, rank: int, size: int, *, leader: bool, any_size: bool = False) -> Checkpoints:
        """The run's checkpoints as one replica sees them."""
        return Checkpoints(self.path / "checkpoints", rank, size, leader=leader, any_size=any_size)


class Scratch:
    """A folder that is gone once nothing knows this object any more, at the latest with the process."""

    def __init__(self) -> None:
        with writing(Path(tempfile.gettempdir())):
            self.path = Path(tempfile.mkdtemp(prefix="farflung-"))
        weakref.finalize(self, shutil.rmtree, self.path, ignore_errors=True)
