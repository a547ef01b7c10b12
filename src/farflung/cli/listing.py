"""``farflung list``: what recipes, codecs, workloads, networks, devices and data sets are named."""

from __future__ import annotations

import json
import re
import textwrap
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple, TypeAlias

import tyro
from rich.filesize import decimal

from farflung._docstrings import docstring_of
from farflung.cli.output import print_table
from farflung.errors import DataError, UnknownName
from farflung.types import Json

if TYPE_CHECKING:
    from farflung.data import Location, Source
    from farflung.types import Workload

__all__ = ["List"]

Row: TypeAlias = "dict[str, Json]"
SHAPE = (1024, 1024)
"""Of the float32 tensor that each codec encodes: a layer of normally distributed gradients."""
SMALL = 0.02
"""An error below this share of the gradient's norm is lost in the noise of its batch."""


class Listing(NamedTuple):
    """Describes one table.

    Args:
      names: of its rows.
      row: gives the figures of a name, as ``--json`` prints them.
      cells: gives the cells of a row that the table shows, by column.
    """

    names: Iterable[str]
    row: Callable[[str], Row]
    cells: Callable[[dict[str, Any]], dict[str, str]]


@dataclass(frozen=True)
class List:
    """List what farflung knows by name; with a name, all figures of that one.

    Codecs: each encodes a million normally distributed values of float32 with its default options. Its error is the
    norm of what it leaves out over that of the gradient. error_feedback(CODEC) is for codecs that are biased and leave
    out much. Networks and devices: with a name, where the figures come from.
    """

    what: tyro.conf.Positional[Literal["recipes", "codecs", "workloads", "networks", "devices", "data"]]
    """Which table."""
    name: Annotated[str | None, tyro.conf.Positional, tyro.conf.arg(metavar="NAME")] = None
    """Show this one alone, in full."""
    json: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Print JSON."""

    def run(self) -> int:
        """Carries it out; returns the exit code."""
        listing = LISTINGS[self.what]()
        names = list(listing.names)
        if self.name is not None:
            if self.name not in names:
                raise UnknownName(self.what.removesuffix("s"), self.name, names)
            names = [self.name]
        rows = [listing.row(name) for name in names]
        if self.json:
            print(json.dumps(rows, indent=2))
        elif self.name is not None:
            print_table(("what", "how much"), [(key, _words(value)) for key, value in rows[0].items()])
        else:
            cells = [listing.cells(row) for row in rows]
            print_table(list(cells[0]), [list(line.values()) for line in cells])
        return 0


def _words(value: Json) -> str:
    if isinstance(value, dict):
        return "\n".join(f"{key} {_words(one)}" for key, one in value.items())
    return "" if value is None else str(value)


def _documented(thing: Callable[..., object]) -> Row:
    """Gives the docstring of a class or a function: its first line, and what follows."""
    what, _, about = re.sub(r":\w+:`~?([^`]+)`|``", r"\1", docstring_of(thing)).partition("\n")
    return {"what": what, "about": about.strip() or None}


def _recipes() -> Listing:
    from farflung.handle import carries
    from farflung.recipes import RECIPES, Recipe

    plain = Recipe().members

    def row(name: str) -> Row:
        recipe = RECIPES[name]
        attach = carries(recipe)
        parts: dict[str, Json] = {**recipe.members}
        return {
            "name": name, "what": recipe.summary, "parts": parts, "attach_alone": attach == "yes", "attach": attach
        }  # fmt: skip

    def cells(row: dict[str, Any]) -> dict[str, str]:
        own = [f"{family} {member}" for family, member in row["parts"].items() if member != plain[family]]
        return {
            "recipe": row["name"],
            "what": row["what"],
            "parts of its own": ", ".join(own) or "the plain ones",
            "with attach": row["attach"],
        }

    return Listing(sorted(RECIPES), row, cells)


def _codecs() -> Listing:
    import torch

    from farflung.codecs import CODECS
    from farflung.seeding import generator
    from farflung.spec import options_of
    from farflung.trees import only_seeds
    from farflung.types import CodecState, Placed, Seeds, TensorSpec

    gradient = torch.randn(SHAPE, generator=generator(0, "codecs")).flatten()

    def row(name: str) -> Row:
        codec = CODECS[name]()
        spec = TensorSpec(tuple(gradient.shape), gradient.dtype, (Placed(SHAPE, 0),))
        payload, state = codec.encode(codec.init(spec, Seeds(0, 1)), gradient, step=0, count=1)
        decoded = codec.decode(state, payload, spec, step=0, count=1)
        error = float((decoded - gradient).norm() / gradient.norm())
        if not only_seeds(CodecState({}, state.local)):
            feedback = "keeps its own"
        else:
            feedback = "needs none" if codec.unbiased or error < SMALL else "wants it"
        return {
            "name": name,
            **_documented(type(codec)),
            "bytes_per_value": payload.nbytes / gradient.numel(),
            "error": error,
            "error_feedback": feedback,
            "unbiased": codec.unbiased,
            "options": options_of(CODECS[name]),
        }

    def cells(row: dict[str, Any]) -> dict[str, str]:
        return {
            "codec": row["name"],
            "what": row["what"],
            "bytes per value": f"{row['bytes_per_value']:.3g}",
            "error": f"{row['error']:.1%}",
            "error feedback": row["error_feedback"],
            "options": row["options"],
        }

    return Listing(CODECS, row, cells)


def _workloads() -> Listing:
    from farflung.seeding import generator
    from farflung.workloads import WORKLOADS, data_of, workload

    def row(name: str) -> Row:
        task, source = workload(name), data_of(name)
        at_hand, where, counts = _samples_of(task, source)
        return {
            "name": name,
            **_documented(WORKLOADS[name]),
            "samples": None if counts is None else {"train": counts[0], "test": counts[1]},
            "parameters": sum(p.numel() for p in task.model(generator(0, "model")).parameters()),
            "defaults": dict(task.defaults),
            "data": None if source is None else source.name,
            "at_hand": at_hand,
            "where": where,
        }

    def cells(row: dict[str, Any]) -> dict[str, str]:
        samples, used = row["samples"], row["defaults"]
        return {
            "workload": row["name"],
            "what": row["what"].rstrip("."),
            "samples": "?" if samples is None else f"{samples['train']:,} + {samples['test']:,}",
            "parameters": f"{row['parameters']:,}",
            "settings": f"batch {used['batch_size']}, rate {used['learning_rate']:g}, {used['steps']:,} steps",
            "data": row["where"],
        }

    return Listing(sorted(WORKLOADS), row, cells)


def _samples_of(task: Workload, source: Source | None) -> tuple[bool, str, tuple[int, int] | None]:
    """Tells whether the data of a workload is at hand, where it is, and how many samples train and test.

    Only small sets are read to be counted: official files hold a number that is known.
    """
    from farflung.data.source import find

    location, known = None, None if source is None else source.samples
    try:
        if source is not None:
            location = find(source)
            if location is None:
                return False, f"absent; {source.remedy}", known
            if location.kind == "packaged":
                known = None
        if known is None:
            train, test = task.datasets()
            known = len(train), len(test)
    except DataError as error:
        return False, str(error), None if location is not None else known
    return True, "made up" if location is None else _place(location), known


def _place(location: Location) -> str:
    return "packaged subset" if location.kind == "packaged" else f"in {location.folder}"


def _networks() -> Listing:
    from farflung.network import NETWORKS

    def row(name: str) -> Row:
        profile = NETWORKS[name]
        return {"name": name, "nodes": profile.nodes or "any", "source": profile.source}

    def cells(row: dict[str, Any]) -> dict[str, str]:
        return {"network": row["name"], "nodes": str(row["nodes"]), "in short": _in_short(row["source"])}

    return Listing(NETWORKS, row, cells)


def _devices() -> Listing:
    from farflung.devices import DEVICES, coding_source

    def row(name: str) -> Row:
        return {"name": name, "source": f"{DEVICES[name].source} {coding_source(DEVICES[name])}"}

    return Listing(DEVICES, row, lambda row: {"device": row["name"], "in short": _in_short(row["source"])})


def _in_short(source: str) -> str:
    """Gives the figures that a source begins with, up to where they are from."""
    figures = re.split(r"(?<!al)\. |: ", source.removeprefix("Our choice: "), maxsplit=1)[0]
    return textwrap.shorten(figures.rstrip("."), 90, placeholder=" ...")


def _data() -> Listing:
    from farflung.data import entries

    found = {entry.source.name: entry for entry in entries()}

    def row(name: str) -> Row:
        entry, source, location = found[name], found[name].source, found[name].location
        return {
            "name": name,
            "what": source.title,
            "at_hand": location is not None,
            "kind": None if location is None else location.kind,
            "folder": None if location is None else str(location.folder),
            "trouble": entry.trouble or None,
            "download_nbytes": entry.nbytes,
            "licence": source.licence,
            "homepage": source.homepage,
            "how_to_get": source.remedy,
        }

    def cells(row: dict[str, Any]) -> dict[str, str]:
        location = found[row["name"]].location
        return {
            "data set": row["name"],
            "what": row["what"],
            "at hand": row["trouble"] or ("no" if location is None else _place(location)),
            "download": "?" if row["download_nbytes"] is None else decimal(row["download_nbytes"]),
            "licence": row["licence"],
            "how to get it": "" if row["kind"] in ("folder", "cache") else row["how_to_get"],
        }

    return Listing(found, row, cells)


LISTINGS: dict[str, Callable[[], Listing]] = {
    "recipes": _recipes,
    "codecs": _codecs,
    "workloads": _workloads,
    "networks": _networks,
    "devices": _devices,
    "data": _data,
}
