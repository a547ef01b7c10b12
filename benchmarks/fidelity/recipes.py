"""Which recipes run on which network."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

__all__ = ["CODED", "DENSE", "PERIODIC", "PERIODS", "RECIPES", "UNPACED", "dealt"]

DENSE = "direct"
"""What every network has."""
RECIPES: dict[str, dict[str, str]] = {
    DENSE: {"recipe": "synchronous", "collective": "direct"},
    "ring": {"recipe": "ring"},
    "ring, truncate16": {"recipe": "ring", "codec": "truncate16"},
    "direct, topk": {"recipe": "synchronous", "collective": "direct", "codec": "topk(density=0.1)"},
    "direct, int8": {"recipe": "synchronous", "collective": "direct", "codec": "int8"},
    "direct, qsgd": {"recipe": "synchronous", "collective": "direct", "codec": "qsgd(bits=4)"},
    "powersgd": {"recipe": "powersgd", "collective": "direct"},
    "pipe_sgd": {"recipe": "pipe_sgd"},
    "delayed": {"recipe": "synchronous", "collective": "direct", "schedule": "delayed(delay=4)"},
}
PERIODS = (1, 8, 32, 128)
PERIODIC: dict[str, dict[str, str]] = {
    f"every {period}": {
        "recipe": "local_sgd",
        "collective": "direct",
        "schedule": f"local_sgd(sync_every={period})",
    }
    for period in PERIODS
}
"""By steps between two exchanges."""
CODED = ("direct, int8", "direct, qsgd", "direct, topk", "powersgd")
"""Those whose coding is charged to unpaced devices."""
UNPACED = (DENSE, *CODED)
EACH = 3
"""Besides the dense one, on each network."""


def dealt(networks: Sequence[str], seed: int) -> dict[str, list[str]]:
    """Of each network its recipes: the dense one and three others, all of which come equally often, or once more.

    Args:
      networks: by name.
      seed: which recipe meets which network.
    """
    random = Random(f"recipes {seed}")
    uses = dict.fromkeys((name for name in RECIPES if name != DENSE), 0)
    found: dict[str, list[str]] = {}
    for network in networks:
        rarest = sorted(uses, key=lambda name: (uses[name], random.random()))[:EACH]
        for name in rarest:
            uses[name] += 1
        found[network] = [name for name in RECIPES if name == DENSE or name in rarest]
    return found
