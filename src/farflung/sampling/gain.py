"""Predicts the gain of drawing by scores from the noise of gradients, and chooses the rule by it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from typing_extensions import override

from farflung.engine import Arrival, Extension, Flight, StepMetadata
from farflung.types import Decision, Json, Reducer, Runtime, Schedule, State

__all__ = ["Gain", "MeasuredGain"]

ON, OFF = 1.1, 1.05
"""Gains above which drawing by scores starts, and below which it stops."""
STEPS = 100
"""Smallest number of steps between two choices."""
MEMORY = 0.995
"""Share of a moving sum that remains after each step."""
SETTLING = 3
"""Number of steps after a choice that may still have batches of the previous rule; they are not measured."""
MISS = 2.0
"""Factor by which the variance under rule ``two`` may exceed the prediction."""
PAUSE = 1000
"""Number of steps for which rule ``two`` is excluded after that."""
LOOK = 20
"""Number of steps between two scored batches while none is drawn by scores."""
NOISE = ("spread", "square", "shares")
MOMENTS = ("first", "second", "uniform", "pool")


class Gain:
    r"""Factor by which drawing by scores saves steps.

    K replicas' gradients :math:`g_k` with the shares :math:`p_k` in the mean have :math:`A = \sum_k p_k \lVert g_k
    \rVert^2` and :math:`C = \lVert \sum_k p_k g_k \rVert^2`. With V the variance of the mean, N its noise scale,
    :math:`\rho` the second moment of gradients drawn by scores over that of gradients drawn uniformly, M candidates
    and a batch of b,

    .. math::
        V = (A - C) \frac{\sum_k p_k^2}{1 - \sum_k p_k^2}, \qquad N = \frac{V}{C - V}, \qquad
        \rho_e = (1 - \tfrac{b}{M}) \rho + \tfrac{b}{M} \rho_1, \qquad \text{gain} = \frac{1 + N}{1 + \rho_e N}

    which is :math:`V = (A - C) / (K - 1)` for equal shares. :math:`\rho_1`, of the draw of candidates, is 1 for
    uniform candidates. While batches are drawn by scores, the measured noise is :math:`\rho_e N`. V, C and the
    moments behind :math:`\rho` are moving means over about 200 steps.

    Rule ``auto`` is uniform until the gain exceeds 1.1, and again once it is below 1.05, each for at least 100 steps.
    In between it is ``pool``, or ``two`` while the number of candidates limits ``pool``: from :math:`\rho < b/M`
    until it is twice that. ``two`` also ends if V is more than twice the prediction from scores, calibrated under
    the previous rule, and is then excluded for 1,000 steps.

    Its only inputs are sums over the replicas, which are equal on all; so are its choices.

    Args:
      rule: ``auto``, ``pool`` or ``two``; the latter two never change.

    References: the noise scale is that of McCandlish et al. 2018, over a batch; the gain and its use are this
      project's own.
    """

    def __init__(self, rule: str) -> None:
        self._auto = rule == "auto"
        self.rule = "pool" if self._auto else rule
        """Rule for choosing candidates: ``uniform`` for none, ``pool`` or ``two``."""
        self.streams = False
        """True if samples stream in, which excludes rule ``two``."""
        self._why: str | None = None
        self.steps = {"uniform": 0, "pool": 0, "two": 0}
        """Number of batches of this replica by each rule."""
        self._told = dict.fromkeys((*NOISE, *MOMENTS), 0.0)
        self._scale, self._pause = 0.0, 0
        self._sums: dict[str, float] = {}
        self._restart()

    def begins(self, why: str) -> tuple[str, ...]:
        """Prepares for the first step of a run.

        Args:
          reason: Reason why V cannot be measured; empty if it can.

        Returns:
          The names of the numbers that the metadata carries.
        """
        self._why = why
        if self._auto:
            self.rule = "uniform"
        return () if why else (*NOISE, *MOMENTS)

    # --- measurements of this replica ---------------------------------------------------------------------------------

    def judge(self, moments: tuple[float, float, float], part: float) -> None:
        """Records the moments of a group of scores.

        Args:
          moments: Result of :func:`farflung.sampling.importance.compute_second_moments`.
          batch_fraction: b/M.
        """
        drawn, first, uniform = moments
        moments_sums = (part * first, (1 - part) * drawn, uniform, part * uniform)
        self._told.update(zip(MOMENTS, moments_sums, strict=True))
        if self._why is None:
            self.learn(self.tell())

    def measured(self, own: float, mean: float, share: float, *, first: bool) -> None:
        r"""Records the norms of a step's exchange.

        Args:
          local_square: :math:`\lVert g_k \rVert^2`.
          mean_square: C.
          share: :math:`p_k`.
          is_rank_0: True on rank 0, which reports C for all, since its last digits may differ between ranks.
        """
        terms = (share * own - mean * first, mean * first, share**2)
        self._told.update(zip(NOISE, terms, strict=True))

    def tell(self) -> dict[str, float]:
        """Returns the measurements since the last call, to be summed over the replicas, and clears them."""
        if self._why:
            return {}
        pending, self._told = self._told, dict.fromkeys(self._told, 0.0)
        return pending

    # --- results equal on all replicas --------------------------------------------------------------------------------

    def learn(self, sums: Mapping[str, float]) -> bool:
        """Updates the moving sums by a step's sums over all replicas; returns True if the rule has changed."""
        if self._why:
            return False
        self._age += 1
        self._pause = max(0, self._pause - 1)
        terms, shares = dict[str, float](), sums["shares"]
        if 0 < shares < 1 and self._age > SETTLING:
            variance = sums["spread"] * shares / (1 - shares)
            terms |= {"variance": variance, "square": sums["square"], "measured": 1.0}
        if sums["uniform"] > 0:
            terms |= {"judged": 1.0, **{name: sums[name] for name in MOMENTS}}
        self._sums = {name: MEMORY * total + terms.get(name, 0.0) for name, total in self._sums.items()}
        chosen = self._choice() if self._auto and self._age >= STEPS else self.rule
        if chosen == self.rule:
            return False
        if chosen == "two":
            self._scale = self._variance_scale()
        self.rule = chosen
        self._restart()
        return True

    def scores_at(self, step: int) -> bool:
        """Returns True if a batch is scored at a step while batches are uniform."""
        return not self._why and step % LOOK == 0

    @property
    def ratio(self) -> float:
        r""":math:`\rho_e`; 1 if there are no scores."""
        uniform = self._sums["uniform"]
        return (self._sums["first"] + self._sums["second"]) / uniform if uniform else 1.0

    @property
    def noise_scale(self) -> float | None:
        """N of uniform batches; None without measurements, or if noise hides the mean gradient."""
        variance, signal = self._parts()
        return variance / signal if signal else None

    @property
    def gain(self) -> float | None:
        """Predicted factor; None without measurements and scores since the last choice."""
        variance, signal = self._parts()
        if not self._sums["uniform"] or not variance + signal:
            return None
        return (signal + variance) / (signal + self.ratio * variance)

    def told(self) -> dict[str, Json]:
        """Returns the current predictions for telemetry."""
        return {"gain": self.gain, "noise_scale": self.noise_scale}

    def report(self) -> dict[str, Json]:
        """Returns the steps under each rule, the last prediction, and the reason if there is none."""
        undefined: dict[str, Json] = {"undefined": self._why} if self._why else {}
        return {"steps": dict(self.steps), **self.told(), **undefined}

    def state_dict(self) -> State:
        return {
            "rule": self.rule,
            "steps": dict(self.steps),
            "told": dict(self._told),
            "sums": dict(self._sums),
            "age": self._age,
            "scale": self._scale,
            "pause": self._pause,
        }

    def load_state_dict(self, state: State) -> None:
        self.rule, self._age, self._pause = state["rule"], state["age"], state["pause"]
        self.steps, self._told, self._sums = dict(state["steps"]), dict(state["told"]), dict(state["sums"])
        self._scale = state["scale"]

    def _restart(self) -> None:
        self._age = 0
        self._sums = dict.fromkeys(("variance", "square", "measured", *MOMENTS, "judged"), 0.0)

    def _parts(self) -> tuple[float, float]:
        """Estimates the variance of the mean gradient of uniform batches, and its squared expectation, as sums."""
        variance = max(0.0, self._sums["variance"])
        signal = max(0.0, self._sums["square"] - variance)
        return variance if self.rule == "uniform" else variance / self.ratio, signal

    def _variance_scale(self) -> float:
        """Computes V over its prediction from scores; 0 if it is unknown."""
        sums = self._sums
        predicted = sums["uniform"] if self.rule == "uniform" else sums["first"] + sums["second"]
        if not predicted or not sums["measured"]:
            return 0.0
        return (sums["variance"] / sums["measured"]) / (predicted / sums["judged"])

    def _choice(self) -> str:
        is_two_stage = self.rule == "two"
        if self._why is not None:
            gain = self.gain
            if gain is None:
                return self.rule
            if gain < (ON if self.rule == "uniform" else OFF):
                return "uniform"
            if is_two_stage and self._scale and self._variance_scale() > MISS * self._scale:
                self._pause = PAUSE
        uniform, pool = self._sums["uniform"], self._sums["pool"]
        is_limited = self._sums["second"] * uniform < (2 if is_two_stage else 1) * pool * (uniform - pool)
        return "two" if is_limited and not self._pause and not self.streams else "pool"


def _reason_incomparable(size: int, schedule: Schedule, reducer: Reducer) -> str:
    """Returns why ranks' gradients cannot be compared with their mean; empty if they can."""
    if size == 1:
        return "one replica"
    if not schedule.moves_gradients:
        return f"replicas' parameters differ under {type(schedule).__name__}"
    codec = getattr(reducer, "codec", None)
    if not getattr(codec, "per_hop", False):
        return f"{type(codec or reducer).__name__} changes gradients"
    return ""


class MeasuredGain(Extension):
    """Extension that measures how gradients differ between ranks, and records the rules chosen as decisions.

    Args:
      gain: Gain of the sampler.
      runtime: Runtime of the replica.
      schedule: Schedule of the run.
      reducer: Reducer of the run.
    """

    def __init__(self, gain: Gain, runtime: Runtime, schedule: Schedule, reducer: Reducer) -> None:
        self._gain, self._runtime = gain, runtime
        self._names = gain.begins(_reason_incomparable(runtime.comm.size, schedule, reducer))

    @property
    @override
    def names(self) -> Sequence[str]:
        return self._names

    @override
    def metadata(self, own: StepMetadata) -> Mapping[str, float]:
        return self._gain.tell() if self._names else {}

    @override
    def on_launch(self, flight: Flight, tensors: Sequence[Tensor]) -> None:
        if self._names:
            flight.notes["square"] = _square(tensors)

    @override
    def on_arrival(self, arrivals: Sequence[Arrival]) -> None:
        if not self._names:
            return
        flight, reduced, metadata = arrivals[0]
        is_rank_0 = self._runtime.comm.rank == 0
        if not any(arrival.metadata.num_nonfinite for arrival in arrivals):
            self._gain.measured(
                sum(arrival.flight.notes.get("square", 0.0) for arrival in arrivals),
                _square([arrival.reduced.mean for arrival in arrivals]),
                flight.weight / reduced.weight if reduced.weight else 0.0,
                first=is_rank_0,
            )
        if flight.is_first_of_step and self._gain.learn(metadata.sums) and is_rank_0:
            self._runtime.decisions.record(Decision("sampling", flight.step, self._gain.rule, timing=False))


def _square(tensors: Sequence[Tensor]) -> float:
    """Computes the squared norm of all tensors together."""
    return sum(float(torch.linalg.vector_norm(tensor)) ** 2 for tensor in tensors)
