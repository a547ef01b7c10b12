"""Network profiles from TOML; the documentation's page on networks lists all keys.

.. code-block:: toml

    name = "office and field"
    congestion = "bbr"

    [default]
    latency_s = 0.02

    [[site]]
    name = "office"
    nodes = 2
    up_bps = 100e6

    [[site]]
    name = "field"
    nodes = 3

    [[link]]
    from = "office"
    to = "field"
    latency_s = 0.045
    bandwidth_bps = 20e6
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path

from farflung.files import (
    format_toml_comment,
    format_toml_text,
    prefix_errors,
    read_number_pairs,
    wrap_read_errors,
)
from farflung.network.link import BandwidthTrace, Capacity, Link
from farflung.network.profile import Medium, NetworkProfile, Site, SiteLink
from farflung.tables import Readers, Table, load_table

__all__ = ["format_profile", "load_profile"]


def load_profile(path: Path) -> NetworkProfile:
    """Loads a profile from TOML, in the format at the top of this module.

    Raises:
      ConfigError: the file is absent, is not TOML, or has an invalid value; one line with file and key.
    """
    top = load_table(path)
    traces = {entry.read_text("name"): _read_trace(entry, path.parent) for entry in top.read_tables("trace")}

    def read_capacity(table: Table, key: str) -> Capacity:
        value = table.read_number_or_text(key)
        if not isinstance(value, str):
            return value
        if value not in traces:
            raise table.build_error(key, value, "no trace has this name")
        return traces[value]

    def read_link(table: Table) -> Link:
        return table.build(Link, readers, latency_s=table.read_number("latency_s"))

    def read_connections(table: Table) -> list[SiteLink]:
        src, dst = table.read_text("from"), table.read_text("to")
        table.location = f"{table.location.rpartition(':')[0]}: link from {src} to {dst}"
        shared, has_reverse, link = table.read_flag("shared"), table.read_flag("both_ways"), read_link(table)
        ways = ((src, dst), (dst, src)) if has_reverse else ((src, dst),)
        return [SiteLink(*ends, link, shared) for ends in ways]

    readers: Readers = {
        "Capacity": read_capacity,
        "CongestionControl": Table.read_text,
        "Link": lambda table, key: read_link(table.read_table(key)),
    }
    return top.build(
        NetworkProfile,
        readers,
        name=top.read_text("name", path.stem),
        sites=tuple(entry.build(Site, readers) for entry in top.read_tables("site")),
        site_links=tuple(
            site_link for entry in top.read_tables("link") for site_link in read_connections(entry)
        ),
        media=tuple(entry.build(Medium, readers) for entry in top.read_tables("medium")),
        source=str(path),
        tcp_connections=top.read_number_or_text("connections", 1),
    )


def format_profile(profile: NetworkProfile, comments: Sequence[str] = ()) -> str:
    """Formats a measured profile as TOML for :func:`load_profile`, with four digits of each figure.

    Args:
      profile: Profile whose capacities are constant.
      comments: Lines of comments at the top.
    """
    lines = [*map(format_toml_comment, comments), f"name = {format_toml_text(profile.name)}"]
    for medium in profile.media:
        lines += ["", "[[medium]]", *_format_entries(medium, ("name", "bandwidth_bps", "relayed"))]
    for site in profile.sites:
        lines += ["", "[[site]]", *_format_entries(site, ("name", "nodes", "up_bps", "down_bps", "medium"))]
    for site_link in profile.site_links:
        ends = {"from": site_link.src, "to": site_link.dst}
        lines += ["", "[[link]]", *(f"{key} = {format_toml_text(name)}" for key, name in ends.items())]
        lines += _format_entries(site_link.link, ("latency_s", "bandwidth_bps"))
    return "\n".join(lines) + "\n"


def _format_entries(part: object, keys: Sequence[str]) -> list[str]:
    """Formats the fields of a part that are set; infinite capacities are the default."""
    lines = []
    for key in keys:
        value = getattr(part, key)
        if value is None or value is False or value == math.inf:
            continue
        if isinstance(value, float):
            value = float(f"{value:.4g}")
        text = format_toml_text(value) if isinstance(value, str) else json.dumps(value)
        lines.append(f"{key} = {text}")
    return lines


def _read_trace(table: Table, folder: Path) -> BandwidthTrace:
    table.read_text("name")
    steps = {}
    if "file" in table:
        path = folder / table.read_text("file")
        with (
            prefix_errors(table.location),
            wrap_read_errors(path, "must hold lines of seconds,bits per second"),
        ):
            pairs = read_number_pairs(path)
            steps["times_s"], steps["bandwidth_bps"] = (tuple(column) for column in zip(*pairs, strict=True))
    # The name contains the file, for the error of a run that outlasts the trace.
    return table.build(BandwidthTrace, {"After": Table.read_text}, name=table.location, **steps)
