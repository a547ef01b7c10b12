"""What the processes of the pool, and the commands of tests, share: they are forks of one that has imported this."""

from importlib import import_module

import matplotlib.backends.backend_agg
import matplotlib.pyplot  # noqa: F401
import torch
import tyro.extras  # noqa: F401

import farflung.runs.workers  # noqa: F401
import tests.coded_processes
import tests.unsynced  # noqa: F401
from farflung.cli.main import COMMANDS

for name in (
    "farflung",
    "farflung.comm",
    "farflung.data",
    "farflung.network",
    "farflung.report",
    "farflung.runs",
):
    package = import_module(name)
    for each in package.__all__:
        getattr(package, each)  # which is imported only then
for module, _ in COMMANDS.values():
    import_module(module)

torch.optim.SGD([torch.zeros(1)])  # imports what torch leaves for the first optimizer
