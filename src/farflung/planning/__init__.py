"""Plans: the recipe that reaches a target first on a network, and in what time."""

from farflung.planning.planner import Plan, PlanRow, plan, plan_script
from farflung.planning.timing import Pace, time_recipe

__all__ = ["Pace", "Plan", "PlanRow", "plan", "plan_script", "time_recipe"]
