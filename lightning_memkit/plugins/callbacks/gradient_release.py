"""The Lightning adapter of `release_gradients`."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal, get_args

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities import GradClipAlgorithmType
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_memkit.memory.out_of_memory import is_out_of_memory
from lightning_memkit.micro_batching import SplitError, batch_size
from lightning_memkit.optim.gradient_release import BUNDLE_BYTES, Release, release_gradients, release_of
from lightning_memkit.optim.spent_gradients import GradientReader
from lightning_memkit.plugins.asked import budgets_among, callbacks_of
from lightning_memkit.plugins.callbacks._release_checks import (
    between_backward_and_step,
    check_setup,
    warn_of_the_blind,
    warn_of_the_late,
)
from lightning_memkit.plugins.callbacks._released_step import INSTEAD, ReleasedStep, zeroing_of
from lightning_memkit.plugins.pickling import LeavesRunBehind, nothing

Clipping = Literal["exact", "previous"]


class GradientRelease(LeavesRunBehind, Callback):
    """Steps each parameter within backward, so gradients never coexist; exact, except with `"previous"`.

    Saves the gradients: 4 bytes a parameter in float32, 2 in bfloat16. Weights, states, schedulers and
    checkpoints are bitwise those of a run without it, with any optimizer, including under `PureBF16Precision`
    (on CUDA with `Trainer(deterministic=True)`). It needs exactly one backward a step: accumulation, DDP, OOM
    retries, a GradScaler, manual optimization and several optimizers are refused at setup. An error within
    backward leaves part of the weights stepped; a warning says so.

    Args:
        clipping: how `Trainer(gradient_clip_val=...)` clips by norm, which needs all gradients before the
            first is used. `"exact"`: an additional first backward only measures the norm; the result is
            unchanged, at the price of one more backward, during which activations stay alive. `"previous"`:
            clip by the norm of the previous step, for one more read of the gradients; this changes the
            result, and only the first step is exact. Clipping by value needs neither.
        bundle_bytes: small gradients are collected into buckets of this many bytes and stepped together; 0
            steps each one immediately.

    Raises:
        ValueError: an option is unknown; at setup, the run is incompatible with released gradients.
        TypeError: when fitting starts, if the optimizer's step requires a closure (LBFGS).
    """

    plan_column = "gradients"
    of_run = {"_release": nothing, "_step": nothing}

    sees_micro_batches = True

    def __init__(self, clipping: Clipping = "exact", bundle_bytes: int = BUNDLE_BYTES) -> None:
        if clipping not in get_args(Clipping):
            known = ", ".join(map(repr, get_args(Clipping)))
            raise ValueError(f"clipping={clipping!r} is unknown; choose one of {known}.")
        if bundle_bytes < 0:
            raise ValueError(f"bundle_bytes={bundle_bytes} must be 0 or more; 0 steps each gradient at once.")
        self.clipping: Clipping = clipping
        self.bundle_bytes = bundle_bytes
        self._release: Release | None = None
        self._step: ReleasedStep | None = None
        self._between = ""
        self._norm: Tensor | None = None  # the last norm of the run that is resumed

    def __repr__(self) -> str:
        return f"GradientRelease(clipping={self.clipping!r}, bundle_bytes={self.bundle_bytes!r})"

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Refuse incompatible runs, and warn about hooks that will see no gradients."""
        if stage != "fit":
            return
        self._norm = None
        check_setup(trainer, pl_module)
        warn_of_the_blind(trainer, pl_module)

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Release the optimizer's gradients; Lightning loads a checkpoint's states after this hook."""
        if len(trainer.optimizers) != 1:
            raise ValueError(
                f"{type(pl_module).__name__} has {len(trainer.optimizers)} optimizers; GradientRelease takes one: "
                "a step inside backward must know whose it is. Give one optimizer several groups."
            )
        self._between = between_backward_and_step(trainer, pl_module)
        release = self._released(trainer.optimizers[0])
        self._step = ReleasedStep(trainer, self._released)
        warn_of_the_late(trainer, pl_module, release)

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Refuse a batch that MemoryBudget would split."""
        for budget in budgets_among(callbacks_of(trainer)):
            try:
                rows = batch_size(batch)
            except SplitError:  # it runs whole
                return
            if rows > int(budget.micro_batch_size):
                raise ValueError(
                    f"MemoryBudget(micro_batch_size={budget.micro_batch_size}) splits a batch of {rows}, and "
                    "GradientRelease takes one micro-batch a step: raise micro_batch_size, or remove one of the two."
                )

    def on_before_zero_grad(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        """Follow the optimizer of this batch, and see to it that a user's own zero_grad zeroes."""
        if self._step is None:
            return
        spent = self._released(optimizer).spent
        zeroing = zeroing_of(pl_module, optimizer)
        if zeroing is None:
            spent.zeroed()
        else:
            optimized = {id(p) for group in optimizer.param_groups for p in group["params"]}
            spent.expect_zeroing(zeroing, optimized)

    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: Tensor) -> None:
        """Let this backward step; to clip exactly by norm, first run a backward that only measures."""
        release, limit = self._release, trainer.gradient_clip_val
        if release is None:
            return
        release.spent.refuse_unzeroed()
        if is_overridden("backward", pl_module):
            release.spent.reader = GradientReader(f"{type(pl_module).__name__}.backward", INSTEAD)
        release.attach()
        release.run_last()
        release.clip_value = None
        if limit is not None and limit > 0:
            if trainer.gradient_clip_algorithm == GradClipAlgorithmType.VALUE:
                release.clip_value = float(limit)
            else:
                norm = self._previous_norm(release)
                if norm is None:
                    with _others_untouched(pl_module, release):
                        norm = release.measured_norm(lambda: pl_module.backward(loss, retain_graph=True))
                release.clip_next_step(float(limit), norm)
        release.mode = "step"

    def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Stop stepping: gradients computed after Lightning's backward are left alone."""
        release, step = self._release, self._step
        if release is None or step is None:
            return
        release.flush()
        release.mode = "keep"
        release.spent.reader = None
        release.spent.remove()
        if (name := step.runs_before_step(pl_module)) is not None:
            release.spent.place(GradientReader(name, INSTEAD))

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Refuse a batch without `optimizer.step()`, whose parameters are stepped nonetheless."""
        if self._release is not None and self._release.parameters_stepped:
            raise RuntimeError(
                f"{type(pl_module).__name__}.optimizer_step ended without optimizer.step() after a backward, within "
                f"which {self._release.parameters_stepped} parameters were stepped: a step can't be skipped after its "
                "backward. Return None from training_step to skip a batch, or remove GradientRelease."
            )

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Warn if the error left only part of the weights stepped."""
        stepped = self._release.parameters_stepped if self._release is not None else 0
        self._stop()
        if stepped and is_out_of_memory(exception):
            cause = "Out of memory"
        elif stepped:
            cause = f"{type(exception).__name__}"
        else:
            return
        warnings.warn(
            f"{cause} after {stepped} parameters had been stepped within backward: the weights are of half a step, "
            "which can't be repeated. Resume from an earlier checkpoint, not from one saved now.",
            stacklevel=2,
        )

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Restore the optimizer's own step."""
        self._stop()

    def state_dict(self) -> dict[str, Any]:
        """The last step's norm, if the next step is clipped by it."""
        norm = self._norm if self._release is None else self._release.last_norm
        return {} if norm is None else {"norm": norm.detach().cpu()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take the norm of the resumed run, by which the first step is clipped."""
        self._norm = state_dict.get("norm")

    def _stop(self) -> None:
        if self._step is not None:
            self._step.undo()
        if self._release is not None:
            self._norm = self._release.last_norm
            self._release.undo()
        self._release, self._step = None, None

    def _released(self, optimizer: Optimizer) -> Release:
        """The release of an optimizer; the one before is undone if the optimizers were exchanged."""
        release = self._release
        if release is not None and release_of(optimizer) is release:
            return release
        if release is not None:
            self._norm, self._release = release.last_norm, None
            release.undo()
        self._release = release = release_gradients(optimizer, bundle_bytes=self.bundle_bytes)
        release.mode = "keep"  # gradients made in training_step or in trials are not the step's
        release.records_norm = self.clipping == "previous"
        release.spent.between = self._between
        return release

    def _previous_norm(self, release: Release) -> Tensor | None:
        """The last step's norm, if the next step is clipped by it; None if that norm is not finite."""
        if self.clipping == "exact":
            return None
        norm = self._norm if release.last_norm is None else release.last_norm
        return norm if norm is not None and bool(norm.isfinite()) else None


@contextmanager
def _others_untouched(module: nn.Module, release: Release) -> Iterator[None]:
    """Within the context, hide and then restore the gradients of parameters outside the optimizer."""
    others = [parameter for parameter in module.parameters() if parameter not in release]
    kept = [parameter.grad for parameter in others]
    for parameter in others:
        parameter.grad = None
    try:
        yield
    finally:
        for parameter, gradient in zip(others, kept, strict=True):
            parameter.grad = gradient
