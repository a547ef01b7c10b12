"""``farflung keys``: makes the key pair of one machine."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import tyro

from farflung.comm.keys import make_keys

__all__ = ["MakeKeys"]


@dataclass(frozen=True)
class MakeKeys:
    """Make this machine's keys for training with other machines.

    Writes FOLDER/NAME.secret, which never leaves this machine and must stay readable by its owner alone (mode 600),
    and FOLDER/NAME.public. Copy NAME.public into the folder of every other machine, and theirs into this one: a run
    started with --keys FOLDER accepts only the owners of the keys there. No file is ever overwritten; to
    change a machine's keys, or to exclude a machine, remove its files. Both files are PEM.
    """

    folder: tyro.conf.Positional[Path]
    """Folder of the keys; created for its owner alone (mode 700), when it does not exist."""
    name: str
    """Name of this machine."""

    def run(self) -> int:
        file, public = make_keys(self.folder, self.name)
        print(f"key         {public}")
        print(f"copy        {file}  to the folder of keys of every other machine, and theirs here")
        print("train       torchrun ... -m farflung train --keys", self.folder, "...")
        return 0
