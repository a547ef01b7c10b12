"""The folder that a coordinator leaves behind, and finds again."""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from farflung.coded.linear_model import Classes
from farflung.errors import CheckpointError, ConfigError, DataError
from farflung.files import held, json_lines, json_of, read_text, reading, write_json, writing
from farflung.telemetry import Event
from farflung.types import Json

__all__ = ["Folder"]

_MAY_CHANGE = {"devices", "max_iterations", "patience_s", "tolerance"}
"""Settings that a run may go on with other values of."""


class Folder:
    """What a coded run is kept in: settings, events, state, the model, a summary and a picture.

    Args:
      path: of it.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config = path / "config.json"
        self.classes = path / "classes.json"
        self.events = path / "events.jsonl"
        self.model = path / "model.safetensors"
        self.summary = path / "summary.json"
        self.picture = path / "run.png"

    @contextmanager
    def begun(self, settings: Mapping[str, Json]) -> Iterator[str]:
        """Makes the folder, or goes on in it; inside, no other process does.

        Args:
          settings: that decide the run; those of one that goes on are compared.

        Yields:
          The name of the run, by which devices know the blocks that they hold.

        Raises:
          ConfigError: another run is in it, or one that is over, or another process coordinates one there.
          StorageError: it cannot be written.
        """
        with writing(self.path):
            if self.path.exists() and not self.path.is_dir():
                raise ConfigError(f"{self.path}: a file: a run is kept in a folder")
            self.path.mkdir(parents=True, exist_ok=True)
        with held(self.path, "coordinates a run"):
            name = self._found(settings) if self.config.exists() else secrets.token_hex(8)
            write_json(self.config, {"coded_run": name, **settings})
            yield name

    def _found(self, settings: Mapping[str, Json]) -> str:
        stored = _object(self.config)
        name = stored.pop("coded_run", None)
        if not isinstance(name, str):
            raise ConfigError(f"{self.path} holds a run of another kind: choose another --folder")
        for setting in sorted(settings.keys() - _MAY_CHANGE):
            if stored.get(setting) != settings[setting]:
                raise ConfigError(
                    f"{self.path} holds another run: its {setting} is {stored.get(setting)}, not {settings[setting]}: "
                    "choose another --folder, or go on with its settings"
                )
        if self.summary.exists() and _object(self.summary).get("converged"):
            raise ConfigError(f"{self.path}: the run in it has converged: choose another --folder")
        return name

    def keep_classes(self, classes: Classes) -> Classes:
        """Those that the run began with: these, unless it goes on."""
        if self.classes.exists():
            with reading(self.classes, "damaged; start the run anew", CheckpointError):
                stored = _object(self.classes)
                labels = stored["labels"]
                if not isinstance(labels, list):
                    raise TypeError("no labels")
                return Classes(tuple(float(one) for one in labels), classes.positive)  # type: ignore[arg-type]
        write_json(self.classes, {"labels": list(classes.labels)})
        return classes

    def told(self) -> list[Event]:
        """What has happened, in order.

        Raises:
          DataError: it cannot be read, or a line is no event; names file and line.
        """
        events: list[Event] = []

        def take(event: Event) -> None:
            if not isinstance(event["event"], str) or not isinstance(event["t"], int | float):
                raise TypeError("no name of an event, or no time")
            events.append(event)

        json_lines(self.events, "not an event; the file is damaged", take, DataError)
        return events


def _object(path: Path) -> dict[str, Json]:
    with reading(path, "damaged; start the run anew", CheckpointError):
        found = json_of(read_text(path))
        if not isinstance(found, dict):
            raise TypeError(f"keys and values were due, not {type(found).__name__}")
        return found
