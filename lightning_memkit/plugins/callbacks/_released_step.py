"""Lightning's optimizer step while gradients are released: which optimizer steps, and whose code runs before it."""

from collections.abc import Callable
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.loops.optimization.closure import AbstractClosure
from torch.optim import Optimizer

from lightning_memkit.optim.gradient_release import Release
from lightning_memkit.optim.spent_gradients import GradientReader

INSTEAD = (
    "clip with Trainer(gradient_clip_val=...), change gradients in a tensor hook (parameter.register_hook) or by "
    "scaling the loss"
)


class ReleasedStep:
    """Encloses the steps of a precision plugin, and disables its clipping, which would find no gradients.

    Args:
        trainer: whose precision plugin it is.
        follow: gives the release of the optimizer that steps.
    """

    def __init__(self, trainer: Trainer, follow: Callable[[Optimizer], Release]) -> None:
        self._trainer = trainer
        self._plugin = trainer.precision_plugin
        self._follow = follow
        self._step = self._plugin.optimizer_step
        self._closure: Callable[[], Any] | None = None  # while it runs within a step
        self._clips = False  # whether Lightning's own clipping may run now
        vars(self._plugin).update(optimizer_step=self._enclosed, clip_gradients=self._clip)

    def undo(self) -> None:
        """Give the plugin its methods back."""
        for name in ("optimizer_step", "clip_gradients"):
            vars(self._plugin).pop(name, None)

    def runs_before_step(self, module: LightningModule) -> str | None:
        """The user's code that gets control after the backward under way, and before the step; None if none does."""
        closure = self._closure
        if isinstance(closure, AbstractClosure):
            return None
        # None: optimizer_step has called Lightning's closure itself, outside of a step.
        return getattr(closure, "__qualname__", f"{type(module).__name__}.optimizer_step")

    def _enclosed(
        self, optimizer: Optimizer, model: LightningModule, closure: Callable[[], Any], **kwargs: Any
    ) -> Any:
        spent = self._follow(optimizer).spent
        spent.remove()

        def run() -> Any:
            self._closure = closure
            try:
                result = closure()
            finally:
                self._closure = None
            # Lightning's hooks come next; they were told that they find no gradients.
            spent.remove()
            spent.refuse_repeat(f"{type(model).__name__}.optimizer_step")
            self._clips = True
            return result

        try:
            return self._step(optimizer, model=model, closure=run, **kwargs)
        finally:
            self._clips = False

    def _clip(self, optimizer: Optimizer, clip_val: float = 0.0, *args: Any, **kwargs: Any) -> None:
        if clip_val > 0 and not (self._clips and clip_val == self._trainer.gradient_clip_val):
            raise RuntimeError(
                f"clip_gradients(gradient_clip_val={clip_val}) finds no gradients: they were used and dropped within "
                f"backward. Write Trainer(gradient_clip_val={clip_val}), which GradientRelease applies, or remove it."
            )


def zeroing_of(module: LightningModule, optimizer: Optimizer) -> GradientReader | None:
    """The user's own code that zeroes gradients; None if torch's does."""
    remedy = "let it call optimizer.zero_grad() in every batch"
    for owner, name, stock in (
        (module, "optimizer_zero_grad", LightningModule.optimizer_zero_grad),
        (optimizer, "zero_grad", Optimizer.zero_grad),
    ):
        if getattr(getattr(owner, name), "__func__", None) is not stock:
            return GradientReader(f"{type(owner).__name__}.{name}", remedy)
    return None
