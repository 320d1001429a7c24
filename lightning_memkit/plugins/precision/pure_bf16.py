"""Pure bfloat16 training under any Lightning strategy, with the user's own optimizers."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, Literal, get_args

import torch
from lightning.fabric.utilities.device_dtype_mixin import _DeviceDtypeModuleMixin
from lightning.pytorch import LightningModule
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_memkit.distributed.shards import sharded_like
from lightning_memkit.initialization.building import build_on
from lightning_memkit.initialization.casting import cast_inputs, cast_module
from lightning_memkit.optim.accumulation import watch_accumulation
from lightning_memkit.optim.compensation import Compensation, compensation_of, refuse_unsupported
from lightning_memkit.optim.float32_checkpoints import capture_low_halves, take_low_halves
from lightning_memkit.optim.gradient_dtype import (
    GradDtype,
    GradientDtype,
    full_precision_reductions,
    why_no_float32_gradients,
)
from lightning_memkit.optim.methods import uses_closure_its_own_way
from lightning_memkit.optim.modes import Mode, States, low_state_of
from lightning_memkit.optim.pieces import is_compensated, slots
from lightning_memkit.plugins.misplaced import NoCallback
from lightning_memkit.plugins.precision._averages import average_in_float32, reload_averages
from lightning_memkit.plugins.precision._fit import (
    averages_late,
    batches_per_step,
    is_fitting,
    trainer_of,
    unwrapped,
)
from lightning_memkit.plugins.precision._optimizers import FitOptimizers
from lightning_memkit.utilities.patching import Undo, replace_method


class PureBF16Precision(NoCallback, Precision):
    """Weights, gradients and optimizer states in bfloat16 with no update lost: 10 bytes a parameter for AdamW, or 7.

    The module is cast in place, except for what must stay float32 (`casting.cast_module`). Float32 inputs are
    cast where a layer's weights need it; integers, float64 and targets never are. The default dtype stays
    float32. The optimizers of `configure_optimizers` step in float32 on the compensated weights
    (`optim.compensation.compensate`). Manual optimization works with any number of optimizers, through
    ``self.optimizers()``, the optimizers themselves, or such as the module makes and steps itself; the first step
    of these takes 16 bytes a parameter more. Checkpoints hold every state bit for bit.

    Args:
        compensation: ``"kahan"`` and ``"split"`` keep 2 bytes a parameter more; with ``"split"`` weight and
            compensation are the exact float32 master weight. ``"split24"`` keeps 1 byte more: the master weight's
            first 24 bits, rounded stochastically. ``"stochastic"`` rounds to bfloat16 stochastically, for 0 bytes.
            ``"none"`` loses small updates.
        states: ``"compact"`` keeps moments in bfloat16, the second stochastically rounded (10 bytes a
            parameter with ``"kahan"`` or ``"split"``); ``"8-bit"`` keeps them in 8 bits where rows have 32 values or
            more (8 bytes; 7 with ``"split24"``), rounded so that updates are right in the mean; ``"exact"`` keeps them
            in float32 (14 bytes).
        grad_dtype: ``"auto"`` accumulates gradients in float32 (2 bytes a parameter more) if an optimizer
            step has more than one micro-batch or batch, or a backward adds to gradients that were kept, and in
            bfloat16 otherwise. DDP and FSDP2 can't reduce float32 gradients of bfloat16 weights: there "auto"
            warns and "float32" is refused at setup, unless `MemoryBudget` averages DDP's gradients after the
            backward (``recover=True``).
        fp32_exceptions: Glob patterns of module, parameter, buffer or class names to keep in float32.

    Raises:
        ValueError: An option has an unknown value. At setup, an optimizer compares evaluations of its closure
            (LBFGS, line searches) and ``compensation`` is not ``"split"`` or ``states`` is not ``"exact"``.
        TypeError: At setup, an optimizer's step evaluates its closure itself (SAM, LBFGS) and its parameters
            are sharded. In its first step, an optimizer that the Trainer doesn't know has sharded parameters.
    """

    belongs = "plugins"

    precision: Literal["bf16-true"] = "bf16-true"

    def __init__(
        self,
        compensation: Mode = "kahan",
        states: States = "compact",
        grad_dtype: GradDtype = "auto",
        fp32_exceptions: Sequence[str] = (),
    ) -> None:
        for name, value, known in (
            ("compensation", compensation, get_args(Mode)),
            ("states", states, get_args(States)),
            ("grad_dtype", grad_dtype, get_args(GradDtype)),
        ):
            if value not in known:
                raise ValueError(f"{name}={value!r} is unknown; choose one of {', '.join(map(repr, known))}.")
        if isinstance(fp32_exceptions, str):
            raise ValueError(
                f"fp32_exceptions={fp32_exceptions!r} is one string; write a list of patterns: "
                f"[{fp32_exceptions!r}]."
            )
        self.compensation: Mode = compensation
        self.states: States = states
        self.grad_dtype: GradDtype = grad_dtype
        self.fp32_exceptions = tuple(fp32_exceptions)
        self._optimizers = FitOptimizers(compensation, states)
        self._module: nn.Module | None = None
        self._undo: list[Undo] = []
        self._undo_averages: Undo = _nothing
        self._gradients = GradientDtype(grad_dtype)
        self._watched: list[nn.Parameter] = []

    def __repr__(self) -> str:
        return (
            f"PureBF16Precision(compensation={self.compensation!r}, states={self.states!r}, "
            f"grad_dtype={self.grad_dtype!r}, fp32_exceptions={self.fp32_exceptions!r})"
        )

    def without_run(self) -> "PureBF16Precision":
        """The same options without the run's optimizers, whose states a prediction would count twice."""
        if type(self) is not PureBF16Precision:  # the options of a subclass are unknown
            return self
        return PureBF16Precision(self.compensation, self.states, self.grad_dtype, self.fp32_exceptions)

    @property
    def compensations(self) -> list[Compensation]:
        """The compensations of the Trainer's optimizers."""
        return self._optimizers.compensations

    @property
    def _low_halves(self) -> dict[nn.Parameter, Tensor]:
        return self._optimizers.low_halves

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_undo": [], "_undo_averages": _nothing, "_watched": []}

    def convert_module(self, module: nn.Module) -> nn.Module:
        """Cast the module in place; keep the low halves of float32 weights until a fit takes them."""
        self._undo_all()
        # The module stays cast after the run. Its low halves are in the old optimizers' states, so take them
        # for the next fit, which has new optimizers. Without a fit they are kept, too, since one may follow.
        wants_low = low_state_of(self.compensation) is not None
        if wants_low and is_fitting(module):
            self._low_halves.update(take_low_halves(module, self._optimizers.all))
        cast_module(
            module,
            torch.bfloat16,
            keep_float32=self.fp32_exceptions,
            low_halves=self._low_halves if wants_low else None,
        )
        _announce_dtype(module, torch.bfloat16)
        self._undo.append(cast_inputs(module, torch.bfloat16))
        return module

    def follow_sharding(self, before: Mapping[str, nn.Parameter], module: nn.Module) -> None:
        """Shard the kept low halves in the same way as the parameters.

        Args:
            before: the parameters that were cast, by name.
            module: the module, sharded.
        """
        for name, parameter in module.named_parameters():
            low = self._low_halves.pop(before[name], None) if name in before else None
            if low is not None:
                self._low_halves[parameter] = sharded_like(low, parameter)

    def tensor_init_context(self) -> AbstractContextManager:
        """Parameters made inside are created in bfloat16; the default dtype stays float32."""
        return build_on(None, torch.bfloat16)

    def module_init_context(self) -> AbstractContextManager:
        """Parameters made in `configure_model` are created in bfloat16; the default dtype stays float32."""
        return self.tensor_init_context()

    def connect(
        self, model: nn.Module, optimizers: list[Optimizer], lr_schedulers: list[Any]
    ) -> tuple[nn.Module, list[Optimizer], list[Any]]:
        """Compensate the optimizers of a fit and set the dtype of their gradients."""
        for optimizer in optimizers:
            refuse_unsupported(optimizer)
        if optimizers and is_fitting(model):
            self._module = unwrapped(model)
            self._undo.append(self._optimizers.begin(self._module, optimizers))
            self._undo.append(full_precision_reductions())
            self._undo.append(lambda: self._gradients.give_back(self._trainable_parameters()))
            why_not = why_no_float32_gradients(model, averaged_late=averages_late(model))
            self._gradients.begin(least_parts=batches_per_step(model), why_not=why_not)
            self.set_gradient_parts(1)
            self._watched = list(self._trainable_parameters())
            self._undo.append(watch_accumulation(self._undecided, self._see_accumulation))
        if (trainer := trainer_of(model)) is not None:  # callbacks swap in their averages after a fit, too
            self._undo_averages = average_in_float32(trainer, self._optimizers.of_trainer)
            self._undo.append(lambda: self._undo_averages())
            # After the user's hooks, which may exchange optimizers, and before the batch.
            strategy: Any = trainer.strategy
            self._undo.append(replace_method(strategy, "on_train_batch_start", self._before_batch))
        return model, optimizers, lr_schedulers

    def on_states_offloaded(self) -> None:
        """The optimizers' states now live in host memory: `OptimizerOffload` says so where it begins."""
        self._optimizers.give_waiting()

    def _before_batch(self, strategy: Any, plain: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self._optimizers.give_waiting()  # where nothing has said that states are offloaded by now
        self._follow()
        return plain(*args, **kwargs)

    def _follow(self) -> None:
        """Compensate optimizers that took others' place since the last look."""
        if self._optimizers.follow():
            self._watched = list(self._trainable_parameters())
            trainer = None if self._module is None else trainer_of(self._module)
            if trainer is not None:
                self._undo_averages()
                self._undo_averages = average_in_float32(trainer, self._optimizers.of_trainer)

    def _undecided(self) -> list[nn.Parameter]:
        return self._watched if self._gradients.is_undecided else []

    def _see_accumulation(self) -> None:
        self._gradients.see_accumulation(self._trainable_parameters, rank_zero_warn)

    def set_gradient_parts(self, parts: int) -> None:
        """Set how many backward passes accumulate into one step's gradients.

        With ``grad_dtype="auto"``, more than one makes gradients float32 (2 bytes a parameter more), since
        sums in bfloat16 stagnate, and one makes them bfloat16 again. Existing gradients are converted. The
        first step with float32 gradients logs their cost.
        """
        self._gradients.set_parts(parts, self._trainable_parameters, rank_zero_warn)

    def optimizer_step(
        self,
        optimizer: Any,
        model: LightningModule,
        closure: Callable[[], Any],
        **kwargs: Any,
    ) -> Any:
        """Run the closure, then Lightning's hooks and clipping, then the step.

        If `training_step` returned None and no gradient was accumulated before, there is no step. An
        optimizer that evaluates its closure itself (SAM, LBFGS) gets the closure, including hooks and
        clipping.
        """
        if compensation_of(optimizer) is None:
            self._follow()
        if uses_closure_its_own_way(optimizer):
            return optimizer.step(closure=partial(self._wrap_closure, model, optimizer, closure), **kwargs)
        result = self._wrap_closure(model, optimizer, closure)
        nothing = all(p.grad is None for group in optimizer.param_groups for p in group["params"])
        if result is None and model.automatic_optimization and nothing:
            return result
        optimizer.step(closure=lambda: result, **kwargs)
        return result

    def state_dict(self) -> dict[str, Any]:
        """What `FitOptimizers.state_dict` holds: names for `memkit consolidate`, noise, and low halves."""
        return self._optimizers.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue the noise, and the low halves of weights that no optimizer of the Trainer's steps."""
        self._optimizers.load_state_dict(state_dict)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Capture the low halves of a checkpoint's float32 tensors, which a bfloat16 module would drop."""
        if self._module is not None:
            capture_low_halves(checkpoint, self._module, self.compensations)
            if (trainer := trainer_of(self._module)) is not None:
                reload_averages(trainer, checkpoint)

    def teardown(self) -> None:
        """Remove hooks and restore torch's flags; optimizers stay compensated, so they can still be saved."""
        self._undo_all()

    def _compensated_parameters(self) -> list[nn.Parameter]:
        return [
            slot.parameter
            for compensation in self.compensations
            for slot in slots(compensation.optimizer)
            if is_compensated(slot.parameter)
        ]

    def _trainable_parameters(self) -> set[nn.Parameter]:
        """The parameters that optimizers step, and those that may join them later (BackboneFinetuning)."""
        module = self._module
        later = [] if module is None else [p for p in module.parameters() if is_compensated(p)]
        return {*self._compensated_parameters(), *later}

    def _undo_all(self) -> None:
        while self._undo:
            self._undo.pop()()


def _nothing() -> None:
    """Undoes nothing."""


def _announce_dtype(module: nn.Module, dtype: torch.dtype) -> None:
    """Set ``self.dtype`` of LightningModules to the dtype of their weights, as Lightning's own casts do."""
    for part in module.modules():
        if isinstance(part, _DeviceDtypeModuleMixin):
            part.__dict__["_dtype"] = dtype
