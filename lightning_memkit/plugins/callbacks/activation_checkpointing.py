"""The Lightning adapter of `checkpoint_modules`."""

import warnings
from collections.abc import Sequence

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.model_helpers import is_overridden

from lightning_memkit.activations.blocks import refuse_single_pattern
from lightning_memkit.activations.checkpointing import Checkpointed, checkpoint_modules
from lightning_memkit.activations.planned import BudgetPlan
from lightning_memkit.activations.policies import parse_policy
from lightning_memkit.plugins.asked import refuse_twin
from lightning_memkit.plugins.pickling import LeavesRunBehind, nothing
from lightning_memkit.utilities.errors import NoEffectWarning


class ActivationCheckpointing(LeavesRunBehind, Callback):
    """Saves fewer activations while fitting; costs up to one more forward of the model's blocks.

    Loss and gradients stay bitwise the same (on CUDA with `Trainer(deterministic=True)`; under `compile:x`
    they are those of the compiled blocks). Blocks are found automatically in transformers models and in any
    model that repeats a module within a `ModuleList` or `Sequential`. Models built late, in
    `configure_model`, are covered too. The original forwards are restored when fitting ends.

    Args:
        policy: `full` checkpoints every block, `every:k` (such as `every:2`) the blocks 0, k, 2k, ....
            `selective` saves attention and every second matmul of each block,
            `selective:attention,matmul/2,silu` the operators it names. `budget:x` (such as `budget:0.5` or
            `budget:2GiB`) keeps the saved activations within a fraction of their size without checkpointing,
            or within a number of bytes, with as little recomputation as possible. `auto` derives that limit
            from the MemoryBudget in the same Trainer, and corrects it once if the peak that MemoryBudget
            measures exceeds the budget or leaves more than 5 % of it unused; `auto:22GiB` derives it from a
            whole step of that size. `compile:x` compiles each block with torch's own activation memory budget
            of x; if x does not lower the peak, another value is used and a warning says so.
        blocks: the blocks to use instead of those found: globs over module names (`encoder.layers.*`) and
            class names (`Llama*Layer`).

    Raises:
        ValueError: the policy is unknown, `blocks` is a single string instead of a list, or (at setup) `auto`
            finds no MemoryBudget.
    """

    of_run = {"_undo": nothing}
    plan_column = "checkpointing"
    recomputes_activations = True

    def __init__(self, policy: str = "full", blocks: Sequence[str] | None = None) -> None:
        if policy != "auto":
            parse_policy(policy)
        if blocks is not None:
            refuse_single_pattern(blocks)
        self.policy = policy
        self.blocks = None if blocks is None else list(blocks)
        self._undo: Checkpointed | None = None

    def __repr__(self) -> str:
        return f"{type(self).__name__}(policy={self.policy!r}, blocks={self.blocks!r})"

    @property
    def chosen_for_step(self) -> BudgetPlan | None:
        """The plan that `"auto"` chose, while fitting; `MemoryBudget` corrects it by a measured peak."""
        return self._undo.plan if self._undo is not None and self.policy == "auto" else None

    def as_predicted(self) -> "ActivationCheckpointing":
        """The callback to predict with: `"auto"` becomes `"full"`, its choice at the largest sizes."""
        return ActivationCheckpointing("full", self.blocks) if self.policy == "auto" else self

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Patch a model that exists already, so that later hooks (such as a trial) see it patched."""
        refuse_twin(trainer, self)
        if stage == "fit" and not is_overridden("configure_model", pl_module):
            self._patch(trainer, pl_module)

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Patch a model that `configure_model` has built; warn if eval mode would disable checkpointing."""
        if self._undo is None:
            self._patch(trainer, pl_module)
        self._report_eval_mode()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Restore the forwards here, too: Lightning calls no teardown after an error."""
        self._restore()

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Restore the original forwards."""
        self._restore()

    def _patch(self, trainer: Trainer, pl_module: LightningModule) -> None:
        policy = self._auto(trainer) if self.policy == "auto" else self.policy
        self._undo = checkpoint_modules(pl_module, policy, blocks=self.blocks)

    def _report_eval_mode(self) -> None:
        """Warn if all blocks are in eval mode, in which transformers' `from_pretrained` returns models."""
        blocks = self._undo.blocks if self._undo is not None else ()
        if blocks and not any(block.training for block in blocks):
            warnings.warn(
                f"All {len(blocks)} blocks are in eval mode, in which no activation is checkpointed (and no dropout "
                "is applied); call train() on the model where it is built, such as from_pretrained(...).train().",
                NoEffectWarning,
                stacklevel=2,
            )

    def _auto(self, trainer: Trainer) -> str:
        for callback in vars(trainer)["callbacks"]:
            usable = getattr(callback, "usable_bytes_on", None)
            if usable is not None:
                return f"auto:{usable(trainer.strategy.root_device)}B"
        raise ValueError(
            'ActivationCheckpointing(policy="auto") finds no budget: put a MemoryBudget among the callbacks, or write '
            'the size of a step, such as policy="auto:22GiB".'
        )

    def _restore(self) -> None:
        if self._undo is not None:
            self._undo()
            self._undo = None
