"""TCP model: how one connection finds its rate, as a pure calculation in a time supplied by the caller."""

from __future__ import annotations

import math
from collections import deque
from typing import Literal, TypeAlias

from typing_extensions import override

__all__ = [
    "AUTO",
    "SEGMENT_NBYTES",
    "CongestionControl",
    "Connections",
    "TcpModel",
    "choose_num_connections",
    "compute_repair_s",
    "compute_window_bps",
    "create_tcp_model",
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
PACING_SHARE = 0.99
"""Share of that rate at which Linux paces (bbr_pacing_margin_percent)."""
BURST_BITS = 2 * SEGMENT_BITS
"""Burst of a paced sender; Linux paces none of the first ten segments of a connection."""
RTT_AGE_S, RTT_PROBE_S, RTT_PROBE_BITS = 10.0, 0.2, 4 * SEGMENT_BITS
"""Age at which BBR measures the shortest round trip anew, and the duration and bits in flight of that pause."""
MEAN_RTT_AGE_S = 1.5 * RTT_AGE_S
"""Mean interval of these pauses: the shortest round trip of any ten seconds may be measured at any time of them."""
SETUP_ROUND_TRIPS = 4
"""Round trips of TCP, TLS and greetings before the first message: our choice."""
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

    after the end. A loss behind which nothing was sent is not noticed before a retransmission timeout, which is at
    least :data:`MIN_SPREAD_S` longer than a round trip, and doubles if the packet is lost again.

    Args:
      nbits: Bits of the message.
      transfer_s: Seconds between the sending of its first bit and its last.
      round_trip_s: Round trip R, in seconds.
      loss: Share of packets that are lost.
      uniforms: Two uniform numbers in [0, 1), for j and k.
      is_last: True if nothing follows the message.

    References: RFC 6298 (timeout); RFC 8985 (RACK-TLP), Sec. 7: the probe of a single packet in flight is not earlier.
    That losses before the last one are repaired in time is our choice.
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
    behind_s, waited_s, timeout_s = num_behind * transfer_s / packets, 0.0, round_trip_s + MIN_SPREAD_S
    for _ in range(1 + num_losses):
        if is_last and behind_s <= waited_s:
            waited_s += timeout_s
            timeout_s *= 2.0
        else:
            waited_s += round_trip_s
    return max(0.0, waited_s - behind_s)


def create_tcp_model(control: CongestionControl, round_trip_s: float, phase: float) -> TcpModel:
    """Creates the model of a connection, which paces under BBR if it has a delay.

    Args:
      control: Congestion control.
      round_trip_s: Sum of both delays, in seconds.
      phase: Number in [0, 1) that says when the connection measured its shortest round trip.
    """
    if control == "bbr" and round_trip_s:
        return BbrModel(round_trip_s, phase)
    return TcpModel(round_trip_s)


class TcpModel:
    r"""TCP model of one connection in one direction: how much of a message may leave when.

    Bits leave in flights of at most one window :math:`W`, one for each round trip :math:`R`. Acknowledged bits are
    added to a window if more than half of it was used, so it doubles from ten segments on (slow start). A flight that
    takes a whole round trip has saturated the path: the rest follows without a pause, until the connection idles. CUBIC
    and Reno halve the window of an idle connection once for each retransmission timeout, down to the first one.

    Args:
      round_trip_s: Sum of both delays, in seconds.

    References: RFC 5681 Sec. 3.1 and 4.1 (slow start, restart after idling); RFC 6928 (ten segments); RFC 2861
    and 7661 (a window is halved for each timeout, and one that is not used does not grow). Flights as in Cardwell,
    Savage and Anderson 2000. Open points of RFCs follow Linux.
    """

    __slots__ = (
        "_began_s",
        "_flight_bits",
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

    def __init__(self, round_trip_s: float) -> None:
        self._round_trip_s = round_trip_s
        self.next_send_s = -math.inf
        """Time from which the next flight may start."""
        self._window_bits = FIRST_WINDOW_BITS
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
        self._sent_s = self._pace(time_s)
        if not self.is_saturated and self._round_bits >= self._window_bits:
            ack_s = self._round_s + self._round_trip_s
            self.is_saturated = time_s >= ack_s
            self.next_send_s = ack_s
        return self._sent_s

    def _pace(self, time_s: float) -> float:
        """Returns the time at which the current flight leaves if the network has taken it now."""
        return time_s

    def _handle_acks(self, time_s: float) -> None:
        """Handles the acknowledgement of the last round trip."""
        was_idle = time_s - self._sent_s >= self._round_trip_s
        self._update_window(time_s, was_idle=was_idle)
        self.is_saturated = self.is_saturated and not was_idle
        self._previous_bits = 0.0 if was_idle else self._round_bits

    def _grow_window(self) -> None:
        self._window_bits = min(self._window_bits + self._round_bits, LARGEST_WINDOW_BITS)

    def _update_window(self, time_s: float, *, was_idle: bool) -> None:
        self._spread_s *= SPREAD_DECAY
        if self._window_bits < 2 * max(self._previous_bits, self._round_bits):
            self._grow_window()
        if was_idle:
            took_s, rest_s = self._sent_s - self._round_s, time_s - self._sent_s
            timeout_s = self._round_trip_s + took_s / 2 + max(self._spread_s, MIN_SPREAD_S)
            self._window_bits = max(
                self._window_bits / 2 ** int(min(rest_s / timeout_s, MAX_HALVINGS)), FIRST_WINDOW_BITS
            )


class BbrModel(TcpModel):
    r"""TCP model of a connection under BBR, which paces at what its acknowledgements have shown.

    A connection paces at :math:`0.99\, g E`, with :math:`g = 2 / \ln 2` and E the largest delivery rate so far. The
    acknowledgement of a packet that left at time t shows the rate

    .. math:: \frac{S(t) - S(t - R)}{R + t - a(t)}

    with S(t) the bits sent until t, and a(t) the time of the last acknowledgement before t, or of the first packet
    after idling. So a message of n bytes that takes d to leave, and ends before it is acknowledged, shows
    :math:`8 n / (R + d)`; messages in a row show more. A window grows until it is g E R.

    Ten seconds after the shortest round trip was measured, at most four segments are in flight for 0.2 seconds or a
    round trip, if that is longer, after all before them are acknowledged. A connection that is idle at this time
    measures with its next packet instead.

    Args:
      round_trip_s: Sum of both delays, in seconds; positive.
      phase: Number in [0, 1): the time at which the shortest round trip was measured, within those before the
        first message.

    References: drafts cardwell-iccrg-bbr-congestion-control and cheng-iccrg-delivery-rate-estimation; Linux's
    tcp_bbr.c. Not modelled: the slower pace once the path is full, since the estimate is then at least the share.
    """

    __slots__ = (
        "_burst_bits",
        "_estimate_bps",
        "_flights",
        "_phase",
        "_probe_due_s",
        "_probe_end_s",
        "_restart_s",
        "_samples",
    )  # fmt: skip

    def __init__(self, round_trip_s: float, phase: float) -> None:
        super().__init__(round_trip_s)
        self._burst_bits = FIRST_WINDOW_BITS
        """Bits that may still leave in a burst."""
        self._estimate_bps = FIRST_WINDOW_BITS / round_trip_s
        self._flights: list[tuple[float, float, float]] = []
        """Start, end and bits of the flights of the last two round trips, since the connection was idle."""
        self._samples: deque[tuple[float, float]] = deque()
        """Times of acknowledgements, and the delivery rates that they show."""
        self._restart_s = -math.inf
        """Start of the first flight since the connection was idle."""
        self._phase = phase
        self._probe_due_s = math.inf
        """Time at which the shortest round trip must be measured anew."""
        self._probe_end_s = -math.inf
        """End of the last pause for that."""

    @override
    def start_flight(self, time_s: float, bits: float) -> float:
        while self._samples and self._samples[0][0] <= time_s:
            self._estimate_bps = max(self._estimate_bps, self._samples.popleft()[1])
        is_idle = time_s >= self._sent_s + self._round_trip_s
        if time_s >= self._probe_due_s:
            self._probe_round_trip(time_s, is_idle=is_idle)
        if is_idle:
            if self._restart_s == -math.inf:
                self._probe_due_s = (
                    time_s + RTT_AGE_S - SETUP_ROUND_TRIPS * (1.0 - self._phase) * self._round_trip_s
                )
            self._restart_s = time_s
            self._flights.clear()
        if time_s < self._probe_end_s:
            round_trips = math.ceil((self._probe_end_s - time_s) / self._round_trip_s)
            bits = min(bits, RTT_PROBE_BITS * round_trips)
        elif self._samples and not self.is_saturated:
            until_s = max(self._samples[0][0] - time_s, self._round_trip_s / 4)
            bits = min(bits, self._pace_bps * until_s + max(BURST_BITS, self._burst_bits))
        return super().start_flight(time_s, bits)

    @property
    def _pace_bps(self) -> float:
        return PACING_SHARE * STARTUP_GAIN * self._estimate_bps

    def _probe_round_trip(self, time_s: float, *, is_idle: bool) -> None:
        """Measures the shortest round trip anew, with a pause unless the connection was idle when this was due."""
        first_ack_s, last_ack_s = self._restart_s + self._round_trip_s, self._sent_s + self._round_trip_s
        if is_idle and not first_ack_s < self._probe_due_s < last_ack_s:
            self._probe_due_s = time_s + self._round_trip_s + MEAN_RTT_AGE_S
        else:
            self._probe_end_s = last_ack_s + max(RTT_PROBE_S, self._round_trip_s)
            self._probe_due_s = self._probe_end_s + MEAN_RTT_AGE_S

    @override
    def finish_flight(self, time_s: float) -> float:
        sent_s = super().finish_flight(time_s)
        self._burst_bits -= self._flight_bits
        if self._began_s < self._probe_end_s:
            self.next_send_s = self._probe_end_s
        self._record_flight()
        return sent_s

    @override
    def _pace(self, time_s: float) -> float:
        burst_bits, pace_bps = max(BURST_BITS, self._burst_bits), self._pace_bps
        if self._began_s < self._probe_end_s:
            burst_bits, pace_bps = RTT_PROBE_BITS, RTT_PROBE_BITS / self._round_trip_s
        return max(time_s, self._began_s + (self._flight_bits - burst_bits) / pace_bps)

    def _record_flight(self) -> None:
        """Records the last flight, and the delivery rates that its acknowledgements will show."""
        round_trip_s, began_s, sent_s = self._round_trip_s, self._began_s, self._sent_s
        self._flights = [flight for flight in self._flights if flight[1] > sent_s - 2 * round_trip_s]
        self._flights.append((began_s, sent_s, self._flight_bits))
        acks = (time_s + round_trip_s for flight in self._flights for time_s in flight[:2])
        for time_s in sorted({began_s, *(ack_s for ack_s in acks if began_s < ack_s < sent_s), sent_s}):
            self._samples.append((time_s + round_trip_s, self._compute_delivery_bps(time_s)))

    def _compute_delivery_bps(self, time_s: float) -> float:
        """Computes the delivery rate that the acknowledgement of a packet shows which leaves at a time."""
        bits, last_ack_s, oldest_s = 0.0, self._restart_s, time_s - self._round_trip_s
        for start_s, end_s, flight_bits in self._flights:
            if start_s == end_s >= oldest_s:
                bits += flight_bits
            elif end_s >= oldest_s:
                bits += flight_bits * (min(time_s, end_s) - max(start_s, oldest_s)) / (end_s - start_s)
            if start_s <= oldest_s:
                last_ack_s = max(last_ack_s, min(end_s, oldest_s) + self._round_trip_s)
        return bits / (self._round_trip_s + time_s - last_ack_s)

    @override
    def _update_window(self, time_s: float, *, was_idle: bool) -> None:
        del time_s, was_idle
        if self._window_bits < STARTUP_GAIN * self._estimate_bps * self._round_trip_s:
            self._grow_window()
