"""One replica: gradient buckets, the exchanges that carry them, the training loop, checkpoints."""

from farflung.replica.buckets import GradientBuckets
from farflung.replica.checkpoint import Checkpoints, check_model, fingerprint, load_tree, save_tree
from farflung.replica.evaluation import Score, evaluate
from farflung.replica.exchanges import Exchanges, Settled, Vote
from farflung.replica.loop import Parts, Replica, Summary, TimeSplit

__all__ = [
    "Checkpoints",
    "Exchanges",
    "GradientBuckets",
    "Parts",
    "Replica",
    "Score",
    "Settled",
    "Summary",
    "TimeSplit",
    "Vote",
    "check_model",
    "evaluate",
    "fingerprint",
    "load_tree",
    "save_tree",
]
