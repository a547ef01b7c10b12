"""TCP model: how one connection finds its rate, as a pure calculation in a time supplied by the caller."""

from __future__ import annotations

import math
from typing import Literal, TypeAlias

__all__ = [
    "AUTO",
    "SEGMENT_NBYTES",
    "CongestionControl",
    "Connections",
    "TcpModel",
    "choose_num_connections",
    "compute_repair_s",
    "compute_window_bps",
]

CongestionControl: TypeAlias = Literal["bbr", "cubic", "reno"]
"""Congestion controls, by their names in Linux."""
Connections: TypeAlias = int | Literal["auto"]
"""Number of connections of each pair of nodes, for bulk; ``"auto"`` is :func:`choose_num_connections`."""
AUTO: Literal["auto"] = "auto"
MAX_CONNECTIONS = 16
"""Most connections chosen for a pair; each costs both ends a descriptor."""

SEGMENT_NBYTES = 1448
"""Payload of one TCP segment on Ethernet: 1500 bytes less IP and TCP headers and the timestamp option."""
SEGMENT_BITS = 8.0 * SEGMENT_NBYTES
FIRST_WINDOW_BITS = 10 * SEGMENT_BITS
"""Initial window (RFC 6928)."""
LARGEST_WINDOW_BITS = 8.0 * (4 << 20)
"""Largest send buffer that Linux gives a connection by default (the third of net.ipv4.tcp_wmem, by the kernel's
documentation of ip-sysctl), which bounds its bits in flight."""
MIN_SPREAD_S, SPREAD_DECAY = 0.2, 0.86
"""Excess of a retransmission timeout over a round trip: its minimum, as in Linux, and the fitted share that remains
of it after each round trip. It starts at two round trips (RFC 6298)."""
MAX_HALVINGS = 32
"""Number of halvings that reduce any window to the first one."""
STARTUP_GAIN = 2.0 / math.log(2.0)
"""BBR's pacing rate over its estimate until it has saturated the path: 2.885."""
BURST_BITS = 2 * SEGMENT_BITS
"""Burst of a paced sender; Linux paces none of the first ten segments of a connection."""
MAX_BBR_LOSS = 0.2
"""Share of lost packets from which probing at 1.25 times the estimate cannot sustain it: 1.25 (1 - p) < 1."""


def compute_window_bps(control: CongestionControl | None, loss: float, round_trip_s: float) -> float:
    r"""Computes the rate of one connection's average window under random loss, in bits per second.

    .. math:: \frac{8 \cdot 1448}{R}\, w, \qquad
        w_\text{reno} = \sqrt{1.5 / p}, \quad
        w_\text{cubic} = \max\big( 1.054\,(R/p)^{3/4},\ w_\text{reno} \big)

    with loss :math:`p` and round trip :math:`R`. BBR ignores loss as long as its probing makes up for it, up to
    a fifth of all packets; beyond that it counts as Reno, which is our choice.

    Args:
      control: Congestion control; None counts as CUBIC.
      loss: Share of packets that are lost.
      round_trip_s: Round trip, in seconds.

    References: Mathis et al. 1997 (Reno); RFC 9438 Eq. 5 with C = 0.4 (CUBIC); Cardwell et al., BBR, 2016 (Fig. 8).
    """
    if loss == 0.0 or round_trip_s == 0.0 or (control == "bbr" and loss < MAX_BBR_LOSS):
        return math.inf
    window = math.sqrt(1.5 / loss)
    if control in ("cubic", None):
        window = max(1.054 * (round_trip_s / loss) ** 0.75, window)
    return SEGMENT_BITS * window / round_trip_s


