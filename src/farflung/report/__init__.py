"""What a run amounts to, for people: one picture of its course, one table of its end."""

from farflung.report.pictures import run_picture
from farflung.report.summary import score_words, summary_table

__all__ = ["run_picture", "score_words", "summary_table"]
