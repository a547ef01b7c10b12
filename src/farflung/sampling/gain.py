"""Predicts the gain of drawing by scores from the noise of gradients, and chooses the rule by it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from typing_extensions import override

from farflung.engine import Arrival, Extension, Flight, StepMetadata
from farflung.types import Decision, Json, Reducer, Runtime, Schedule, State

__all__ = ["Gain", "GainExtension"]

GAIN_ON, GAIN_OFF = 1.1, 1.05
"""Gains above which drawing by scores starts, and below which it stops."""
MIN_STEPS = 100
"""Smallest number of steps between two choices."""
DECAY = 0.995
"""Share of a moving sum that remains after each step."""
SETTLING_STEPS = 3
"""Number of steps after a choice that may still have batches of the previous rule; they are not measured."""
MAX_VARIANCE_EXCESS = 2.0
"""Factor by which the variance under rule ``two`` may exceed the prediction."""
PAUSE_STEPS = 1000
"""Number of steps for which rule ``two`` is excluded after that."""
PROBE_PERIOD = 20
"""Number of steps between two scored batches while none is drawn by scores."""
NOISE_NAMES = ("spread", "square", "shares")
MOMENT_NAMES = ("first", "second", "uniform", "pool")


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
    In between it is ``pool`` or ``two``. Its only inputs are sums over the replicas, so all choose equally.

    Args:
      rule: ``auto``, ``pool`` or ``two``; the latter two never change.

    References: the noise scale is that of McCandlish et al. 2018, over a batch; the gain and its use are this
      project's own.
    """

    def __init__(self, rule: str) -> None:
        self._is_auto = rule == "auto"
        self.rule = "pool" if self._is_auto else rule
        """Rule for choosing candidates: ``uniform`` for none, ``pool`` or ``two``."""
        self.is_streaming = False
        """True if samples stream in, which excludes rule ``two``."""
        self._undefined_reason: str | None = None
        self.steps = {"uniform": 0, "pool": 0, "two": 0}
        """Number of batches of this replica by each rule."""
        self._pending = dict.fromkeys((*NOISE_NAMES, *MOMENT_NAMES), 0.0)
        self._scale, self._pause_steps = 0.0, 0
        self._sums: dict[str, float] = {}
        self._restart()

    def begin_run(self, reason: str) -> tuple[str, ...]:
        """Prepares for the first step of a run.

        Args:
          reason: Reason why V cannot be measured; empty if it can.

        Returns:
          The names of the numbers that the metadata carries.
        """
        self._undefined_reason = reason
        if self._is_auto:
            self.rule = "uniform"
        return () if reason else (*NOISE_NAMES, *MOMENT_NAMES)

    # --- measurements of this replica ---------------------------------------------------------------------------------

    def record_moments(self, moments: tuple[float, float, float], drawn_fraction: float) -> None:
        """Replaces the pending moments by those of a group of scores; applies them immediately outside a run.

        Args:
          moments: Result of :func:`farflung.sampling.importance.compute_second_moments`.
          drawn_fraction: Batch size divided by the number of candidates, b/M.
        """
        drawn, first, uniform = moments
        moments_sums = (
            drawn_fraction * first,
            (1 - drawn_fraction) * drawn,
            uniform,
            drawn_fraction * uniform,
        )
        self._pending.update(zip(MOMENT_NAMES, moments_sums, strict=True))
        if self._undefined_reason is None:
            self.update_rule(self.drain())

    def record_norms(self, local_square: float, mean_square: float, share: float, *, is_rank_0: bool) -> None:
        r"""Records the norms of a step's exchange.

        Args:
          local_square: :math:`\lVert g_k \rVert^2`.
          mean_square: C.
          share: :math:`p_k`.
          is_rank_0: True on rank 0, which reports C for all, since its last digits may differ between ranks.
        """
        terms = (share * local_square - mean_square * is_rank_0, mean_square * is_rank_0, share**2)
        self._pending.update(zip(NOISE_NAMES, terms, strict=True))

    def drain(self) -> dict[str, float]:
        """Returns the measurements since the last call, to be summed over the replicas, and clears them."""
        if self._undefined_reason:
            return {}
        pending, self._pending = self._pending, dict.fromkeys(self._pending, 0.0)
        return pending

    # --- results equal on all replicas --------------------------------------------------------------------------------

    def update_rule(self, sums: Mapping[str, float]) -> bool:
        """Updates the moving sums by a step's sums over all replicas; returns True if it changes the rule."""
        if self._undefined_reason:
            return False
        self._rule_steps += 1
        self._pause_steps = max(0, self._pause_steps - 1)
        terms, shares = dict[str, float](), sums["shares"]
        if 0 < shares < 1 and self._rule_steps > SETTLING_STEPS:
            variance = sums["spread"] * shares / (1 - shares)
            terms |= {"variance": variance, "square": sums["square"], "measured": 1.0}
        if sums["uniform"] > 0:
            terms |= {"judged": 1.0, **{name: sums[name] for name in MOMENT_NAMES}}
        self._sums = {name: DECAY * total + terms.get(name, 0.0) for name, total in self._sums.items()}
        chosen = self._choose_rule() if self._is_auto and self._rule_steps >= MIN_STEPS else self.rule
        if chosen == self.rule:
            return False
        if chosen == "two":
            self._scale = self._compute_variance_scale()
        self.rule = chosen
        self._restart()
        return True

    def should_score(self, step: int) -> bool:
        """Returns True if a batch is scored at a step while batches are uniform."""
        return not self._undefined_reason and step % PROBE_PERIOD == 0

    @property
    def ratio(self) -> float:
        r""":math:`\rho_e`; 1 if there are no scores."""
        uniform = self._sums["uniform"]
        return (self._sums["first"] + self._sums["second"]) / uniform if uniform else 1.0

    @property
    def noise_scale(self) -> float | None:
        """N of uniform batches; None without measurements, or if noise hides the mean gradient."""
        variance, signal = self._estimate_signal()
        return variance / signal if signal else None

    @property
    def gain(self) -> float | None:
        """Predicted factor; None without measurements and scores since the last choice."""
        variance, signal = self._estimate_signal()
        if not self._sums["uniform"] or not variance + signal:
            return None
        return (signal + variance) / (signal + self.ratio * variance)

    def get_stats(self) -> dict[str, Json]:
        """Returns the current predictions for telemetry."""
        return {"gain": self.gain, "noise_scale": self.noise_scale}

    def report(self) -> dict[str, Json]:
        """Returns the steps under each rule, the last prediction, and the reason if there is none."""
        undefined: dict[str, Json] = {"undefined": self._undefined_reason} if self._undefined_reason else {}
        return {"steps": dict(self.steps), **self.get_stats(), **undefined}

    def state_dict(self) -> State:
        return {
            "rule": self.rule,
            "steps": dict(self.steps),
            "pending": dict(self._pending),
            "sums": dict(self._sums),
            "age": self._rule_steps,
            "scale": self._scale,
            "pause": self._pause_steps,
        }

    def load_state_dict(self, state: State) -> None:
        self.rule, self._rule_steps, self._pause_steps = state["rule"], state["age"], state["pause"]
        self.steps = dict(state["steps"])
        self._pending = dict(state["pending"])
        self._sums = dict(state["sums"])
        self._scale = state["scale"]

    def _restart(self) -> None:
        self._rule_steps = 0
        self._sums = dict.fromkeys(("variance", "square", "measured", *MOMENT_NAMES, "judged"), 0.0)

    def _estimate_signal(self) -> tuple[float, float]:
        """Estimates the variance of the mean gradient of uniform batches, and its squared expectation, as sums."""
        variance = max(0.0, self._sums["variance"])
        signal = max(0.0, self._sums["square"] - variance)
        return variance if self.rule == "uniform" else variance / self.ratio, signal

    def _compute_variance_scale(self) -> float:
        """Computes V over its prediction from scores; 0 if it is unknown."""
        sums = self._sums
        predicted = sums["uniform"] if self.rule == "uniform" else sums["first"] + sums["second"]
        if not predicted or not sums["measured"]:
            return 0.0
        return (sums["variance"] / sums["measured"]) / (predicted / sums["judged"])

    def _choose_rule(self) -> str:
        is_two_stage = self.rule == "two"
        if self._undefined_reason is not None:
            gain = self.gain
            if gain is None:
                return self.rule
            if gain < (GAIN_ON if self.rule == "uniform" else GAIN_OFF):
                return "uniform"
            if (
                is_two_stage
                and self._scale
                and self._compute_variance_scale() > MAX_VARIANCE_EXCESS * self._scale
            ):
                self._pause_steps = PAUSE_STEPS
        uniform, pool = self._sums["uniform"], self._sums["pool"]
        is_limited = self._sums["second"] * uniform < (2 if is_two_stage else 1) * pool * (uniform - pool)
        return "two" if is_limited and not self._pause_steps and not self.is_streaming else "pool"


