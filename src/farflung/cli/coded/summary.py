"""How a coded run ended, for people."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.filesize import decimal

from farflung.report.summary import duration_words

__all__ = ["encoding_words", "summary_lines"]


def summary_lines(summary: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Names and figures of a summary."""
    how = "converged" if summary["converged"] else "stopped" if summary["interrupted"] else "not converged"
    partitions, classes = summary["partitions"], summary["classes"]
    lines = [
        ("objective", f"{summary['objective']:.10g}"),
        ("gap", f"{summary['gap']:.1e}"),
        ("iterates", f"{summary['iterations']:,}, {how}"),
        ("trained on", f"{summary['samples']:,} samples of {summary['features']:,} features"),
        ("partitions", f"{len(partitions)}: {', '.join(partitions)}"),
        ("classes", f"{len(classes)}"),
        ("devices", f"{summary['devices_came']} came, {summary['devices_gone']} went"),
        ("fallen silent", f"{summary['silences']} times"),
        ("encoding", encoding_words(summary)),
        ("coordinator sent", decimal(sum(summary["bytes_sent"].values()))),
        ("duration", duration_words(summary["duration_s"])),
    ]
    if summary["test_accuracy"] is not None:
        lines.insert(2, ("test accuracy", f"{100 * summary['test_accuracy']:.2f} %"))
    return lines


def encoding_words(summary: Mapping[str, Any]) -> str:
    """What devices gave each other for blocks, and what they would have with an MDS code."""
    rows, columns = (summary["encoding_nbytes"][kind] for kind in ("rows", "columns"))
    under_mds = summary["mds_encoding_nbytes"] - columns
    compared = f" ({100 * rows / under_mds:.0f} % of an MDS code's {decimal(under_mds)})" if under_mds else ""
    return f"rows {decimal(rows)}{compared}, columns {decimal(columns)}"
