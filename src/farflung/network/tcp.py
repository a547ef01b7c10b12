"""How one TCP connection finds its rate, as a pure calculation that is told the time."""

from __future__ import annotations

import math
from typing import Literal, TypeAlias

__all__ = [
    "AUTO",
    "SEGMENT_NBYTES",
    "CongestionControl",
    "Connections",
    "Tcp",
    "connections_for",
    "repaired_s",
    "window_share_bps",
]

CongestionControl: TypeAlias = Literal["bbr", "cubic", "reno"]
"""By the names that Linux gives them."""
Connections: TypeAlias = int | Literal["auto"]
"""How many join each pair of nodes, for bulk; ``"auto"``: as :func:`connections_for` has it."""
AUTO: Literal["auto"] = "auto"
MOST_CONNECTIONS = 16
"""That are chosen for a pair; each costs both ends a descriptor."""

SEGMENT_NBYTES = 1448
"""Payload of one TCP segment on Ethernet: 1500 bytes less IP and TCP headers and the timestamp option."""
SEGMENT_BITS = 8.0 * SEGMENT_NBYTES
FIRST_WINDOW_BITS = 10 * SEGMENT_BITS
"""What a connection sends before anything was acknowledged (RFC 6928)."""
LARGEST_WINDOW_BITS = 8.0 * (4 << 20)
"""The largest send buffer that Linux gives a connection unasked (the third of net.ipv4.tcp_wmem, by the kernel's
documentation of ip-sysctl), so no more of one is ever on its way."""
LEAST_SPREAD_S, SPREAD_KEPT = 0.2, 0.86
"""By how much a timeout for retransmission is longer than a round trip: at least this, as Linux has it, and at first by
two round trips (RFC 6298), of which each leaves this share, which is fitted."""
MOST_HALVINGS = 32
"""Of which any window is over."""
STARTUP_GAIN = 2.0 / math.log(2.0)
"""At which BBR paces, times its estimate, as long as it has not seen the way full: 2.885."""
BURST_BITS = 2 * SEGMENT_BITS
"""What a paced sender hands over at once; Linux paces none of the first ten segments of a connection."""
BBR_BEARS = 0.2
"""Share of lost packets from which on probing at 1.25 times the estimate cannot hold it: 1.25 (1 - p) < 1."""


def window_share_bps(control: CongestionControl | None, loss: float, round_trip_s: float) -> float:
    r"""What the average window of one connection carries where packets are lost at random, in bits per second.

    .. math:: \frac{8 \cdot 1448}{R}\, w, \qquad
        w_\text{reno} = \sqrt{1.5 / p}, \quad
        w_\text{cubic} = \max\big( 1.054\,(R/p)^{3/4},\ w_\text{reno} \big)

    with loss :math:`p` and round trip :math:`R`. BBR takes no notice of loss as long as its probing makes up for it, up
    to a fifth of all packets; from there on it counts as Reno, which is our choice.

    Args:
      control: ``None`` counts as CUBIC.
      loss: share of packets that are lost.
      round_trip_s: in seconds.

    References: Mathis et al. 1997 (Reno); RFC 9438 Eq. 5 with C = 0.4 (CUBIC); Cardwell et al., BBR, 2016 (Fig. 8).
    """
    if loss == 0.0 or round_trip_s == 0.0 or (control == "bbr" and loss < BBR_BEARS):
        return math.inf
    window = math.sqrt(1.5 / loss)
    if control in ("cubic", None):
        window = max(1.054 * (round_trip_s / loss) ** 0.75, window)
    return SEGMENT_BITS * window / round_trip_s