def _explain_incomparable(size: int, schedule: Schedule, reducer: Reducer) -> str:
    """Returns why ranks' gradients cannot be compared with their mean; empty if they can."""
    if size == 1:
        return "one replica"
    if not schedule.is_gradient_only:
        return f"replicas' parameters differ under {type(schedule).__name__}"
    codec = getattr(reducer, "codec", None)
    if not getattr(codec, "can_requantize", False):
        return f"{type(codec or reducer).__name__} changes gradients"
    return ""


class GainExtension(Extension):
    """Extension that measures how gradients differ between ranks, and records the rules chosen as decisions.

    Args:
      gain: Gain of the sampler.
      runtime: Runtime of the replica.
      schedule: Schedule of the run.
      reducer: Reducer of the run.
    """

    def __init__(self, gain: Gain, runtime: Runtime, schedule: Schedule, reducer: Reducer) -> None:
        self._gain, self._runtime = gain, runtime
        self._names = gain.begin_run(_explain_incomparable(runtime.comm.size, schedule, reducer))

    @property
    @override
    def names(self) -> Sequence[str]:
        return self._names

    @override
    def report_metadata(self, metadata: StepMetadata) -> Mapping[str, float]:
        return self._gain.drain() if self._names else {}

    @override
    def handle_launch(self, flight: Flight, tensors: Sequence[Tensor]) -> None:
        if self._names:
            flight.notes["square"] = _compute_square(tensors)

    @override
    def handle_arrivals(self, arrivals: Sequence[Arrival]) -> None:
        if not self._names:
            return
        flight, reduced, metadata = arrivals[0]
        is_rank_0 = self._runtime.comm.rank == 0
        if not any(arrival.metadata.num_nonfinite for arrival in arrivals):
            self._gain.record_norms(
                sum(arrival.flight.notes.get("square", 0.0) for arrival in arrivals),
                _compute_square([arrival.result.mean for arrival in arrivals]),
                flight.weight / reduced.weight if reduced.weight else 0.0,
                is_rank_0=is_rank_0,
            )
        if flight.is_first_of_step and self._gain.update_rule(metadata.sums) and is_rank_0:
            self._runtime.decisions.record(Decision("sampling", flight.step, self._gain.rule, timing=False))


def _compute_square(tensors: Sequence[Tensor]) -> float:
    """Computes the squared norm of all tensors together."""
    return sum(float(torch.linalg.vector_norm(tensor)) ** 2 for tensor in tensors)
