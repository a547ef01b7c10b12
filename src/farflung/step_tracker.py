"""Steps of an external training loop, found by its backward passes and its optimizer's steps."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Iterable
from functools import partial

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from farflung._torch import get_current_node, get_graph_task_id, queue_backward_callback
from farflung.attach_checks import format_names, list_optimizer_parameters
from farflung.comm import Purpose
from farflung.engine import Engine, GradientBuckets, StepMetadata
from farflung.engine.averaging import compute_sketch, estimate_max_divergence, gather_steps
from farflung.errors import CheckpointError, ConfigError, RunLost, Unsupported
from farflung.moments import get_optimizer_name
from farflung.sites import ReplicaSite
from farflung.types import Schedule
from farflung.wall import WallRuntime

__all__ = ["SPREAD_TOLERANCE", "BackwardPass", "LoopChecks", "ReplicaComparison", "StepTracker"]

SPREAD_TOLERANCE = 1e-4
"""Largest relative distance of replicas that rounding on different devices can explain."""
_MAX_PASSES = 100
"""Number of consecutive backward passes without a step after which the optimizer is taken never to step."""
_COMPARISON_PERIOD = 1024
"""Number of rounds between comparisons of equal replicas, in addition to the powers of two."""
_STEP_IN_BACKWARD = (
    "an optimizer stepped, or a hook took a gradient away, while backward() was sending it: replicas would train "
    "apart. Step after backward()"
)


class BackwardPass:
    """Autograd tasks of one backward pass, which reentrant checkpoints nest.

    Args:
      buckets: Buckets whose lock callbacks take.
      on_end: Called when the outermost task ends.
      is_deferred: True to call it after callbacks that others queue in the pass; in its own FSDP2 reduces gradients.
    """

    def __init__(
        self, buckets: GradientBuckets, on_end: Callable[[], None], *, is_deferred: bool = False
    ) -> None:
        self._lock, self._on_end, self._is_deferred = buckets.lock, on_end, is_deferred
        self._tasks: dict[int, weakref.ref[_TaskEndCallback] | None] = {}
        """Tasks by id; ``None`` for a task that has ended."""

    @property
    def is_running(self) -> bool:
        """Returns True from the first gradient to the end of the outermost task."""
        return bool(self._tasks)

    def follow_task(self) -> bool:
        """Registers a callback at the end of the current task; returns False if an earlier pass broke off."""
        task = get_graph_task_id()
        if task in self._tasks:
            return True
        if any(end is not None and end() is None for end in self._tasks.values()):
            return False
        end = _TaskEndCallback(self._handle_task_end, task)
        self._tasks[task] = weakref.ref(end)
        queue_backward_callback(partial(queue_backward_callback, end) if self._is_deferred else end)
        return True

    def restart(self) -> None:
        """Follows the current task in place of a pass that broke off."""
        self._tasks.clear()
        self.follow_task()

    def _handle_task_end(self, task: int) -> None:
        """Ends the pass with the outermost task; follows the outer task of a reentrant checkpoint."""
        self._tasks[task] = None
        outer = get_current_node()
        if outer is None:
            self._tasks.clear()
            self._on_end()
            return

        def follow_outer_task(*_: object) -> None:
            hook.remove()
            with self._lock:
                self.follow_task()

        hook = outer.register_hook(follow_outer_task)


class _TaskEndCallback:
    """Callback at the end of an autograd task; only autograd refers to it, so it is freed if the task fails."""

    def __init__(self, on_end: Callable[[int], None], task: int) -> None:
        self._on_end, self._task = on_end, task

    def __call__(self) -> None:
        self._on_end(self._task)


class LoopChecks:
    """Checks of a loop during training: its parameters, and who steps on them.

    Args:
      model: Model that the loop trains.
      optimizer: Attached optimizer.
      schedule: Schedule of the exchanges.
      is_sharded: True if FSDP2 may replace parameters by gathered ones, so that new ones are known by name only.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        schedule: Schedule,
        *,
        is_sharded: bool = False,
    ) -> None:
        self.other_optimizer = ""
        """Class name of another optimizer that has stepped on the same parameters since the attached one."""
        self._model, self._optimizer, self._schedule = model, optimizer, schedule
        parameters = list(model.named_parameters())
        self._parameter_ids = {id(p) for _, p in parameters}
        self._known_names = {name for name, _ in parameters} if is_sharded else set()
        self._frozen_parameters = [(name, p) for name, p in parameters if not p.requires_grad]
        self._num_optimizer_params = len(list_optimizer_parameters(optimizer))
        self._issued_warnings: set[str] = set()

    @property
    def has_warned(self) -> bool:
        """Returns True if any warning was issued."""
        return bool(self._issued_warnings)

    def includes_any(self, parameters: Iterable[nn.Parameter]) -> bool:
        """Returns True if any of the parameters belonged to the model when it was attached."""
        return any(id(parameter) in self._parameter_ids for parameter in parameters)

    def warn_once(self, kind: str, text: str) -> None:
        """Issues a warning unless one of this kind was issued before."""
        if kind not in self._issued_warnings:
            self._issued_warnings.add(kind)
            warnings.warn(text, stacklevel=3)

    def check_no_new_parameters(self) -> None:
        """Raises ConfigError if trainable parameters were created after :func:`farflung.attach`."""
        if names := [
            name
            for name, p in self._model.named_parameters()
            if p.requires_grad and id(p) not in self._parameter_ids and name not in self._known_names
        ]:
            raise ConfigError(
                f"the model has parameters that were made after attach() and differ between ranks: "
                f"{format_names(names)}; finish() and attach() again"
            )

    def check_all_exchanged(self) -> None:
        """Raises ConfigError if a parameter was unfrozen or added to the optimizer after :func:`farflung.attach`."""
        if self._frozen_parameters and (
            unfrozen := [name for name, p in self._frozen_parameters if p.requires_grad]
        ):
            raise ConfigError(
                f"parameters were frozen when attach() was called, and would train apart now: "
                f"{format_names(unfrozen)}; "
                "finish() and attach() again after unfreezing"
            )
        count = 0
        for group in self._optimizer.param_groups:
            count += len(group["params"])
        if count != self._num_optimizer_params and not all(
            id(p) in self._parameter_ids for p in list_optimizer_parameters(self._optimizer)
        ):
            raise ConfigError(
                "the optimizer was given parameters after attach(), which would train apart: finish() and attach() "
                "again"
            )

    def handle_other_step(self, optimizer: torch.optim.Optimizer, *, has_stepped: bool) -> None:
        """Records a step of any other optimizer in this process.

        Args:
          optimizer: Optimizer that has stepped.
          has_stepped: True if the attached optimizer has stepped since the last gradient.

        Raises:
          Unsupported: It steps inside backward, or changes parameters after their change was exchanged.
        """
        if optimizer is self._optimizer or not self.includes_any(list_optimizer_parameters(optimizer)):
            return
        if get_graph_task_id() >= 0:
            raise Unsupported(_STEP_IN_BACKWARD)
        self.other_optimizer = get_optimizer_name(optimizer)
        if not has_stepped or self._schedule.is_gradient_only:
            return
        unoptimized_ids = self._parameter_ids - {id(p) for p in list_optimizer_parameters(self._optimizer)}
        if any(p.grad is not None and id(p) in unoptimized_ids for p in list_optimizer_parameters(optimizer)):
            raise Unsupported(
                f"{get_optimizer_name(optimizer)} steps after {get_optimizer_name(self._optimizer)}, which "
                f"attach() was given, on other "
                f"parameters of the model: {type(self._schedule).__name__} exchanges what steps have changed when the "
                "attached one has stepped. Attach the optimizer that steps last"
            )

    def describe_missing_step(self, symptom: str) -> str:
        """Describes the optimizer that takes no step, for errors and warnings."""
        hint = f"; {self.other_optimizer} did" if self.other_optimizer else ""
        return (
            f"{get_optimizer_name(self._optimizer)}, which attach() was given, {symptom}{hint}, and "
            f"{type(self._schedule).__name__} "
            "counts its steps: attach the optimizer whose step() runs; updates by hand need a synchronous recipe"
        )


