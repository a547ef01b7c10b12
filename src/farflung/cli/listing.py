"""``farflung list``: the names of recipes, codecs, workloads, networks, devices and data sets."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Literal, TypeAlias

import tyro
from rich.filesize import decimal

from farflung._docstrings import get_docstring
from farflung.cli.output import print_json, print_list, print_table
from farflung.errors import DataError, UnknownName
from farflung.types import Json

if TYPE_CHECKING:
    from farflung.data import Location, Source
    from farflung.types import Workload

__all__ = ["List"]

Row: TypeAlias = "dict[str, Json]"
SHAPE = (1024, 1024)
"""Shape of the float32 tensor that each codec encodes: a layer of normally distributed gradients."""
NEGLIGIBLE_ERROR = 0.02
"""Relative error of a gradient below which the noise of its batch hides it."""


STEADY_STEP = 1_000_000
"""Step at which codecs are measured, after the warm-up of those that have one."""

Listing: TypeAlias = "tuple[Iterable[str], Callable[[str], tuple[Row, dict[str, str]]]]"
"""Names of a table's rows, and a function that returns all figures of a name and its line's cells by column."""


@dataclass(frozen=True)
class List:
    """List recipes, codecs, workloads, networks, devices or data sets.

    With a name, shows all figures of that one.
    Codecs: each encodes a million normally distributed float32 values with default options, after any warm-up.
    Its error is the norm of its residual over that of the gradient. Biased codecs with large errors need feedback:
    error_feedback(CODEC). The error of an unbiased codec is noise, right on average; large noise slows training.
    """

    table: tyro.conf.Positional[Literal["recipes", "codecs", "workloads", "networks", "devices", "data"]]
    """Table to list."""
    name: Annotated[str | None, tyro.conf.Positional, tyro.conf.arg(metavar="NAME")] = None
    """Show only this one, in full."""
    json: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Print JSON."""

    def run(self) -> int:
        """Prints the table, or the row of one name; raises :class:`UnknownName` if there is none."""
        entries, describe = LISTINGS[self.table]()
        names = list(entries)
        if self.name is not None:
            if self.name not in names:
                raise UnknownName(self.table.removesuffix("s"), self.name, names)
            names = [self.name]
        rows, cells = zip(*map(describe, names), strict=True)
        if self.json:
            print_json(rows, indent=2)
        elif self.name is not None:
            print_table((), [(key.replace("_", " "), _format_value(value)) for key, value in rows[0].items()])
        else:
            print_list(cells)
            print(f"\nfarflung list {self.table} NAME shows all about one.")
        return 0


def _format_value(value: Json) -> str:
    if isinstance(value, dict):
        return "\n".join(f"{key} {_format_value(item)}" for key, item in value.items())
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int | float):
        return f"{value:,}" if isinstance(value, int) else f"{value:.4g}"
    return "" if value is None else str(value)


def _read_docs(documented: Callable[..., object]) -> Row:
    """Reads a docstring of a class or function: its first line, and the remaining text."""
    summary, _, about = re.sub(r":\w+:`~?([^`]+)`|``", r"\1", get_docstring(documented)).partition("\n")
    return {"summary": summary, "about": about.strip() or None}


def _build_recipe_rows() -> Listing:
    """Returns the names of all recipes, and a function that builds the row of one name."""
    from farflung.attach_checks import describe_attach_support
    from farflung.recipes import RECIPES

    def describe(name: str) -> tuple[Row, dict[str, str]]:
        recipe = RECIPES[name]
        attach = describe_attach_support(recipe)
        parts: dict[str, Json] = {**recipe.component_texts}
        row: Row = {
            "name": name,
            "summary": recipe.summary,
            "parts": parts,
            "attach_alone": attach == "yes",
            "attach": attach,
        }
        works = attach if attach == "yes" else "no" if attach.startswith("no:") else "partly"
        return row, {"recipe": name, "attach": works, "what": recipe.summary}

    return sorted(RECIPES), describe


def _build_codec_rows() -> Listing:
    import torch

    from farflung.codecs import CODECS
    from farflung.seeding import create_generator
    from farflung.spec import format_options
    from farflung.trees import has_only_seeds
    from farflung.types import CodecState, ParameterSpan, Seeds, TensorSpec

    gradient = torch.randn(SHAPE, generator=create_generator(0, "codecs")).flatten()

    def describe(name: str) -> tuple[Row, dict[str, str]]:
        codec = CODECS[name]()
        spec = TensorSpec(tuple(gradient.shape), gradient.dtype, (ParameterSpan(SHAPE, 0),))
        payload, state = codec.encode(codec.init(spec, Seeds(0, 1)), gradient, step=STEADY_STEP, count=1)
        decoded = codec.decode(state, payload, spec, step=STEADY_STEP, count=1)
        error = float((decoded - gradient).norm() / gradient.norm())
        feedback = "no need" if error < NEGLIGIBLE_ERROR else "unbiased" if codec.is_unbiased else "needed"
        if not has_only_seeds(CodecState({}, state.local)):
            feedback = "built in"
        documented, options = _read_docs(type(codec)), format_options(CODECS[name])
        size = payload.nbytes / gradient.numel()
        row: Row = {
            "name": name,
            **documented,
            "bytes_per_value": size,
            "error": error,
            "error_feedback": feedback,
            "unbiased": codec.is_unbiased,
            "options": options,
        }
        return row, {
            "codec": name,
            "bytes/value": f"{size:.3g}",
            "error": f"{100 * error:.3g} %",
            "feedback": feedback,
            "what": re.sub(r"^(Unbiased c|C)odec that ", "", str(documented["summary"])).rstrip("."),
        }

    return CODECS, describe


