"""One worker process that a run has been given through torchrun: reports to whoever started it, and trains."""

from __future__ import annotations

import os
import sys
import traceback
from pathlib import Path

from farflung.errors import FarflungError, RunLost
from farflung.runs.config import RunConfig
from farflung.runs.events import EVENTS, teller
from farflung.runs.folder import RunFolder
from farflung.runs.joining import DEVICE, MODEL, NETWORK, PACE, join
from farflung.runs.preparing import Prepared
from farflung.telemetry import Event

__all__ = ["main"]


def main() -> int:
    """Trains in a folder that the starting process has made; tells it of every event and of any error."""
    files = RunFolder(Path(sys.argv[1]), resumed=sys.argv[2:] == ["resume"])
    tell = teller(os.environ[EVENTS])
    rank = int(os.environ["RANK"])
    try:
        config = RunConfig.resolve(files.stored_config())
        names = (DEVICE, PACE, NETWORK, MODEL)
        device, pace, network, model = (os.environ.get(name, "") for name in names)
        join(Prepared(config, files), tell, device=device, pace=pace, network=network, model=model)
    except FarflungError as error:
        tell(_error_event(rank, error, str(error), error.exit_code))
        print(f"rank {rank}: {error}", file=sys.stderr)
        return error.exit_code
    except Exception as error:
        traceback.print_exc()
        what = f"rank {rank} failed: {type(error).__name__}: {error} (see {files.log})"
        tell(_error_event(rank, error, what, 1))
        return 1
    return 0


def _error_event(rank: int, error: BaseException, message: str, exit_code: int) -> Event:
    own = not isinstance(error, RunLost) or getattr(error, "step", None) is not None
    return {"event": "error", "rank": rank, "message": message, "exit_code": exit_code, "own": own}


if __name__ == "__main__":
    sys.exit(main())
