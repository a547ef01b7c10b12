"""What a run amounts to, for people: a picture of its course, a table of its end, and how its data was split."""

from farflung.report.buffers import buffers_picture
from farflung.report.comparison import Compared, Course, compare_courses, comparison_picture, comparison_table
from farflung.report.gantt import gantt_picture
from farflung.report.partition import partition_picture, partition_table
from farflung.report.pictures import run_picture
from farflung.report.sampling import sampling_picture
from farflung.report.summary import score_words, summary_table
from farflung.report.tensorboard import TensorBoard
from farflung.report.text import PLAIN_WIDTH, as_text

__all__ = [
    "PLAIN_WIDTH",
    "Compared",
    "Course",
    "TensorBoard",
    "as_text",
    "buffers_picture",
    "compare_courses",
    "comparison_picture",
    "comparison_table",
    "gantt_picture",
    "partition_picture",
    "partition_table",
    "run_picture",
    "sampling_picture",
    "score_words",
    "summary_table",
]
