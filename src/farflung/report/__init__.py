"""Tables, pictures and HTML pages about runs, and comparisons of runs."""

from typing import TYPE_CHECKING

from farflung.lazy import build_lazy_attributes

if TYPE_CHECKING:
    from farflung.report.comparison import (
        ComparisonRow,
        RunHistory,
        compare_runs,
        draw_comparison,
        render_comparison_table,
    )
    from farflung.report.page import (
        ReportedRun,
        build_report_data,
        render_report_page,
        shorten_names,
    )
    from farflung.report.partition import render_partition_table
    from farflung.report.tables import (
        PLAIN_WIDTH,
        format_score,
        get_output_width,
        render_lines,
        render_summary_table,
        render_text,
    )
    from farflung.report.trace import build_chrome_trace
    from farflung.report.traffic import TrafficByKind, read_traffic, render_traffic_table, select_finished
else:
    __getattr__, __dir__ = build_lazy_attributes(
        __name__,
        {
            "comparison": "ComparisonRow RunHistory compare_runs draw_comparison render_comparison_table",
            "page": "ReportedRun build_report_data render_report_page shorten_names",
            "partition": "render_partition_table",
            "tables": "PLAIN_WIDTH render_lines render_text format_score render_summary_table get_output_width",
            "trace": "build_chrome_trace",
            "traffic": "TrafficByKind read_traffic render_traffic_table select_finished",
        },
    )

__all__ = [
    "PLAIN_WIDTH",
    "ComparisonRow",
    "ReportedRun",
    "RunHistory",
    "TrafficByKind",
    "build_chrome_trace",
    "build_report_data",
    "compare_runs",
    "draw_comparison",
    "format_score",
    "get_output_width",
    "read_traffic",
    "render_comparison_table",
    "render_lines",
    "render_partition_table",
    "render_report_page",
    "render_summary_table",
    "render_text",
    "render_traffic_table",
    "select_finished",
    "shorten_names",
]
