"""The networks that the simulator is judged on: named ones, drawn ones that it was not tuned on, and six hard ones."""

from __future__ import annotations

from random import Random

__all__ = ["DRAWN", "HARD", "NAMED", "drawn"]

NAMED = ("wifi-10mbps", "wifi-100mbps", "four-regions", "lan-1g")
DRAWN = 12
DELAY_MS, RATE_MBPS, ONE_WAY, ONE_NODE, LOSS = (1, 300), (1, 200), (1, 16), (1, 10), (1e-4, 2e-2)
"""One way; of the faster direction; how much slower the other is; how much slower one node is; share of packets, which
half of the networks lose."""
SLOWEST = RATE_MBPS[0]
"""No way is slower, whatever makes it so."""

Range = tuple[float, float]


def drawn(seed: int, nodes: int) -> dict[str, str]:
    """Networks as TOML profiles, by name.

    Every quantity is log-uniform. Its range is cut into as many pieces as there are networks, and each network has one
    (a Latin hypercube), so that twelve networks cover every range. Where a direction or a node that is as many times
    slower would fall below :data:`SLOWEST`, the factor's range ends there: our choice.

    Args:
      seed: of all of them.
      nodes: in each, of which the last may be slower than the others.

    References: McKay, Beckman & Conover 1979.
    """
    random = Random(f"fidelity {seed}")
    ranges = (DELAY_MS, RATE_MBPS, ONE_WAY, ONE_NODE, LOSS)
    columns = [[(place + random.random()) / DRAWN for place in _shuffled(random)] for _ in ranges]
    found = {}
    for number, (delay, rate, one_way, one_node, loss) in enumerate(zip(*columns, strict=True), start=1):
        fast = _between(RATE_MBPS, rate)
        slow = fast / _between((1, min(ONE_WAY[1], fast / SLOWEST)), one_way)
        up, down = (slow, fast) if random.random() < 0.5 else (fast, slow)
        slower = _between((1, min(ONE_NODE[1], slow / SLOWEST)), one_node)
        name = f"drawn {seed}.{number}"
        lost = _between(LOSS, 2 * loss - 1) if loss >= 0.5 else 0.0
        found[name] = _profile(name, nodes, _between(DELAY_MS, delay), up, down, lost, slower)
    return found


def _shuffled(random: Random) -> list[int]:
    places = list(range(DRAWN))
    random.shuffle(places)
    return places


def _between(ends: Range, share: float) -> float:
    low, high = ends
    return float(low * (high / low) ** share)


def _profile(
    name: str,
    nodes: int,
    delay_ms: float,
    up_mbps: float,
    down_mbps: float,
    loss: float = 0.0,
    slower: float = 1.0,
) -> str:
    return "\n".join(
        [
            f'name = "{name}"',
            "[default]",
            f"latency_s = {delay_ms / 1e3:.3g}",
            f"loss = {loss:.2g}",
            *_site("most", nodes - 1, up_mbps, down_mbps),
            *_site("one", 1, up_mbps / slower, down_mbps / slower),
            "",
        ]
    )


def _site(name: str, nodes: int, up_mbps: float, down_mbps: float) -> list[str]:
    return [
        "[[site]]",
        f'name = "{name}"',
        f"nodes = {nodes}",
        f"up_bps = {up_mbps * 1e6:.3g}",
        f"down_bps = {down_mbps * 1e6:.3g}",
    ]


HARD = {
    name: _profile(name, 4, *quantities)
    for name, quantities in {
        "asymmetric 8:1": (20, 5, 40),
        "200 ms one way": (200, 20, 20),
        "300 ms one way": (300, 20, 20),
        "one slow node": (20, 50, 50, 0.0, 10),
        "1 % loss": (20, 20, 20, 0.01),
        "2 % loss": (20, 20, 20, 0.02),
    }.items()
}
"""Networks of four nodes as TOML profiles, by name, each with one difficulty for a model of TCP."""
