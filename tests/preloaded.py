"""What the processes of the pool, and the commands of tests, share: they are forks of one that has imported this."""

import matplotlib.pyplot  # noqa: F401
import torch

import farflung.cli.main  # noqa: F401
import tests.coded_processes  # noqa: F401

torch.optim.SGD([torch.zeros(1)])  # imports what torch leaves for the first optimizer
