"""What the engine knows of a training loop: a `Run` for all of it, a `Step` for each batch.

Both are a plain torch loop's on one device. Another loop overrides what it does otherwise: Lightning's are in
`plugins/seams/lightning_run.py` and `plugins/seams/training_loop.py`.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_memkit.activations.planned import BudgetPlan
from lightning_memkit.micro_batching.splitting import batch_size, split_batch
from lightning_memkit.utilities.patching import Undo

T = TypeVar("T")
Logged = dict[str, Any]  # the keywords of one call of a module's `log`: fx, name, value and the rest


class Run:
    """A training loop: its module, optimizers, device and ranks, and what it does with micro-batches.

    Args:
        module: what trains.
        optimizers: step its parameters.
        device: where it is; by default where its first parameter is.
        transfer: moves a micro-batch to the device; by default nothing is moved.

    Attributes:
        precision: as Lightning names it; `32-true` and `64-true` are those without rounding below the weights' own.
        world_size: the number of ranks.
        batches_a_step: how many batches the loop accumulates into one optimizer step, each weighing the same.
        steps_taken: optimizer steps so far.
        meets_in_every_micro_batch: ranks communicate in each forward and backward (sharded parameters).
        sums_gradients_otherwise: gradients of several micro-batches are summed in another dtype than one's.
        recomputes_activations: some are recomputed already.
        offloads_states: the optimizer's states lie on the host already.
        recomputation: a plan that may recompute more or less, to fit what was measured; None where there is none.
        loader_batch_size: rows of a loader's batch, where that is written down.
    """

    precision = "32-true"
    world_size = 1
    batches_a_step = 1
    steps_taken = 0
    meets_in_every_micro_batch = False
    sums_gradients_otherwise = False
    recomputes_activations = False
    offloads_states = False
    recomputation: BudgetPlan | None = None
    loader_batch_size: int | None = None

    def __init__(
        self,
        module: nn.Module,
        optimizers: Sequence[Optimizer],
        *,
        device: torch.device | None = None,
        transfer: Callable[[Any], Any] | None = None,
    ) -> None:
        self._module = module
        self._optimizers = list(optimizers)
        self._device = device
        self._transfer = transfer

    @property
    def module(self) -> nn.Module:
        """What trains."""
        return self._module

    @property
    def wrapped(self) -> nn.Module | None:
        """The module as ranks have wrapped it."""
        return self.module

    @property
    def ranks_by(self) -> str:
        """The name of what runs the ranks, for messages."""
        return type(self).__name__

    @property
    def optimizers(self) -> Sequence[Optimizer]:
        """All that step the module's parameters."""
        return self._optimizers

    @property
    def device(self) -> torch.device:
        """Where the module is."""
        if self._device is not None:
            return self._device
        return next((parameter.device for parameter in self.module.parameters()), torch.device("cpu"))

    def transfer(self, micro_batch: Any) -> Any:
        """A micro-batch on the device."""
        return micro_batch if self._transfer is None else self._transfer(micro_batch)

    def worst_batch(self, batch: Any, rows: int) -> Any:
        """A batch of `rows` samples as large as training may meet; here the first rows of the batch at hand."""
        total = batch_size(batch)
        return batch if rows >= total else split_batch(batch, [rows, total - rows])[0]

    def scanned_once(self) -> AbstractContextManager[None]:
        """Within it, whatever `worst_batch` reads to find a batch is read once."""
        return nullcontext()

    def set_gradient_parts(self, parts: int) -> None:
        """How many micro-batches each batch's gradients are summed over from here on."""

    def gradient_sync(self, *, wanted: bool) -> AbstractContextManager[None]:
        """Within it ranks average gradients in a backward only where that is wanted."""
        return nullcontext()

    def clip_by(self, clip: Callable[[Iterable[nn.Parameter], float], bool]) -> Undo:
        """Let `clip` clip gradients by their norm where it can (it tells); returns the undo."""
        return lambda: None

    def of_first_rank(self, answer: Callable[[], T]) -> T:
        """What the first rank answers, on all ranks."""
        return answer()

    @property
    def is_first_rank(self) -> bool:
        """Whether this is the rank that writes files."""
        return True

    @contextmanager
    def logging_held(self) -> Iterator[list[Logged]]:
        """Collects what the module logs instead of counting it."""
        yield []

    def log_now(self, entry: Logged) -> None:
        """Count one entry that `logging_held` has collected."""

    def keep_results(self) -> Undo:
        """Returns a function that puts the values logged so far back to what they are now."""
        return lambda: None

    def loggers_silent(self) -> AbstractContextManager[None]:
        """Within it, what a module sends to loggers by itself goes nowhere."""
        return nullcontext()

    def keep_scaler(self) -> Undo:
        """Returns a function that lets a gradient scaler forget which gradients it has unscaled since."""
        return lambda: None

    def changed_beside(self) -> dict[str, Any]:
        """What a step may change besides the module, by name: settings of optimizers, objects with hooks in it."""
        return {
            f"optimizers[{index}].param_groups[{number}]": group
            for index, optimizer in enumerate(self.optimizers)
            for number, group in enumerate(optimizer.param_groups)
        }

    def hooks_by_micro_batch(self) -> list[str]:
        """The user's hooks that see the gradients of each micro-batch, by name."""
        return []

    def out_of_memory(self, error: BaseException) -> None:
        """Tell whoever wants to look at what is alive, while the error's traceback still holds it."""

    def settings(self) -> dict[str, Any]:
        """What else a step's time depends on, as plain JSON."""
        return {}

    def info(self, text: str) -> None:
        """Say something of the run, on the first rank."""

    def debug(self, text: str) -> None:
        """Say something for whoever looks into the engine."""

    def warn(self, text: str) -> None:
        """Warn, on the first rank."""


