"""Trains one PyTorch model on many devices that are far apart."""

from typing import TYPE_CHECKING

from farflung.lazy import build_lazy_attributes as _lazy

if TYPE_CHECKING:
    from farflung.comm import Endpoint
    from farflung.ddp import ddp_hook
    from farflung.handle import Handle, attach
    from farflung.importance import ImportanceSampler
    from farflung.planning import Plan, plan
    from farflung.recipes import RECIPES, Recipe, parse_recipe
    from farflung.runs import Comparison, Run, compare, retime, simulate, train
    from farflung.workloads import TorchWorkload
else:
    __getattr__, __dir__ = _lazy(
        __name__,
        {
            "comm": "Endpoint",
            "ddp": "ddp_hook",
            "handle": "Handle attach",
            "importance": "ImportanceSampler",
            "planning": "Plan plan",
            "recipes": "RECIPES Recipe parse_recipe",
            "runs": "Comparison Run compare retime simulate train",
            "workloads": "TorchWorkload",
        },
    )

__version__ = "0.2.0"

__all__ = [
    "RECIPES",
    "Comparison",
    "Endpoint",
    "Handle",
    "ImportanceSampler",
    "Plan",
    "Recipe",
    "Run",
    "TorchWorkload",
    "__version__",
    "attach",
    "compare",
    "ddp_hook",
    "parse_recipe",
    "plan",
    "retime",
    "simulate",
    "train",
]
