"""The Lightning adapter of `release_gradients`."""

import inspect
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal, get_args

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from lightning.pytorch.strategies import ModelParallelStrategy, SingleDeviceStrategy
from lightning.pytorch.utilities import GradClipAlgorithmType
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor, nn

from lightning_memkit.memory.out_of_memory import is_out_of_memory
from lightning_memkit.micro_batching import SplitError, batch_size
from lightning_memkit.optim.gradient_release import BUNDLE_BYTES, Release, release_gradients
from lightning_memkit.plugins.asked import budgets_among, callbacks_of
from lightning_memkit.plugins.pickling import LeavesRunBehind, nothing

Clipping = Literal["exact", "previous"]
_SEE_GRADIENTS = ("on_after_backward", "on_before_optimizer_step")


class GradientRelease(LeavesRunBehind, Callback):
    """Steps each parameter within backward, so gradients never coexist; exact, except with `"previous"`.

    Saves the gradients: 4 bytes a parameter in float32, 2 in bfloat16. Weights, states, schedulers and
    checkpoints are bitwise those of a run without it, with any optimizer, including under
    `PureBF16Precision`. It needs exactly one backward a step: accumulation, DDP, OOM retries, a GradScaler,
    manual optimization and several optimizers are refused at setup. An error within backward leaves part of
    the weights stepped; a warning says so.

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
    of_run = {"_release": nothing, "_undo_clipping": lambda: nothing}

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
        self._undo_clipping: Callable[[], None] = nothing
        self._norm: Tensor | None = None  # the last norm of the run that is resumed

    def __repr__(self) -> str:
        return f"GradientRelease(clipping={self.clipping!r}, bundle_bytes={self.bundle_bytes!r})"

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Refuse incompatible runs, and warn about hooks that will see no gradients."""
        if stage != "fit":
            return
        self._norm = None
        _check_run(trainer, pl_module)
        _check_module(pl_module, clips_norm=_clips_norm(trainer))
        _check_budget(trainer)
        _warn_of_the_blind(trainer, pl_module)

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Release the optimizer's gradients; Lightning loads a checkpoint's states after this hook."""
        if len(trainer.optimizers) != 1:
            raise ValueError(
                f"{type(pl_module).__name__} has {len(trainer.optimizers)} optimizers; GradientRelease takes one: "
                "a step inside backward must know whose it is. Give one optimizer several groups."
            )
        self._release = release_gradients(trainer.optimizers[0], bundle_bytes=self.bundle_bytes)
        self._release.mode = "keep"  # gradients made in training_step or in trials are not the step's
        self._undo_clipping = _without_lightnings_clipping(trainer)
        self._release.records_norm = self.clipping == "previous"

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

    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: Tensor) -> None:
        """Let this backward step; to clip exactly by norm, first run a backward that only measures."""
        release, limit = self._release, trainer.gradient_clip_val
        if release is None:
            return
        release.attach()
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
        if self._release is not None:
            self._release.flush()
            self._release.mode = "keep"

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
        if self._release is not None:
            self._norm = self._release.last_norm
            self._release.undo()
            self._undo_clipping()
            self._release, self._undo_clipping = None, nothing

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


def _without_lightnings_clipping(trainer: Trainer) -> Callable[[], None]:
    """Disable Lightning's clipping, which would find no gradients after backward; returns the undo."""
    plugin = trainer.precision_plugin
    vars(plugin)["clip_gradients"] = lambda *args, **kwargs: None

    def undo() -> None:
        vars(plugin).pop("clip_gradients", None)

    return undo