class ReplicaComparison:
    """Comparison of the replicas' parameters by a sketch.

    Args:
      runtime: Runtime of the replica.
      engine: Engine whose rounds number the messages.
      buckets: Buckets of the parameters.
      site: ReplicaSite that compares its shares together, if any.
    """

    def __init__(
        self, runtime: WallRuntime, engine: Engine, buckets: GradientBuckets, site: ReplicaSite | None = None
    ) -> None:
        self.has_diverged = False
        """True if replicas were found to differ although they should be equal."""
        self._runtime, self._engine, self._buckets, self._site = runtime, engine, buckets, site
        self._has_equal_steps = False

    def check_steps(self, step: int) -> None:
        """Checks once that all replicas start from one step, also from checkpoints that each has loaded for itself.

        Raises:
          CheckpointError: They do not; names the step of each rank, and the newest one that all may have.
        """
        if self._has_equal_steps or len(self._engine.members) == 1:
            return
        steps = self._runtime.drive(gather_steps(self._runtime, step, 1, purpose=Purpose.START))
        if len({*steps.values()}) > 1:
            listed = ", ".join(f"rank {rank} at step {other}" for rank, other in steps.items())
            newest = min(steps.values())
            remedy = (
                f"load the checkpoint of step {newest}, or an earlier one, on all"
                if newest
                else "begin without checkpoints"
            )
            raise CheckpointError(f"replicas start from different steps, {listed}: {remedy}")
        self._has_equal_steps = True

    def compare(self, *, is_compared: bool) -> float:
        """Compares replicas that should be equal, at growing intervals; returns their relative distance."""
        count = self._engine.round_number
        if not count or (count & (count - 1) and count % _COMPARISON_PERIOD):
            return 0.0
        spread = self.measure_spread(is_compared=is_compared)
        self.has_diverged |= spread > 0
        return spread

    def measure_spread(self, message_part: int = 0, *, is_compared: bool = True) -> float:
        """Measures how far replicas' parameters differ, relative to their norm; 0.0 if they are equal.

        Args:
          message_part: Part number of the messages, unlike for each use in a round.
          is_compared: False if this replica's parameters do not count, for lack of data.
        """
        spread = 0.0
        if len(self._engine.members) > 1:
            spread = self._runtime.drive(
                estimate_max_divergence(
                    self._runtime,
                    self._buckets.tensors,
                    self._engine.round_number,
                    part=message_part,
                    should_contribute=is_compared,
                )
            )
        return spread if self._site is None else self._site.reduce([spread])[0]