def connections_for(
    rate_bps: float, round_trip_s: float, loss: float, control: CongestionControl | None = None
) -> int:
    r"""How many connections fill the way between two nodes, :data:`MOST_CONNECTIONS` at most.

    .. math:: \Big\lceil \frac{(1-p)\,b}{\min(s(p, R),\ 8 \cdot 2^{22} / R)} \Big\rceil

    with :math:`s` as :func:`window_share_bps` has it, and Linux's largest send buffer.

    Args:
      rate_bps: b, bits per second; may be infinite.
      round_trip_s: R, in seconds.
      loss: p, share of packets that are lost.
      control: the congestion control in force; ``None`` counts as CUBIC.
    """
    if round_trip_s == 0.0:
        return 1
    one_bps = min(window_share_bps(control, loss, round_trip_s), LARGEST_WINDOW_BITS / round_trip_s)
    return max(1, math.ceil(min((1 - loss) * rate_bps / one_bps, MOST_CONNECTIONS)))


def repaired_s(
    nbits: float, took_s: float, round_trip_s: float, loss: float, drawn: tuple[float, float], *, last: bool
) -> float:
    r"""By how much a lost packet holds up the end of a message, where packets are lost at random.

    A receiver gets nothing that is behind a lost packet before that has come again, a round trip :math:`R` later. The
    rest of the message fills that time, so the packet lost closest to its end counts: with :math:`j` packets behind it,
    which is a geometric number, :math:`\tau` apart, and lost :math:`k` times more, it comes

    .. math:: \max(0,\ (1 + k) R - j\, \tau)

    behind the end. Nothing tells of the loss of a message's very last packet if nothing follows it: it is sent again
    after two round trips of silence (tail loss probe).

    Args:
      nbits: of the message.
      took_s: from its first bit's leaving to its last one's.
      round_trip_s: R, in seconds.
      loss: share of packets that are lost.
      drawn: two uniform numbers in [0, 1), for j and k.
      last: whether nothing follows the message.

    References: RFC 8985 (RACK-TLP), Sec. 7; that losses before the last one are repaired in time is our choice.
    """
    if loss == 0.0 or nbits == 0.0:
        return 0.0
    behind, more = (
        int(math.log1p(-one) / math.log(odds)) for one, odds in zip(drawn, (1 - loss, loss), strict=True)
    )
    packets = math.ceil(nbits / SEGMENT_BITS)
    if behind >= packets:
        return 0.0
    waited_s = (1 + more + (last and behind == 0)) * round_trip_s
    return max(0.0, waited_s - behind * took_s / packets)


