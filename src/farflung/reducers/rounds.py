"""What reducers of several rounds need of a collective."""

from __future__ import annotations

from farflung.comm import collective_named
from farflung.errors import Unsupported

__all__ = ["check_rounds"]


def check_rounds(name: str, collective: str) -> None:
    """Whether ``collective`` can carry one round of a bucket while another bucket is in another round.

    Raises:
      UnknownName: no such collective.
      Unsupported: it matches sums by their order, which the rounds of several buckets do not share between ranks.
    """
    if collective_named(collective).by_backend:
        raise Unsupported(
            f"collective {collective!r} matches sums by their order, which the rounds of {name} do not have: "
            "use ring or direct"
        )
