"""Tables, pictures and HTML pages about runs, and comparisons of runs."""

from typing import TYPE_CHECKING

from farflung.lazy import lazy

if TYPE_CHECKING:
    from farflung.report.comparison import (
        Compared,
        Course,
        compare_courses,
        comparison_picture,
        comparison_table,
    )
    from farflung.report.page import ReportedRun, report_data, report_page
    from farflung.report.partition import partition_table
    from farflung.report.tables import PLAIN_WIDTH, as_lines, as_text, score_words, summary_table, text_width
    from farflung.report.trace import chrome_trace
    from farflung.report.traffic import SentByKind, sent_by_kind, traffic_table
else:
    __getattr__, __dir__ = lazy(
        __name__,
        {
            "comparison": "Compared Course compare_courses comparison_picture comparison_table",
            "page": "ReportedRun report_data report_page",
            "partition": "partition_table",
            "tables": "PLAIN_WIDTH as_lines as_text score_words summary_table text_width",
            "trace": "chrome_trace",
            "traffic": "SentByKind sent_by_kind traffic_table",
        },
    )

__all__ = [
    "PLAIN_WIDTH",
    "Compared",
    "Course",
    "ReportedRun",
    "SentByKind",
    "as_lines",
    "as_text",
    "chrome_trace",
    "compare_courses",
    "comparison_picture",
    "comparison_table",
    "partition_table",
    "report_data",
    "report_page",
    "score_words",
    "sent_by_kind",
    "summary_table",
    "text_width",
    "traffic_table",
]
