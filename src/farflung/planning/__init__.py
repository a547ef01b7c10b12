"""Plans: the recipe that reaches a target first on a network, and in what time."""

from farflung.planning.planner import Plan, PlanRow, plan
from farflung.planning.timing import Pace, time_recipe

__all__ = ["Pace", "Plan", "PlanRow", "plan", "time_recipe"]
