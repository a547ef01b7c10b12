"""GradiVeQ: slices of convolutions as coefficients of principal components, summed without decoding."""

from farflung.reducers.gradiveq.reducer import GradiVeQ

__all__ = ["GradiVeQ"]
