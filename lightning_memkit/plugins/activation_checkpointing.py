"""The Lightning adapter of `checkpoint_modules`."""

from collections.abc import Callable, Sequence

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.model_helpers import is_overridden

from lightning_memkit.activations.blocks import refuse_single_pattern
from lightning_memkit.activations.checkpointing import checkpoint_modules
from lightning_memkit.activations.policies import parse_policy


class ActivationCheckpointing(Callback):
    """Keeps only the inputs of the model's blocks while fitting; costs one more forward of those blocks.

    Loss and gradients stay bitwise the same. Blocks are found by themselves in transformers models and in any
    model that repeats a module within a `ModuleList` or `Sequential`. Models built late, in
    `configure_model`, are covered too. The forwards are put back when fitting ends.

    Args:
        policy: `full` checkpoints every block, `every:k` (such as `every:2`) the blocks 0, k, 2k, ....
        blocks: names of the blocks in place of those found: globs over module names (`encoder.layers.*`) and
            class names (`Llama*Layer`).

    Raises:
        ValueError: the policy is unknown, or `blocks` is one string and no list.
    """

    def __init__(self, policy: str = "full", blocks: Sequence[str] | None = None) -> None:
        parse_policy(policy)
        if blocks is not None:
            refuse_single_pattern(blocks)
        self.policy = policy
        self.blocks = None if blocks is None else list(blocks)
        self._undo: Callable[[], None] | None = None

    def __repr__(self) -> str:
        return f"{type(self).__name__}(policy={self.policy!r}, blocks={self.blocks!r})"

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Patch a model that exists by now, so that later hooks (a trial of the worst batch) see it so."""
        if stage == "fit" and not is_overridden("configure_model", pl_module):
            self._patch(pl_module)

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Patch a model that `configure_model` has built."""
        if self._undo is None:
            self._patch(pl_module)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Lightning calls no teardown after an error."""
        self._restore()

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Put the forwards back."""
        self._restore()

    def _patch(self, pl_module: LightningModule) -> None:
        self._undo = checkpoint_modules(pl_module, self.policy, blocks=self.blocks)

    def _restore(self) -> None:
        if self._undo is not None:
            self._undo()
            self._undo = None