def _build_workload_rows() -> Listing:
    from farflung.seeding import create_generator
    from farflung.workloads import WORKLOADS, create_workload, find_dataset

    def describe(name: str) -> tuple[Row, dict[str, str]]:
        workload, source = create_workload(name), find_dataset(name)
        is_present, place, counts = _inspect_data(workload, source)
        documented, config = _read_docs(WORKLOADS[name]), workload.defaults
        parameters = sum(p.numel() for p in workload.build_model(create_generator(0, "model")).parameters())
        row: Row = {
            "name": name,
            **documented,
            "samples": None if counts is None else {"train": counts[0], "test": counts[1]},
            "parameters": parameters,
            "defaults": dict(config),
            "data": None if source is None else source.name,
            "is_present": is_present,
            "location": place,
        }
        return row, {
            "workload": name,
            "parameters": f"{parameters:,}",
            "data": place if is_present else "absent",
            "what": str(documented["summary"]).rstrip("."),
        }

    return sorted(WORKLOADS), describe


def _inspect_data(workload: Workload, source: Source | None) -> tuple[bool, str, tuple[int, int] | None]:
    """Returns whether a workload's data is present, its location or why it is absent, and its sample counts if known.

    Official files have a known number of samples, so only small sets are read for counting.
    """
    from farflung.data.source import find

    location, counts = None, None if source is None else source.samples
    try:
        if source is not None:
            location = find(source)
            if location is None:
                return False, f"absent; {source.remedy}", counts
            if location.kind == "packaged":
                counts = None
        if counts is None:
            train, test = workload.load_datasets()
            counts = len(train), len(test)
    except DataError as error:
        return False, str(error), None if location is not None else counts
    return True, "made up" if location is None else _format_location(location), counts


def _format_location(location: Location) -> str:
    return "packaged subset" if location.kind == "packaged" else f"in {location.folder}"


def _build_network_rows() -> Listing:
    from farflung.network import NETWORKS

    def describe(name: str) -> tuple[Row, dict[str, str]]:
        profile = NETWORKS[name]
        nodes, source = profile.nodes or "any", profile.source
        cells = {"network": name, "nodes": str(nodes), "what": _shorten_source(source)}
        return {"name": name, "nodes": nodes, "source": source}, cells

    return NETWORKS, describe


def _build_device_rows() -> Listing:
    from farflung.devices import DEVICES, describe_coding_rates
    from farflung.devices.catalog import DEFAULT_CORES, SUSTAINED_FRACTION

    def describe(name: str) -> tuple[Row, dict[str, str]]:
        spec = DEVICES[name]
        row: Row = {
            "name": name,
            "peak_flops": int(spec.peak_flops),
            "sustained_flops": int(SUSTAINED_FRACTION * spec.peak_flops),
            "cores": DEFAULT_CORES,
            "memory_nbytes": spec.memory_nbytes,
            "source": f"{spec.source} {describe_coding_rates(spec)}",
        }
        cells = {
            "device": name,
            "peak": f"{spec.peak_flops / 1e9:,.0f} Gflop/s",
            "memory": f"{spec.memory_nbytes >> 30} GiB",
            "what": _shorten_source(spec.source),
        }
        return row, cells

    return DEVICES, describe


def _shorten_source(source: str) -> str:
    """Returns the figures at the beginning of a source, without their origin."""
    figures = re.split(r"(?<!al)\. |: ", source.removeprefix("Our choice: "), maxsplit=1)[0]
    return textwrap.shorten(figures.rstrip("."), 90, placeholder=" ...")


def _build_dataset_rows() -> Listing:
    from farflung.data import list_entries

    by_name = {entry.source.name: entry for entry in list_entries()}

    def describe(name: str) -> tuple[Row, dict[str, str]]:
        entry, source, location = by_name[name], by_name[name].source, by_name[name].location
        kind = None if location is None else location.kind
        row: Row = {
            "name": name,
            "summary": source.title,
            "is_present": location is not None,
            "kind": kind,
            "folder": None if location is None else str(location.folder),
            "problem": entry.problem or None,
            "download_nbytes": entry.nbytes,
            "licence": source.licence,
            "homepage": source.homepage,
            "how_to_get": source.remedy,
        }
        return row, {
            "data set": name,
            "here": "incomplete"
            if entry.problem
            else "no"
            if location is None
            else _format_location(location),
            "download": "?" if entry.nbytes is None else decimal(entry.nbytes),
            "what": source.title,
        }

    return by_name, describe


LISTINGS: dict[str, Callable[[], Listing]] = {
    "recipes": _build_recipe_rows,
    "codecs": _build_codec_rows,
    "workloads": _build_workload_rows,
    "networks": _build_network_rows,
    "devices": _build_device_rows,
    "data": _build_dataset_rows,
}
