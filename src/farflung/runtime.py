"""Names of 0.1, which are in ``farflung.wall``, ``farflung.sim`` and ``farflung.decisions`` now; until 0.3."""

from farflung.lazy import lazy

__getattr__, __dir__ = lazy(
    __name__,
    moved={
        "DecisionLog": "farflung.decisions.DecisionLog",
        "FleetTimes": "farflung.sim.FleetTimes",
        "Pace": "farflung.wall.Pace",
        "Seat": "farflung.wall.LaunchEnv",
        "VirtualClock": "farflung.sim.VirtualClock",
        "VirtualRuntime": "farflung.sim.VirtualRuntime",
        "VirtualWorld": "farflung.sim.VirtualWorld",
        "WallRuntime": "farflung.wall.WallRuntime",
        "decision_json": "farflung.decisions.decision_json",
        "interface_to_master": "farflung.wall.interface_to_master",
        "measured_network": "farflung.wall.measured_network",
        "read_decisions": "farflung.decisions.read_decisions",
        "time_fleet": "farflung.sim.time_fleet",
    },
)
