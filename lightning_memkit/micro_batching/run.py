"""The engine's interface to a training loop: a `Run` for the whole loop, a `Step` for each batch.

Both classes implement a plain torch loop on one device. Other loops override what differs: Lightning's
subclasses are in `plugins/seams/lightning_run.py` and `plugins/seams/training_loop.py`.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_memkit.activations.planned import BudgetPlan
from lightning_memkit.micro_batching.splitting import batch_size, split_batch
from lightning_memkit.optim.methods import local_optimizer
from lightning_memkit.utilities.patching import Undo

T = TypeVar("T")
Logged = dict[str, Any]  # the keyword arguments of one call of a module's `log`: fx, name, value and others


class Run:
    """A training loop: its module, optimizers, device and ranks, and what it does with micro-batches.

    Args:
        module: the module that is trained.
        optimizers: the optimizers that step its parameters.
        device: where the module is; by default the device of its first parameter.
        transfer: moves a micro-batch to the device; by default nothing is moved.

    Attributes:
        precision: as Lightning names it; `32-true` and `64-true` compute in the dtype of the weights.
        world_size: the number of ranks.
        batches_a_step: how many batches the loop accumulates into one optimizer step, each weighing the same.
        steps_taken: optimizer steps so far.
        meets_in_every_micro_batch: ranks communicate in each forward and backward (sharded parameters).
        sums_gradients_otherwise: gradients of several micro-batches are accumulated in another dtype than the
            gradients of one micro-batch have.
        recomputes_activations: some activations are recomputed already.
        offloads_states: the optimizer's states are in host memory already.
        recomputation: an activation-checkpointing plan that may recompute more or less to fit the measured
            peak; None without one.
        loader_batch_size: rows of a batch as the loader's settings state it; None if they don't.
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
        """The module that is trained."""
        return self._module

    @property
    def wrapped(self) -> nn.Module | None:
        """The module in its distributed wrapper (DDP, say), if it has one."""
        return self.module

    @property
    def ranks_by(self) -> str:
        """The name of the class that runs the ranks (a strategy), for messages."""
        return type(self).__name__

    @property
    def optimizers(self) -> Sequence[Optimizer]:
        """All optimizers that step the module's parameters."""
        return self._optimizers

    @property
    def device(self) -> torch.device:
        """The module's device."""
        if self._device is not None:
            return self._device
        return next((parameter.device for parameter in self.module.parameters()), torch.device("cpu"))

    def transfer(self, micro_batch: Any) -> Any:
        """Move a micro-batch to the device."""
        return micro_batch if self._transfer is None else self._transfer(micro_batch)

    def worst_batch(self, batch: Any, rows: int) -> Any:
        """A batch of `rows` samples of the largest size in training; here the given batch's first rows."""
        total = batch_size(batch)
        return batch if rows >= total else split_batch(batch, [rows, total - rows])[0]

    def scanned_once(self) -> AbstractContextManager[None]:
        """A context within which `worst_batch` reads the data only once, however often it is called."""
        return nullcontext()

    def set_gradient_parts(self, parts: int) -> None:
        """Tell the loop over how many micro-batches each batch's gradients are accumulated from here on."""

    def gradient_sync(self, *, wanted: bool) -> AbstractContextManager[None]:
        """A context within which a backward averages gradients over ranks only if `wanted`."""
        return nullcontext()

    def clip_by(self, clip: Callable[[Iterable[nn.Parameter], float], bool]) -> Undo:
        """Let `clip` clip gradients by their norm; it returns whether it did. Returns the undo."""
        return lambda: None

    def of_first_rank(self, answer: Callable[[], T]) -> T:
        """Call `answer` on the first rank, and return its result on all ranks."""
        return answer()

    @property
    def is_first_rank(self) -> bool:
        """Whether this is the rank that writes files."""
        return True

    @contextmanager
    def logging_held(self) -> Iterator[list[Logged]]:
        """A context that collects what the module logs, instead of adding it to the loop's results."""
        yield []

    def log_now(self, entry: Logged) -> None:
        """Log one entry that `logging_held` has collected."""

    def keep_results(self) -> Undo:
        """Returns a function that restores the logged values of now."""
        return lambda: None

    def loggers_silent(self) -> AbstractContextManager[None]:
        """A context within which what a module sends to loggers directly is dropped."""
        return nullcontext()

    @contextmanager
    def nothing_logged(self) -> Iterator[list[Logged]]:
        """A context for trials: collects what the module logs; nothing of it counts or reaches a logger."""
        with self.loggers_silent(), self.logging_held() as held:
            yield held

    def zeroes_gradients(self, optimizer: Optimizer) -> bool:
        """Whether each window begins without gradients: zero_grad leaves none of the optimizer's parameters."""
        return True

    def keep_scaler(self) -> Undo:
        """Returns a function that resets which gradients a gradient scaler has unscaled."""
        return lambda: None

    def changed_beside(self) -> dict[str, Any]:
        """Objects that a step may change besides the module and the optimizers, by name: hooks' owners."""
        return {}

    def steppers(self, step: "Step") -> dict[str, Optimizer]:
        """The optimizers of the run, by name, whose settings and states a step may change before they step."""
        named = {f"optimizers[{index}]": one for index, one in enumerate(self.optimizers)}
        if not any(one is step.optimizer for one in named.values()):
            named["optimizer"] = step.optimizer
        locals_ = {f"{name}.optim": local_optimizer(one) for name, one in named.items()}
        return named | {
            name: one for name, one in locals_.items() if one is not named[name[: -len(".optim")]]
        }

    def hooks_by_micro_batch(self) -> list[str]:
        """The names of the user's hooks that see the gradients of each micro-batch."""
        return []

    def hooks_before_zero_grad(self) -> list[str]:
        """The names of the user's hooks that run before gradients are zeroed."""
        return []

    def out_of_memory(self, error: BaseException) -> None:
        """Notify observers of an OOM while its traceback still keeps the failed step's tensors alive."""

    def settings(self) -> dict[str, Any]:
        """Further settings on which a step's time depends, as plain JSON."""
        return {}

    def info(self, text: str) -> None:
        """Log information for the user, on the first rank."""

    def debug(self, text: str) -> None:
        """Log a detail for debugging the engine."""

    def warn(self, text: str) -> None:
        """Warn, on the first rank."""


class Step:
    """One batch of a plain torch loop, as operations that may each run several times.

    An accumulation window is the sequence of loader batches whose gradients make one optimizer step.

    Args:
        run: the loop. Its first optimizer steps after the last batch of a window.
        batch: the batch from the loader.
        loss_of: computes the loss of some rows; None skips them.
        batch_idx: the index of the batch in the epoch.
        starts_window: this is the first (or only) batch of its window: gradients are zeroed in it.
        ends_window: this is the last batch of its window: the optimizer steps after it.
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
        """The loss of a micro-batch, and the other values that the training step returned."""
        return self._loss_of(micro_batch), {}

    def zero_grad(self) -> None:
        """Zero the gradients if this batch is the first of its window."""
        if self.starts_window:
            self.optimizer.zero_grad()

    def backward(self, loss: Tensor) -> None:
        """The loop's backward from a micro-batch's loss."""
        loss.backward()

    def after_backward(self) -> None:
        """Called once a batch's gradients are complete."""

    def quiet_backward(self, loss: Tensor) -> None:
        """The backward without hooks and loss scaling, for trials."""
        loss.backward()

    def keep_counters(self) -> Undo:
        """Returns a function that resets the loop's progress counters to their values of now."""
        return lambda: None
