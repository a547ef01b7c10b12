"""GradiVeQ: slices of convolutions on the principal components of what was summed before, added encoded."""

from farflung.reducers.gradiveq.reducer import GradiVeQ

__all__ = ["GradiVeQ"]
