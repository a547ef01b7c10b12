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

from pathlib import Path

from farflung.files import naming, number_pairs, reading
from farflung.network.link import Capacity, Link, Trace
from farflung.network.profile import Connection, Medium, NetworkProfile, Site
from farflung.tables import Readers, Table, open_toml

__all__ = ["load_profile"]


def load_profile(path: Path) -> NetworkProfile:
    """Loads a profile from TOML, in the format at the top of this module.

    Raises:
      ConfigError: the file is absent, is not TOML, or has an invalid value; one line with file and key.
    """
    top = open_toml(path)
    traces = {entry.text("name"): _read_trace(entry, path.parent) for entry in top.tables("trace")}

    def read_capacity(table: Table, key: str) -> Capacity:
        value = table.number_or_text(key)
        if not isinstance(value, str):
            return value
        if value not in traces:
            raise table.error(key, value, "no trace has this name")
        return traces[value]

    def read_link(table: Table) -> Link:
        return table.build(Link, readers, latency_s=table.number("latency_s"))

    def read_connections(table: Table) -> list[Connection]:
        src, dst = table.text("from"), table.text("to")
        table.where = f"{table.where.rpartition(':')[0]}: link from {src} to {dst}"
        shared, has_reverse, link = table.flag("shared"), table.flag("both_ways"), read_link(table)
        ways = ((src, dst), (dst, src)) if has_reverse else ((src, dst),)
        return [Connection(*ends, link, shared) for ends in ways]

    readers: Readers = {
        "Capacity": read_capacity,
        "CongestionControl": Table.text,
        "Link": lambda table, key: read_link(table.table(key)),
    }
    return top.build(
        NetworkProfile,
        readers,
        name=top.text("name", path.stem),
        sites=tuple(entry.build(Site, readers) for entry in top.tables("site")),
        connections=tuple(site_link for entry in top.tables("link") for site_link in read_connections(entry)),
        media=tuple(entry.build(Medium, readers) for entry in top.tables("medium")),
        source=str(path),
        tcp_connections=top.number_or_text("connections", 1),
    )


def _read_trace(table: Table, folder: Path) -> Trace:
    table.text("name")
    steps = {}
    if "file" in table:
        path = folder / table.text("file")
        with naming(table.where), reading(path, "must hold lines of seconds,bits per second"):
            pairs = number_pairs(path)
            steps["times_s"], steps["bandwidth_bps"] = (tuple(column) for column in zip(*pairs, strict=True))
    # The name contains the file, for the error of a run that outlasts the trace.
    return table.build(Trace, {"After": Table.text}, name=table.where, **steps)