class StepTracker:
    """Finds the steps of an external loop and drives the exchanges of each.

    A step is one step of the attached optimizer. Another backward pass before it accumulates gradients, or follows a
    step that the loop skipped, see :meth:`_continue_step`.

    Args:
      optimizer: Attached optimizer.
      runtime: Runtime of the replica.
      buckets: Buckets of the model's gradients.
      engine: Engine of the exchanges.
      schedule: Schedule of the exchanges.
      checks: Checks of the loop.
      comparison: Comparison of the replicas.
      is_accumulating: Returns True if the loop accumulates this pass without a step.
      on_step: Called after each step.
      is_deferred: See :class:`BackwardPass`.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        runtime: WallRuntime,
        buckets: GradientBuckets,
        engine: Engine,
        schedule: Schedule,
        *,
        checks: LoopChecks,
        comparison: ReplicaComparison,
        is_accumulating: Callable[[], bool],
        on_step: Callable[[], None],
        is_deferred: bool = False,
    ) -> None:
        self.step = 0
        """Number of optimizer steps so far, including those that a ``GradScaler`` skipped."""
        self.weight = 1.0
        """Weight of this replica in the mean."""
        self.is_syncing = True
        """False while gradients are accumulated without exchanges."""
        self.is_step_open = False
        """True if a backward pass ran since the optimizer's last step."""
        self._optimizer, self._runtime, self._buckets, self._engine = optimizer, runtime, buckets, engine
        self._schedule, self._checks, self._comparison = schedule, checks, comparison
        self._is_accumulating, self._on_step = is_accumulating, on_step
        self._pass = BackwardPass(buckets, self._finish_backward, is_deferred=is_deferred)
        self._passes = 0
        """Number of backward passes before the current one since the optimizer's last step."""
        self._empty_passes = 0
        """Number of consecutive backward passes, with the current one, whose hooks saw no gradient."""
        self._has_exchanged = False
        """True if an exchange ran since the optimizer's last step."""
        self._has_stepped: bool | None = None
        """True if the optimizer has stepped since the last gradient; ``None`` before the first gradient."""
        self._is_stepping_optimizer = False
        """True while farflung itself steps the optimizer, at the end or for a replica without data."""
        self._skipped_steps = 0
        """Number of consecutive steps that the loop skipped."""
        self._sketch_of_open_step: Tensor | None = None
        """Sums of parameters at the start of a pass, if the previous pass's gradients vanished without a step."""
        # A step may be compiled, but not the exchange.
        handle_step, handle_other_step = (
            torch.compiler.disable(method) for method in (self._handle_step, self._handle_other_step)
        )
        self._hooks = [
            optimizer.register_step_post_hook(lambda *_: handle_step()),
            register_optimizer_step_post_hook(lambda stepping, *_: handle_other_step(stepping)),
        ]
        buckets.watch(self._handle_gradient)

    def remove_hooks(self) -> None:
        """Removes the hooks from parameters and optimizers."""
        self._buckets.remove()
        for hook in self._hooks:
            hook.remove()

    # --- inside autograd --------------------------------------------------------------------------------------

    def _handle_gradient(self, parameter: nn.Parameter) -> None:
        if self._has_stepped is None and not self._engine.round_number:
            self._engine.restart()  # the loop may have loaded weights since the start
        self._has_stepped = False
        if not self.is_syncing or self._is_accumulating():
            return
        if not self._pass.is_running:
            self._begin_pass(parameter)
        if parameter.grad is not None:
            self._empty_passes = 0
        if not self._pass.follow_task():
            if self._engine.has_gradient_transfers(self.step):
                raise RunLost(
                    f"the backward pass of step {self.step} broke off on rank {self._runtime.comm.rank} while others "
                    "took its gradients; start again from a checkpoint"
                )
            self._pass.restart()
            self._buckets.arm(self._engine.handle_bucket)

    def _begin_pass(self, parameter: nn.Parameter) -> None:
        self._checks.check_all_exchanged()
        if self.is_step_open:
            self._continue_step(parameter)
        if not self._engine.is_round_open:
            self.begin_round()
        self.is_step_open = True
        self._empty_passes += 1
        self._buckets.arm(self._engine.handle_bucket)

    def _continue_step(self, parameter: nn.Parameter) -> None:
        """Determines if another backward pass before the step accumulates gradients or follows a skipped step.

        Args:
          parameter: Parameter with the first gradient of this pass.

        Raises:
          Unsupported: The schedule does not support it, or another optimizer than the attached one steps.
        """
        if self._schedule.has_late_gradients:
            raise Unsupported(
                f"a second backward pass before the step of {get_optimizer_name(self._optimizer)}: "
                f"{type(self._schedule).__name__} has sent the first one's gradients for a later step. Add losses up "
                "for one backward(), or put all passes of a step but the last inside handle.no_sync()"
            )
        symptom = f"took no step in {_MAX_PASSES} backward passes"
        is_kept = self._buckets.has_kept_gradients(parameter)
        if not is_kept and (self._buckets.has_zeroed_gradients(parameter) or not self._buckets.is_finite()):
            # Gradients were zeroed in place or not finite, as when a GradScaler skips a step.
            self._skipped_steps += 1
            if self._skipped_steps >= _MAX_PASSES:
                raise Unsupported(self._checks.describe_missing_step(symptom))
            self.end_step(has_updated=False, is_in_pass=True)
        elif self._engine.has_gradient_transfers(self.step):
            self._count_pass(symptom)
            if not is_kept and self._engine.reducer_states.has_local_tensors:
                self._checks.warn_once(
                    "discarded",
                    "the loop has removed the gradients of a pass before a step; what the codec left out of them is "
                    "added to later steps nevertheless: put passes that no step follows inside handle.no_sync()",
                )
            if self._engine.is_round_open:
                self._runtime.drive(self._engine.finish_round(has_updated=False, should_apply=False))
        elif not is_kept:
            self._count_pass(symptom)
            own_ids = {id(p) for p in list_optimizer_parameters(self._optimizer)}
            pairs = zip(self._buckets.parameters, self._buckets.tensors, strict=True)
            sums = compute_sketch([tensor for parameter, tensor in pairs if id(parameter) in own_ids])
            if self._sketch_of_open_step is not None and not torch.equal(sums, self._sketch_of_open_step):
                raise Unsupported(
                    self._checks.describe_missing_step("takes no step, while parameters change")
                )
            self._sketch_of_open_step = sums

    def _count_pass(self, symptom: str) -> None:
        self._passes += 1
        if self._passes >= _MAX_PASSES:
            self._checks.warn_once("step", self._checks.describe_missing_step(symptom))

    def _finish_backward(self) -> None:
        self._buckets.finish()
        if not self._schedule.is_gradient_only:
            self._buckets.record_zeros()
        if self._empty_passes > 1 or self._buckets.has_replaced_gradients():
            raise Unsupported(_STEP_IN_BACKWARD)
        if not self._runtime.drive(self._engine.merge_gradients()):
            self._buckets.clear()
        self._has_exchanged = True
        if self._schedule.is_gradient_only:
            self._runtime.drive(self._engine.finish_round(has_updated=True))

    # --- rounds of the engine ---------------------------------------------------------------------------------

    def begin_round(self, *, has_data: bool = True) -> None:
        """Plans the exchanges of a backward pass."""
        number = self._engine.round_number
        self._comparison.check_steps(self.step)
        if not number & (number - 1):
            self._checks.check_no_new_parameters()
        if self._schedule.is_gradient_only:
            spread = self._comparison.compare(is_compared=has_data)
            if spread > SPREAD_TOLERANCE:
                self._checks.warn_once(
                    "apart",
                    f"replicas have come apart by {spread:.1g} of their parameters' norm by step {self.step}, though "
                    "their gradients are equal: something other than the steps of "
                    f"{get_optimizer_name(self._optimizer)} changes parameters differently on each rank, such as noise "
                    "drawn with different seeds. finish() averages them",
                )
        weight = self.weight if has_data else 0.0
        self._engine.begin_round(self.step, StepMetadata(0.0, weight, is_exhausted=not has_data))

    # --- around the optimizer ---------------------------------------------------------------------------------

    def _handle_step(self) -> None:
        if self._is_stepping_optimizer or not (self.is_step_open or self._has_gradients()):
            return
        if not self.is_step_open and not any(g.get("lr", 1.0) for g in self._optimizer.param_groups):
            return  # torch.distributed.checkpoint creates an optimizer's state by a step of rate 0
        self._has_stepped = None if self._has_stepped is None else True
        if not self._has_exchanged:  # otherwise the backward pass has checked them
            self._checks.check_all_exchanged()
            if not self._schedule.is_gradient_only and not self._engine.has_gradient_transfers(self.step):
                self.begin_round()  # its gradients come from no_sync() or torch.func
            elif len(self._engine.members) > 1 and self._has_gradients():
                self._comparison.has_diverged = True
                self._checks.warn_once(
                    "exchange",
                    f"an optimizer step on rank {self._runtime.comm.rank} followed no exchange since step {self.step}: "
                    "replicas train apart. Gradients are exchanged by backward() outside no_sync(); those of "
                    "torch.autograd.grad or torch.func are not",
                )
        self._skipped_steps, self._checks.other_optimizer = 0, ""
        self.end_step(has_updated=True, is_in_pass=False)

    def _handle_other_step(self, optimizer: torch.optim.Optimizer) -> None:
        self._checks.handle_other_step(optimizer, has_stepped=bool(self._has_stepped))

    def _has_gradients(self) -> bool:
        return any(p.grad is not None for p in list_optimizer_parameters(self._optimizer))

    def end_skipped_step(self) -> None:
        """Ends a step that the loop skipped, as a GradScaler does; a step with finite gradients stays open."""
        if self._engine.is_round_open and (
            not self._buckets.is_finite() or self._buckets.has_zeroed_gradients()
        ):
            self.end_step(has_updated=False, is_in_pass=False)

    def end_step(self, *, has_updated: bool, is_in_pass: bool) -> None:
        """Ends a step of the optimizer.

        Args:
          has_updated: True if the optimizer had gradients to step on.
          is_in_pass: True if the next backward pass runs already, so that parameters must not change.
        """
        if self._engine.is_round_open:
            self._runtime.drive(
                self._engine.finish_round(has_updated=has_updated, should_apply=not is_in_pass)
            )
        self.reset_step()
        self.step += 1
        self._runtime.events += 1
        self._on_step()

    def reset_step(self) -> None:
        """Resets the state kept about backward passes since the optimizer's last step."""
        self.is_step_open = self._has_exchanged = False
        self._passes, self._sketch_of_open_step = 0, None

    def step_optimizer(self) -> None:
        """Runs the optimizer's step without the handle's own hooks around it."""
        self._is_stepping_optimizer = True
        try:
            self._optimizer.step()
        finally:
            self._is_stepping_optimizer = False

    def step_without_data(self) -> bool:
        """Takes part in a step without data; returns True if any replica had data."""
        self.begin_round(has_data=False)
        self._buckets.run_backward(None, self._engine.handle_bucket)
        has_gradient = self._runtime.drive(self._engine.merge_gradients())
        outcome = self._runtime.drive(self._engine.finish_round(has_updated=has_gradient))
        self.step += 1
        self._runtime.events += 1
        has_data = outcome.num_exhausted < len(self._engine.members)
        if has_data and has_gradient:
            self.step_optimizer()
        self._buckets.clear()
        return has_data