class Tcp:
    r"""One connection in one direction: how much of a message may leave when.

    Bits leave in flights of at most one window :math:`W`. The next flight begins when the first acknowledgement of this
    one is there, a round trip :math:`R` after it began. What was acknowledged is added to a window more than half of
    which was used, so it doubles from ten segments on (slow start). A flight that takes a whole round trip has filled
    the way: the rest follows without a pause, until the connection rests.

    CUBIC and Reno halve the window of a connection that rests, once for each timeout for retransmission, down to the
    first one. BBR keeps what it knows, but paces: :math:`n` bytes take at least :math:`d = 8 n / (g E)` with
    :math:`g = 2 / \ln 2` and the largest estimate :math:`E` of the bandwidth so far. A message that is over before it
    is acknowledged counts as

    .. math:: E = \frac{8 n}{R + d}, \quad\text{in regular use}\quad
        E = \Big(1 - \frac{1}{g}\Big) \frac{8 n}{R} = 0.653\, \frac{8 n}{R},

    so it takes :math:`0.53\, R` to leave, however wide the way.

    Not modelled: losses by full queues and congestion avoidance after them, the receiver's window, which grows beside
    the sender's, BBR's pauses every ten seconds, delayed acknowledgements. What RFCs leave open is as Linux has it, and
    held against it in ``benchmarks/fidelity``.

    Args:
      control: which one.
      round_trip_s: both delays, in seconds.

    References: RFC 5681 Sec. 3.1 and 4.1 (slow start, restart after idling); RFC 6928 (ten segments); RFC 2861 and 7661
    (a window is halved for each timeout, and one that is not used does not grow); the drafts
    cardwell-iccrg-bbr-congestion-control and cheng-iccrg-delivery-rate-estimation (BBR). Flights as Cardwell, Savage
    and Anderson 2000 have them.
    """

    __slots__ = (
        "_before", "_began_s", "_estimate_bps", "_flight", "_pace_bps", "_paced", "_round_s",
        "_round_trip_s", "_sent_s", "_spread_s", "_unpaced", "_used", "_window", "filled", "free_s",
    )  # fmt: skip

    def __init__(self, control: CongestionControl, round_trip_s: float) -> None:
        self._paced, self._round_trip_s = control == "bbr", round_trip_s
        self.free_s = -math.inf
        """When more may set out."""
        self._window = FIRST_WINDOW_BITS
        self._unpaced = FIRST_WINDOW_BITS
        """What a paced sender may still hand over at once."""
        self._round_s = -math.inf
        """When the round under way began."""
        self._began_s, self._sent_s = -math.inf, -math.inf
        """When the last flight set out, and when it had left."""
        self._flight = 0.0
        """Bits of the last flight."""
        self._used, self._before = 0.0, 0.0
        """Bits of the round under way, and of the one before, unless the connection has rested since."""
        self.filled = False
        """Acknowledgements come as fast as bits leave, so a flight is not in the network's hands at once."""
        self._spread_s = 2 * round_trip_s
        """By how much a timeout for retransmission is longer than a round trip."""
        self._estimate_bps = FIRST_WINDOW_BITS / round_trip_s if round_trip_s else math.inf
        self._pace_bps = STARTUP_GAIN * self._estimate_bps

    def flight(self, now: float, bits: float) -> float:
        """How many of ``bits`` that are to leave set out now, at :attr:`free_s` or later."""
        if now >= self._round_s + self._round_trip_s:
            if self._used:
                self._hear(now)
            self._round_s, self._used = now, 0.0
        self._began_s = now
        self._flight = bits if self.filled else min(bits, self._window - self._used)
        return self._flight

    def hold_back(self, bits: float) -> None:
        """So many bits of the flight under way do not set out yet."""
        self._flight -= bits

    def passed(self, now: float) -> float:
        """The network has taken the last bit of the flight: when it has left, since a paced sender takes its time."""
        self._used += self._flight
        self._sent_s = now
        if self._paced:
            paced = self._flight - max(BURST_BITS, self._unpaced)
            self._unpaced -= self._flight
            self._sent_s = max(now, self._began_s + paced / self._pace_bps)
        if not self.filled and self._used >= self._window:
            acknowledged = self._round_s + self._round_trip_s
            self.filled = now >= acknowledged
            self.free_s = acknowledged
        return self._sent_s

    def _hear(self, now: float) -> None:
        """All that the last round has sent is acknowledged."""
        round_trip_s, took_s, rest_s = self._round_trip_s, self._sent_s - self._round_s, now - self._sent_s
        rests, full = rest_s >= round_trip_s, self._used >= self._window
        self._spread_s *= SPREAD_KEPT
        if self._paced or self._window < 2 * max(self._before, self._used):
            self._window = min(self._window + self._used, LARGEST_WINDOW_BITS)
        if self._paced and round_trip_s:
            estimate = self._used / (round_trip_s if full else round_trip_s + took_s)
            self._estimate_bps = max(self._estimate_bps, estimate)
            gained = STARTUP_GAIN * self._estimate_bps if rests else self._window / round_trip_s
            self._pace_bps = max(self._pace_bps, gained)
        elif rests and not self._paced:
            timeout_s = round_trip_s + took_s / 2 + max(self._spread_s, LEAST_SPREAD_S)
            self._window = max(
                self._window / 2 ** int(min(rest_s / timeout_s, MOST_HALVINGS)), FIRST_WINDOW_BITS
            )
        self.filled = self.filled and not rests
        self._before = 0.0 if rests else self._used
