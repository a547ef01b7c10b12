"""What a coordinator keeps in its folder: what has happened, and what it has to know to come again."""

from __future__ import annotations

from pathlib import Path

from farflung.coded.roster import Roster
from farflung.files import JsonLinesFile
from farflung.replica import load_tree, save_tree
from farflung.telemetry import Event, Sink
from farflung.types import Json, State

__all__ = ["Record"]


class Record:
    """The folder of one run.

    ``events.jsonl`` tells what happened, a line each. ``labels.safetensors`` holds the labels of each partition,
    ``roster.safetensors`` what is in each block, and ``state.safetensors`` the solver's state; each is written whole or
    not at all.

    Args:
      folder: is there.
      told: hears of each event too.

    Raises:
      StorageError: it cannot be written.
    """

    def __init__(self, folder: Path, told: Sink = lambda event: None) -> None:
        self._folder, self._told = folder, told
        self._events = JsonLinesFile(folder / "events.jsonl")
        self._labelled = 0
        """Partitions whose labels are kept: the labels of a partition never change."""

    def tell(self, event: str, **values: Json) -> None:
        entry: Event = {"event": event, **values}
        self._events.add(entry, flush=True)
        self._told(entry)

    def keep_roster(self, roster: Roster) -> None:
        """Before anybody acts on it."""
        tree = roster.tree()
        labels = {number: one.pop("labels") for number, one in tree["partitions"].items()}
        if len(labels) != self._labelled:
            save_tree(self._folder / "labels.safetensors", labels)
            self._labelled = len(labels)
        save_tree(self._folder / "roster.safetensors", tree)

    def roster(self) -> Roster | None:
        """What was kept; ``None``: the run begins."""
        path = self._folder / "roster.safetensors"
        if not path.exists():
            return None
        tree = load_tree(path)
        partitions = tree["partitions"]
        if not all("labels" in one for one in partitions.values()):  # farflung 0.1 kept them in the roster
            for number, labels in load_tree(self._folder / "labels.safetensors").items():
                partitions[number]["labels"] = labels
        return Roster.from_tree(tree)

    def keep_state(self, state: State) -> None:
        """Of the solver, after an iterate."""
        save_tree(self._folder / "state.safetensors", state)

    def state(self) -> State | None:
        """What was kept; ``None``: nothing yet."""
        path = self._folder / "state.safetensors"
        return load_tree(path) if path.exists() else None

    def close(self) -> None:
        """Nothing more happens."""
        self._events.close()
