"""What the processes of the pool share: they are forks of one that has imported this."""

import torch

import farflung  # noqa: F401

torch.optim.SGD([torch.zeros(1)])  # imports what torch leaves for the first optimizer
