"""Candidates of a plan: presets and changes to them that have won somewhere, with the optimizers they are made for."""

__all__ = ["CANDIDATES", "REFERENCE"]

REFERENCE = "synchronous(codec=truncate16)"
"""Recipe whose score at the end of a training is the target of a plan, less the tolerance."""
CANDIDATES = (
    REFERENCE,
    "synchronous",
    "synchronous(codec=int8)",
    "synchronous(codec=error_feedback(topk(density=0.01)))",
    "synchronous(codec=error_feedback(chunked_topk))",
    "synchronous(codec=error_feedback(sign(bucket_size=1024)))",
    "powersgd(rank=2)",
    "powersgd(rank=4)",
    "pipe_sgd",
    "dga",
    "local_sgd",
    "local_sgd(sync_every=32)",
    "diloco",
    "diloco(codec=error_feedback(qsgd(bits=4)))",
    "diloco(codec=error_feedback(sign(bucket_size=1024)))",
    "streaming_diloco",
    "sparse_loco",
    "demo(optimizer=sign_sgd, learning_rate=0.001)",
    "demo(optimizer=sign_sgd, learning_rate=0.0003)",
)
"""Recipes that a plan compares unless others are given."""