def choose_num_connections(
    rate_bps: float, round_trip_s: float, loss: float, control: CongestionControl | None = None
) -> int:
    r"""Chooses the number of connections that fill the path between two nodes, at most :data:`MAX_CONNECTIONS`.

    .. math:: \Big\lceil \frac{(1-p)\,b}{\min(s(p, R),\ 8 \cdot 2^{22} / R)} \Big\rceil

    with :math:`s` as in :func:`compute_window_bps`, and Linux's largest send buffer.

    Args:
      rate_bps: Rate b in bits per second; may be infinite.
      round_trip_s: Round trip R, in seconds.
      loss: Share p of packets that are lost.
      control: Congestion control; None counts as CUBIC.
    """
    if round_trip_s == 0.0:
        return 1
    connection_bps = min(compute_window_bps(control, loss, round_trip_s), LARGEST_WINDOW_BITS / round_trip_s)
    return max(1, math.ceil(min((1 - loss) * rate_bps / connection_bps, MAX_CONNECTIONS)))


def compute_repair_s(
    nbits: float,
    transfer_s: float,
    round_trip_s: float,
    loss: float,
    uniforms: tuple[float, float],
    *,
    is_last: bool,
) -> float:
    r"""Computes the delay of a message's end by a lost packet, under random loss.

    A receiver gets nothing behind a lost packet until that has come again, a round trip :math:`R` later. The rest of
    the message fills that time, so the lost packet closest to its end counts. With :math:`j` packets behind it, a
    geometric number, :math:`\tau` apart, and lost :math:`k` more times, it arrives

    .. math:: \max(0,\ (1 + k) R - j\, \tau)

    after the end. The loss of a message's very last packet is not noticed if nothing follows: it is
    retransmitted after two round trips of silence (tail loss probe).

    Args:
      nbits: Bits of the message.
      transfer_s: Seconds between the sending of its first bit and its last.
      round_trip_s: Round trip R, in seconds.
      loss: Share of packets that are lost.
      uniforms: Two uniform numbers in [0, 1), for j and k.
      is_last: True if nothing follows the message.

    References: RFC 8985 (RACK-TLP), Sec. 7; that losses before the last one are repaired in time is our choice.
    """
    if loss == 0.0 or nbits == 0.0:
        return 0.0
    num_behind, num_losses = (
        int(math.log1p(-uniform) / math.log(odds))
        for uniform, odds in zip(uniforms, (1 - loss, loss), strict=True)
    )
    packets = math.ceil(nbits / SEGMENT_BITS)
    if num_behind >= packets:
        return 0.0
    waited_s = (1 + num_losses + (is_last and num_behind == 0)) * round_trip_s
    return max(0.0, waited_s - num_behind * transfer_s / packets)


