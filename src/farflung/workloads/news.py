"""Which group or section a text belongs to."""

from __future__ import annotations

from functools import partial

from farflung.data import ag_news, newsgroups
from farflung.types import Workload
from farflung.workloads._classification import Classification, settings
from farflung.workloads._recurrent import TextClassifier

__all__ = ["ag_news_lstm", "newsgroups_lstm"]

_SIZE = 10_000


def newsgroups_lstm() -> Workload:
    """20 Newsgroups with an LSTM."""
    return Classification(
        name="newsgroups/lstm",
        network=partial(TextClassifier, _SIZE, 64, 64, 20),
        load=partial(newsgroups.load, length=96, size=_SIZE),
        defaults=settings(batch_size=32, learning_rate=0.5, momentum=0.9, steps=1500),
    )


def ag_news_lstm() -> Workload:
    """AG News with an LSTM."""
    return Classification(
        name="ag-news/lstm",
        network=partial(TextClassifier, _SIZE, 64, 64, 4),
        load=partial(ag_news.load, length=48, size=_SIZE),
        defaults=settings(batch_size=32, learning_rate=0.5, momentum=0.9, steps=600),
    )
