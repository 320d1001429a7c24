"""The Lightning adapter of `use_chunked_loss`."""

from collections.abc import Callable, Sequence

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.model_helpers import is_overridden

from lightning_memkit.loss.backends import Backend
from lightning_memkit.loss.switch import refuse_options, use_chunked_loss
from lightning_memkit.plugins.pickling import LeavesRunBehind, nothing


class ChunkedLoss(LeavesRunBehind, Callback):
    """Computes the model's own loss without its logits in memory; in bfloat16 one more product of the head.

    For models of the transformers package that are called with `labels`, and for every linear layer named in
    `heads`, in fitting, validation and tests. Loss and gradients are the model's own up to rounding. Models
    built late, in `configure_model`, are covered too. The original forwards are restored when the run ends.

    Args:
        heads: the `nn.Linear` layers whose output goes to `F.cross_entropy`, as globs over module names
            (`head`, `decoder.*.out`), instead of the heads of transformers models.
        backend: the implementation of the loss: `auto`, `memkit`, `torch`, `liger` or `cut_cross_entropy`;
            see `linear_cross_entropy`.
        skip_ignored: False: ignored tokens take part in the products, and the loss does not wait for a GPU.

    Raises:
        ValueError: `heads` is a single string instead of a list; the backend is unknown, or decides itself what
            to skip; at setup: no head was found, or one can't be replaced.
    """

    plan_column = "loss"
    of_run = {"_undo": nothing}

    def __init__(
        self, heads: Sequence[str] | None = None, backend: Backend = "auto", *, skip_ignored: bool = True
    ) -> None:
        refuse_options(heads, backend, skips=skip_ignored)
        self.heads = None if heads is None else list(heads)
        self.backend: Backend = backend
        self.skip_ignored = skip_ignored
        self._undo: Callable[[], None] | None = None

    def __repr__(self) -> str:
        skips = "" if self.skip_ignored else ", skip_ignored=False"
        return f"{type(self).__name__}(heads={self.heads!r}, backend={self.backend!r}{skips})"

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Patch a model that exists already, so that later hooks (such as a trial) see it patched."""
        if stage != "predict" and not is_overridden("configure_model", pl_module):
            self._patch(pl_module)

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Patch a model that `configure_model` has built."""
        self._patch(pl_module)

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Patch such a model if only validation runs."""
        self._patch(pl_module)

    def on_test_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Patch such a model for tests."""
        self._patch(pl_module)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Restore the forwards here, too: Lightning calls no teardown after an error."""
        self._restore()

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Restore the original forwards."""
        self._restore()

    def _patch(self, pl_module: LightningModule) -> None:
        if self._undo is None:
            self._undo = use_chunked_loss(
                pl_module, heads=self.heads, backend=self.backend, skip_ignored=self.skip_ignored
            )

    def _restore(self) -> None:
        if self._undo is not None:
            self._undo()
            self._undo = None
