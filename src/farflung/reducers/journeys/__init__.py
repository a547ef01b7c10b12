"""How one tensor is summed over the replicas: dense, encoded once, on hops, or in two phases."""

from farflung.reducers.journeys.gathered import Gathered
from farflung.reducers.journeys.hops import Hops
from farflung.reducers.journeys.journey import Exchange, Journey, Parcel, check_cut
from farflung.reducers.journeys.linear import Linear
from farflung.reducers.journeys.summed import Summed
from farflung.reducers.journeys.two_phases import TwoPhases

__all__ = ["Exchange", "Gathered", "Hops", "Journey", "Linear", "Parcel", "Summed", "TwoPhases", "check_cut"]
