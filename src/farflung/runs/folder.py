"""Files of a run on disk."""

from __future__ import annotations

import shutil
import tempfile
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from farflung.decisions import DecisionLog, format_decision, read_decisions
from farflung.errors import ConfigError, DataError
from farflung.files import (
    RunFiles,
    check_folder,
    lock_folder,
    wrap_read_errors,
    wrap_write_errors,
    write_json,
    write_text,
)
from farflung.loop import Checkpoints
from farflung.telemetry import Event, read_events
from farflung.types import Decision, Json

__all__ = ["RunFolder", "TempFolder"]


class RunFolder(RunFiles):
    """Files of a run: configuration, telemetry, checkpoints, the trained model, logs.

    Args:
      path: Folder of the run.
      is_resumed: True to continue the run in the folder.
    """

    def __init__(self, path: Path, *, is_resumed: bool = False) -> None:
        super().__init__(path)
        self.is_resumed = is_resumed
        self.log_path = path / "workers.log"
        self.decisions_path = path / "decisions.jsonl"
        self.replay_path = path / "replay.jsonl"
        self.traffic_path = path / "traffic.jsonl"

    def check(self) -> None:
        """Checks that a run can be stored in this folder.

        Raises:
          ConfigError: The folder holds another run, or the path is not a folder.
        """
        check_folder(self.path)
        with wrap_write_errors(self.path):
            if self.config_path.exists() and not self.is_resumed:
                raise ConfigError(
                    f"{self.path} holds a run already: choose another --out, or continue it with --resume"
                )

    @contextmanager
    def begin_run(self, config: Mapping[str, Json], replay: Path | str | None = None) -> Iterator[None]:
        """Creates the folder with configuration and decisions to replay, and locks it within the context.

        Raises:
          BadInput: Another process runs here, the folder holds another run or cannot be written, or ``replay`` is not a
            decision log. The folder is not created in these cases.
        """
        decisions = None if replay is None else read_decisions(Path(replay))
        if decisions == []:
            raise ConfigError(f"{replay}: holds no whole decision; give the decisions.jsonl of a run")
        self.check()
        with lock_folder(self.path, "makes a run"):
            self.check()  # another process may have created a run since
            if decisions is not None:
                write_text(
                    self.replay_path, "".join(f"{format_decision(decision)}\n" for decision in decisions)
                )
            write_json(self.config_path, dict(config))
            yield

    def create_decision_log(self) -> DecisionLog:
        """Creates the run's decision log, which repeats stored decisions to replay."""
        return DecisionLog(
            self.decisions_path, read_decisions(self.replay_path) if self.replay_path.exists() else None
        )

    def load_decisions(self) -> list[Decision]:
        """Loads the decisions so far, for all replicas and of single ones."""
        has_decisions = self.decisions_path.exists() or self.decisions_path.with_suffix("").exists()
        return read_decisions(self.decisions_path) if has_decisions else []

    def get_telemetry_path(self, rank: int) -> Path:
        """Returns the path of one rank's events."""
        return self.path / "telemetry" / f"rank-{rank}.jsonl"

    def load_events(self) -> dict[int, list[Event]]:
        """Loads all events, by rank.

        Raises:
          DataError: A file cannot be read; the message names file and line.
        """
        events = {}
        for file in sorted((self.path / "telemetry").glob("rank-*.jsonl")):
            with wrap_read_errors(file, "damaged", DataError):
                events[int(file.stem.removeprefix("rank-"))] = read_events(file)
        return events

    def get_checkpoints(
        self, rank: int, size: int, *, is_leader: bool, allows_any_size: bool = False
    ) -> Checkpoints:
        """Returns the run's checkpoints for one replica."""
        return Checkpoints(
            self.path / "checkpoints", rank, size, is_leader=is_leader, allows_any_size=allows_any_size
        )


class TempFolder:
    """Temporary folder, deleted with this object or at the end of the process."""

    def __init__(self) -> None:
        with wrap_write_errors(Path(tempfile.gettempdir())):
            self.path = Path(tempfile.mkdtemp(prefix="farflung-"))
        weakref.finalize(self, shutil.rmtree, self.path, ignore_errors=True)
