"""Network profiles from TOML.

.. code-block:: toml

    name = "office and field"          # optional; the file's name otherwise
    congestion = "bbr"                 # optional, or "cubic", "reno": of TCP, which then has to find its rate
    connections = 8                    # optional, or "auto": of each pair of nodes, for bulk

    [default]                          # optional: the link of every pair that nothing else is said about
    latency_s = 0.02
    bandwidth_bps = 50e6               # optional: no limit of its own

    [[site]]                           # nodes that are alike to the network; they are numbered in this order
    name = "office"
    nodes = 2                          # optional: as many as are left
    inside = { latency_s = 0.0005 }    # optional: the link between two of them
    up_bps = 100e6                     # optional: what one node can send, and receive
    down_bps = 100e6
    exit_bps = 50e6                    # optional: what all of them together can send to other sites, and receive
    entry_bps = 50e6

    [[site]]
    name = "field"
    nodes = 3
    medium = "cell"                    # optional: shared by all flows of its sites

    [[link]]                           # from each node of one site to each of another
    from = "office"
    to = "field"
    both_ways = true                   # optional: false
    latency_s = 0.045
    jitter_s = 0.01                    # optional: uniform, plus or minus
    bandwidth_bps = 20e6               # optional: no limit of its own
    loss = 0.001                       # optional: share of packets
    shared = true                      # optional: all pairs share the bandwidth; otherwise each has as much

    [[medium]]
    name = "cell"
    bandwidth_bps = "evening"          # any bandwidth may be the name of a trace
    relayed = true                     # optional: from node to node crosses it twice

    [[trace]]
    name = "evening"
    times_s = [0, 60, 120]             # or: file = "cell.csv", lines of seconds and bits per second
    bandwidth_bps = [20e6, 5e6, 10e6]
    end_s = 180
    after = "repeat"                   # or "hold"; without it a run longer than the trace ends with an error
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path

from farflung.files import naming, number_pairs, reading
from farflung.network.link import Capacity, Link, Trace
from farflung.network.profile import Connection, Medium, NetworkProfile, Site
from farflung.network.tcp import check_congestion, check_connections
from farflung.tables import Table, open_toml

__all__ = ["load_profile"]


def load_profile(path: Path) -> NetworkProfile:
    """Reads a profile; the format is at the top of this module.

    Raises:
      ConfigError: the file is absent or no TOML, or something in it is wrong; one line with file and key.
    """
    top = open_toml(path)
    name, congestion = top.text("name", path.stem), top.text("congestion") if "congestion" in top else None
    connections = top.number_or_text("connections", 1)
    traces = {one.text("name"): _trace(one, path.parent) for one in top.tables("trace")}
    default = top.table("default")
    sites = tuple(_site(one, traces) for one in top.tables("site"))
    ways = tuple(way for one in top.tables("link") for way in _connections(one, traces))
    media = tuple(_medium(one, traces) for one in top.tables("medium"))
    link = None if default is None else _link(default, traces)
    return top.make(
        lambda: NetworkProfile(
            name,
            sites,
            ways,
            media,
            link,
            source=str(path),
            congestion=check_congestion(name, congestion),
            tcp_connections=check_connections(name, connections),
        )
    )


def _site(table: Table, traces: Mapping[str, Trace]) -> Site:
    inside = table.table("inside")
    name, nodes = table.text("name"), table.whole("nodes")
    link = None if inside is None else _link(inside, traces)
    up, down, out, into = (
        _capacity(table, key, traces) for key in ("up_bps", "down_bps", "exit_bps", "entry_bps")
    )
    medium = table.text("medium") if "medium" in table else None
    return table.make(lambda: Site(name, nodes, link, up, down, out, into, medium))


def _connections(table: Table, traces: Mapping[str, Trace]) -> list[Connection]:
    src, dst = table.text("from"), table.text("to")
    table.where = f"{table.where.rpartition(':')[0]}: link from {src} to {dst}"
    shared, both_ways = table.flag("shared"), table.flag("both_ways")
    link = _link(table, traces)
    ways = [Connection(src, dst, link, shared)]
    return [*ways, Connection(dst, src, link, shared)] if both_ways else ways


def _medium(table: Table, traces: Mapping[str, Trace]) -> Medium:
    name, relayed = table.text("name"), table.flag("relayed")
    bandwidth = _capacity(table, "bandwidth_bps", traces, needed=True)
    return table.make(lambda: Medium(name, bandwidth, relayed))


def _link(table: Table, traces: Mapping[str, Trace]) -> Link:
    latency, bandwidth = table.number("latency_s"), _capacity(table, "bandwidth_bps", traces)
    jitter, loss = table.number("jitter_s", 0.0), table.number("loss", 0.0)
    return table.make(lambda: Link(latency, bandwidth, jitter, loss))


def _trace(table: Table, folder: Path) -> Trace:
    table.text("name")
    if "file" in table:
        times, values = _steps(table, folder / table.text("file"))
    else:
        times, values = table.numbers("times_s"), table.numbers("bandwidth_bps")
    end, after = table.number("end_s"), table.text("after", "error")
    # Its name is what a run that outlasts it will say, so it has the file in it.
    return table.make(lambda: Trace(times, values, end, after, table.where))  # type: ignore[arg-type]


def _steps(table: Table, path: Path) -> tuple[tuple[float, ...], tuple[float, ...]]:
    with naming(table.where), reading(path, "must hold lines of seconds,bits per second"):
        pairs = number_pairs(path)
        return tuple(begin for begin, _ in pairs), tuple(bps for _, bps in pairs)


def _capacity(table: Table, key: str, traces: Mapping[str, Trace], *, needed: bool = False) -> Capacity:
    value = table.number_or_text(key, None if needed else math.inf)
    if not isinstance(value, str):
        return value
    if value not in traces:
        raise table.error(key, value, "no trace has this name")
    return traces[value]
