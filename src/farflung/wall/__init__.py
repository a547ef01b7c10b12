"""Wall clock: a replica in a process of its own, real connections, and the launcher's environment."""

from typing import TYPE_CHECKING

from farflung.lazy import lazy

if TYPE_CHECKING:
    from farflung.wall.launch_env import LaunchEnv, interface_to_master
    from farflung.wall.measuring import measured_network
    from farflung.wall.pace import Pace
    from farflung.wall.runtime import WallRuntime
else:
    __getattr__, __dir__ = lazy(
        __name__,
        {
            "launch_env": "LaunchEnv interface_to_master",
            "measuring": "measured_network",
            "pace": "Pace",
            "runtime": "WallRuntime",
        },
    )

__all__ = ["LaunchEnv", "Pace", "WallRuntime", "interface_to_master", "measured_network"]
