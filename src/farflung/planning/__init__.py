"""Plans: the recipe that reaches a target first on a network, and in what time."""

from farflung.planning.auto import AUTO_RECIPE, choose_recipe
from farflung.planning.choice import PlanRow
from farflung.planning.planner import plan, plan_script
from farflung.planning.result import Plan
from farflung.planning.timing import Pace, time_recipe
from farflung.planning.watch import PlanWatch

__all__ = [
    "AUTO_RECIPE",
    "Pace",
    "Plan",
    "PlanRow",
    "PlanWatch",
    "choose_recipe",
    "plan",
    "plan_script",
    "time_recipe",
]