class Step:
    """One batch of a loop, in pieces that may run several times; this one is a plain torch loop's.

    Args:
        run: the loop. Its first optimizer steps after the last batch of a window.
        batch: what the loader gave.
        loss_of: gives the loss of some rows; None passes them over.
        batch_idx: the epoch's batch.
        starts_window: gradients are zeroed in it: it is the first (or only) batch to accumulate.
        ends_window: the optimizer steps after it.
    """

    run: Run
    batch: Any
    batch_idx: int
    optimizer: Optimizer
    ends_window: bool

    def __init__(
        self,
        run: Run,
        batch: Any,
        loss_of: Callable[[Any], Tensor | None],
        *,
        batch_idx: int = 0,
        starts_window: bool = True,
        ends_window: bool = True,
    ) -> None:
        self.run, self.batch, self.batch_idx = run, batch, batch_idx
        self.optimizer = run.optimizers[0]
        self.ends_window = ends_window
        self._loss_of, self._starts_window = loss_of, starts_window

    @property
    def starts_window(self) -> bool:
        """Whether gradients are zeroed in this step."""
        return self._starts_window

    def forward(self, micro_batch: Any) -> tuple[Tensor | None, dict[str, Any]]:
        """The loss of a micro-batch, and what else the step returned."""
        return self._loss_of(micro_batch), {}

    def zero_grad(self) -> None:
        """Zero the gradients, where this batch is the first to accumulate."""
        if self.starts_window:
            self.optimizer.zero_grad()

    def backward(self, loss: Tensor) -> None:
        """The loop's backward of a micro-batch's loss."""
        loss.backward()

    def after_backward(self) -> None:
        """What the loop does once a batch's gradients are complete."""

    def quiet_backward(self, loss: Tensor) -> None:
        """The module's own backward, without hooks and scaling: for trials."""
        loss.backward()

    def keep_counters(self) -> Undo:
        """Returns a function that puts the loop's progress counters back to where they are now."""
        return lambda: None
