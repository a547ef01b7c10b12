"""Wall clock: a replica in a process of its own, real connections, and the launcher's environment."""

from typing import TYPE_CHECKING

from farflung.lazy import build_lazy_attributes

if TYPE_CHECKING:
    from farflung.wall.launch_env import LaunchEnv, find_group_address
    from farflung.wall.measuring import measure_network
    from farflung.wall.pace import Pace
    from farflung.wall.runtime import WallRuntime
else:
    __getattr__, __dir__ = build_lazy_attributes(
        __name__,
        {
            "launch_env": "LaunchEnv find_group_address",
            "measuring": "measure_network",
            "pace": "Pace",
            "runtime": "WallRuntime",
        },
    )

__all__ = ["LaunchEnv", "Pace", "WallRuntime", "find_group_address", "measure_network"]