def _check_run(trainer: Trainer, module: LightningModule) -> None:
    """Refuse runs that the Trainer's arguments show to be incompatible."""
    if not module.automatic_optimization:
        raise ValueError(
            f"{type(module).__name__} optimizes manually, so GradientRelease can't know which backward is to step; "
            "call lightning_memkit.optim.gradient_release.release_gradients(optimizer) in the module itself."
        )
    batches = trainer.accumulate_grad_batches
    for callback in callbacks_of(trainer):
        if isinstance(callback, GradientAccumulationScheduler):
            batches = max(batches, *callback.scheduling.values())
    if batches > 1:
        raise ValueError(
            f"accumulate_grad_batches={batches}: released gradients can't accumulate over batches; set it to 1 and "
            "take larger batches (activation checkpointing makes room for them), or remove GradientRelease."
        )
    strategy = trainer.strategy
    if not isinstance(strategy, (SingleDeviceStrategy, ModelParallelStrategy)):
        raise ValueError(
            f"GradientRelease can't go with {type(strategy).__name__}: it reduces gradients after the hooks that step "
            "on them, or holds them itself. Use one device, or ModelParallelStrategy with fully_shard (FSDP2)."
        )
    if getattr(trainer.precision_plugin, "scaler", None) is not None:
        raise ValueError(
            f"precision={trainer.precision_plugin.precision!r} scales the loss and looks for overflows in all "
            "gradients before the step; with GradientRelease use 'bf16-mixed', '32-true' or PureBF16Precision."
        )


def _clips_norm(trainer: Trainer) -> bool:
    by_value = trainer.gradient_clip_algorithm == GradClipAlgorithmType.VALUE
    return bool(trainer.gradient_clip_val) and not by_value


def _check_module(module: LightningModule, *, clips_norm: bool) -> None:
    """Refuse modules that handle gradients in their own way."""
    name = type(module).__name__
    if is_overridden("configure_gradient_clipping", module):
        raise ValueError(
            f"{name}.configure_gradient_clipping clips after backward, when the gradients are gone; remove it and "
            "write Trainer(gradient_clip_val=..., gradient_clip_algorithm=...), which GradientRelease applies."
        )
    takes = inspect.signature(module.backward).parameters
    if (
        clips_norm
        and "retain_graph" not in takes
        and not any(p.kind is p.VAR_KEYWORD for p in takes.values())
    ):
        raise ValueError(
            f"{name}.backward takes no retain_graph, which clipping by norm needs for its measuring backward; write "
            "`def backward(self, loss, *args, **kwargs)` and pass them on to loss.backward."
        )
    for path, layer in module.named_modules():
        if getattr(layer, "sparse", False) and isinstance(layer, (nn.Embedding, nn.EmbeddingBag)):
            raise ValueError(
                f"{path} has sparse=True: sparse gradients can't be released; build it with sparse=False."
            )


def _check_budget(trainer: Trainer) -> None:
    """Refuse a MemoryBudget that may retry or split a step, as far as its options tell."""
    for budget in budgets_among(callbacks_of(trainer)):
        if budget.recover:
            raise ValueError(
                "MemoryBudget(recover=True) retries a step that runs out of memory, and with GradientRelease part of "
                "the weights are stepped by then; write MemoryBudget(recover=False), or remove GradientRelease."
            )
        if budget.micro_batch_size == "auto" or budget.effective_batch_size is not None:
            raise ValueError(
                f"MemoryBudget(micro_batch_size={budget.micro_batch_size!r}, effective_batch_size="
                f"{budget.effective_batch_size!r}) may run a step in micro-batches, and GradientRelease takes one; "
                "write the loader's batch size as micro_batch_size, and no effective_batch_size."
            )


def _warn_of_the_blind(trainer: Trainer, module: LightningModule) -> None:
    """Warn about user hooks that expect gradients but run when they are gone."""
    owners = [module, *vars(trainer)["callbacks"]]
    hooks = [
        f"{type(owner).__name__}.{hook}"
        for owner in owners
        for hook in _SEE_GRADIENTS
        if is_overridden(hook, owner) and not type(owner).__module__.startswith("lightning_memkit.")
    ]
    if hooks:
        warnings.warn(
            f"{', '.join(hooks)} find no gradients (.grad is None): with GradientRelease they are used and dropped "
            "within backward.",
            stacklevel=3,
        )
