"""Folder of a run: settings, events, the coordinator's state, the model, a summary and a picture."""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from farflung.coded.linear_model import Classes
from farflung.coded.registry import BlockRegistry
from farflung.errors import CheckpointError, ConfigError, DataError
from farflung.files import JsonLinesFile, RunFiles, lock_folder, read_json_lines, wrap_read_errors, write_json
from farflung.state_trees import load_tree, save_tree
from farflung.telemetry import Event, Sink
from farflung.types import Json, State

__all__ = ["Folder", "Record"]

_MUTABLE_SETTINGS = {"devices", "max_iterations", "patience_s", "tolerance"}
"""Settings that may change when a run resumes."""
_DAMAGED_TEXT = "damaged; start the run afresh"


class Record:
    """Events and state of a coordinator, for a restart.

    ``events.jsonl`` has a line for each event. ``labels.safetensors`` holds the labels of each partition,
    ``registry.safetensors`` the coefficients of each block, and ``state.safetensors`` the solver's state. Each
    file is replaced atomically.

    Args:
      folder: Existing folder of the run.
      sink: Function that receives each event too.

    Raises:
      StorageError: the folder cannot be written.
    """

    def __init__(self, folder: Path, sink: Sink = lambda event: None) -> None:
        self._folder, self._sink = folder, sink
        self._events = JsonLinesFile(folder / "events.jsonl")
        self._num_labelled = 0
        """Number of partitions whose labels are stored; labels of a partition never change."""

    def record_event(self, event: str, **values: Json) -> None:
        """Appends an event."""
        entry: Event = {"event": event, **values}
        self._events.add(entry, flush=True)
        self._sink(entry)

    def save_registry(self, registry: BlockRegistry) -> None:
        """Writes the registry, before a device acts on it."""
        tree = registry.to_tree()
        labels = {number: partition.pop("labels") for number, partition in tree["partitions"].items()}
        if len(labels) != self._num_labelled:
            save_tree(self._folder / "labels.safetensors", labels)
            self._num_labelled = len(labels)
        save_tree(self._folder / "registry.safetensors", tree)

    def load_registry(self) -> BlockRegistry | None:
        """Reads the registry; returns ``None`` if the run is new.

        Raises:
          CheckpointError: the registry is damaged.
        """
        path = self._folder / "registry.safetensors"
        if not path.exists():
            return None
        tree = load_tree(path)
        with wrap_read_errors(path, _DAMAGED_TEXT, CheckpointError):
            for number, labels in load_tree(self._folder / "labels.safetensors").items():
                tree["partitions"][number]["labels"] = labels
            return BlockRegistry.from_tree(tree)

    def save_state(self, state: State) -> None:
        """Writes the state of the solver, after an iterate."""
        save_tree(self._folder / "state.safetensors", state)

    def load_state(self) -> State | None:
        """Reads the state of the solver; returns ``None`` if there is none yet."""
        path = self._folder / "state.safetensors"
        return load_tree(path) if path.exists() else None

    def close(self) -> None:
        """Closes the file of events."""
        self._events.close()


class Folder(RunFiles):
    """Files of a coded run.

    Args:
      path: Path of the folder.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.classes = path / "classes.json"
        self.events = path / "events.jsonl"
        self.picture = path / "run.png"

    @contextmanager
    def start_run(self, settings: Mapping[str, Json]) -> Iterator[str]:
        """Creates the folder or resumes from it, and locks it against other processes.

        Args:
          settings: Settings of the run, which are compared with those of a resumed one.

        Yields:
          Name of the run, by which devices recognize their blocks.

        Raises:
          ConfigError: the folder has another or a finished run, or another process uses it.
          StorageError: the folder cannot be written.
        """
        with lock_folder(self.path, "coordinates a run"):
            name = self._check_settings(settings) if self.config_path.exists() else secrets.token_hex(8)
            write_json(self.config_path, {"coded_run": name, **settings})
            yield name

    def _check_settings(self, settings: Mapping[str, Json]) -> str:
        stored = self.load_config()
        name = stored.pop("coded_run", None)
        if not isinstance(name, str):
            raise ConfigError(f"{self.path} holds a run of another kind: choose another --folder")
        for setting in sorted(settings.keys() - _MUTABLE_SETTINGS):
            if stored.get(setting) != settings[setting]:
                raise ConfigError(
                    f"{self.path} holds another run: its {setting} is {stored.get(setting)}, not {settings[setting]}: "
                    "choose another --folder, or continue with its settings"
                )
        if self.summary_path.exists() and self.load_summary().get("converged"):
            raise ConfigError(
                f"{self.path}: the run in this folder has converged already; choose another --folder"
            )
        return name

    def resolve_classes(self, classes: Classes) -> Classes:
        """Writes the classes of a new run, or reads those of a resumed one."""
        if self.classes.exists():
            with wrap_read_errors(self.classes, _DAMAGED_TEXT, CheckpointError):
                stored = self.load_json(self.classes)
                labels = stored["labels"]
                if not isinstance(labels, list):
                    raise TypeError("no labels")
                return Classes(tuple(float(label) for label in labels), classes.positive)  # type: ignore[arg-type]
        write_json(self.classes, {"labels": list(classes.labels)})
        return classes

    def load_events(self) -> list[Event]:
        """Reads all events, in order.

        Raises:
          DataError: the file cannot be read, or a line is no event; the message names file and line.
        """
        events: list[Event] = []

        def add_event(event: Event) -> None:
            if not isinstance(event["event"], str) or not isinstance(event["t"], int | float):
                raise TypeError("no name of an event, or no time")
            events.append(event)

        read_json_lines(self.events, "not an event; the file is damaged", add_event, DataError)
        return events
