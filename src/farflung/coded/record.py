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

    ``events.jsonl`` tells what happened, a line each. ``roster.safetensors`` holds labels and what is in each block,
    and ``state.safetensors`` the solver's state; each is written whole or not at all.

    Args:
      folder: is there.
      told: hears of each event too.

    Raises:
      StorageError: it cannot be written.
    """

    def __init__(self, folder: Path, told: Sink = lambda event: None) -> None:
        self._folder, self._told = folder, told
        self._events = JsonLinesFile(folder / "events.jsonl")

    def tell(self, event: str, **values: Json) -> None:
        """One line."""
        entry: Event = {"event": event, **values}
        self._events.add(entry, flush=True)
        self._told(entry)

    def keep_roster(self, roster: Roster) -> None:
        """Before anybody acts on it."""
        save_tree(self._folder / "roster.safetensors", roster.tree())

    def roster(self) -> Roster | None:
        """What was kept; ``None``: the run begins."""
        path = self._folder / "roster.safetensors"
        return Roster.from_tree(load_tree(path)) if path.exists() else None

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