class TcpModel:
    r"""TCP model of one connection in one direction: how much of a message may leave when.

    Bits leave in flights of at most one window :math:`W`, one for each round trip :math:`R`. Acknowledged bits are
    added to a window if more than half of it was used, so it doubles from ten segments on (slow start). A flight that
    takes a whole round trip has saturated the path: the rest follows without a pause, until the connection idles. CUBIC
    and Reno halve the window of an idle connection once for each retransmission timeout, down to the first one. BBR
    paces instead: :math:`n` bytes take at least :math:`d = 8 n / (g E)`, with :math:`g = 2 / \ln 2` and E the largest
    estimate of the bandwidth so far. A message that ends before it is acknowledged counts as the first of these
    estimates, and the second in regular use:

    .. math:: E = \frac{8 n}{R + d}, \qquad E = \Big(1 - \frac{1}{g}\Big) \frac{8 n}{R} = 0.653\, \frac{8 n}{R}

    Args:
      control: Congestion control.
      round_trip_s: Sum of both delays, in seconds.

    References: RFC 5681 Sec. 3.1 and 4.1 (slow start, restart after idling); RFC 6928 (ten segments); RFC 2861
    and 7661 (a window is halved for each timeout, and one that is not used does not grow); the drafts
    cardwell-iccrg-bbr-congestion-control and cheng-iccrg-delivery-rate-estimation (BBR). Flights as in
    Cardwell, Savage and Anderson 2000. Open points of RFCs follow Linux.
    """

    __slots__ = (
        "_began_s",
        "_burst_bits",
        "_estimate_bps",
        "_flight_bits",
        "_is_paced",
        "_pace_bps",
        "_previous_bits",
        "_round_bits",
        "_round_s",
        "_round_trip_s",
        "_sent_s",
        "_spread_s",
        "_window_bits",
        "is_saturated",
        "next_send_s",
    )  # fmt: skip

    def __init__(self, control: CongestionControl, round_trip_s: float) -> None:
        self._is_paced, self._round_trip_s = control == "bbr", round_trip_s
        self.next_send_s = -math.inf
        """Time from which the next flight may start."""
        self._window_bits = FIRST_WINDOW_BITS
        self._burst_bits = FIRST_WINDOW_BITS
        """Bits that a paced sender may still send in a burst."""
        self._round_s = -math.inf
        """Start of the current round trip."""
        self._began_s, self._sent_s = -math.inf, -math.inf
        """Start of the last flight, and the time at which it had left."""
        self._flight_bits = 0.0
        """Bits of the last flight."""
        self._round_bits, self._previous_bits = 0.0, 0.0
        """Bits of the current round trip, and of the previous one unless the connection has been idle since."""
        self.is_saturated = False
        """True if acknowledgements arrive as fast as bits leave, so that a flight need not fit into a window."""
        self._spread_s = 2 * round_trip_s
        """Excess of the retransmission timeout over a round trip."""
        self._estimate_bps = FIRST_WINDOW_BITS / round_trip_s if round_trip_s else math.inf
        self._pace_bps = STARTUP_GAIN * self._estimate_bps

    def start_flight(self, time_s: float, bits: float) -> float:
        """Starts a flight at :attr:`next_send_s` or later; returns how many of ``bits`` it has."""
        if time_s >= self._round_s + self._round_trip_s:
            if self._round_bits:
                self._handle_acks(time_s)
            self._round_s, self._round_bits = time_s, 0.0
        self._began_s = time_s
        self._flight_bits = bits if self.is_saturated else min(bits, self._window_bits - self._round_bits)
        return self._flight_bits

    def reduce_flight(self, bits: float) -> None:
        """Reduces the current flight by bits that do not leave yet."""
        self._flight_bits -= bits

    def finish_flight(self, time_s: float) -> float:
        """Finishes a flight whose last bit the network has taken; returns when it leaves, which pacing delays."""
        self._round_bits += self._flight_bits
        self._sent_s = time_s
        if self._is_paced:
            paced = self._flight_bits - max(BURST_BITS, self._burst_bits)
            self._burst_bits -= self._flight_bits
            self._sent_s = max(time_s, self._began_s + paced / self._pace_bps)
        if not self.is_saturated and self._round_bits >= self._window_bits:
            ack_s = self._round_s + self._round_trip_s
            self.is_saturated = time_s >= ack_s
            self.next_send_s = ack_s
        return self._sent_s

    def _handle_acks(self, time_s: float) -> None:
        """Handles the acknowledgement of the last round trip."""
        round_trip_s, took_s, rest_s = self._round_trip_s, self._sent_s - self._round_s, time_s - self._sent_s
        was_idle, is_full = rest_s >= round_trip_s, self._round_bits >= self._window_bits
        self._spread_s *= SPREAD_DECAY
        if self._is_paced or self._window_bits < 2 * max(self._previous_bits, self._round_bits):
            self._window_bits = min(self._window_bits + self._round_bits, LARGEST_WINDOW_BITS)
        if self._is_paced and round_trip_s:
            estimate = self._round_bits / (round_trip_s if is_full else round_trip_s + took_s)
            self._estimate_bps = max(self._estimate_bps, estimate)
            pace_bps = STARTUP_GAIN * self._estimate_bps if was_idle else self._window_bits / round_trip_s
            self._pace_bps = max(self._pace_bps, pace_bps)
        elif was_idle and not self._is_paced:
            timeout_s = round_trip_s + took_s / 2 + max(self._spread_s, MIN_SPREAD_S)
            self._window_bits = max(
                self._window_bits / 2 ** int(min(rest_s / timeout_s, MAX_HALVINGS)), FIRST_WINDOW_BITS
            )
        self.is_saturated = self.is_saturated and not was_idle
        self._previous_bits = 0.0 if was_idle else self._round_bits
