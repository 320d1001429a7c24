"""Train a case once and note, from outside, all that a user could see of it."""

import copy
import logging
import traceback
import warnings
import weakref
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn

from benchmarks import _exactness_models as models
from benchmarks._exactness_models import (
    EPOCHS,
    PARTS,
    ROWS_ACT,
    TERMS,
    Case,
    loader_of,
    rows_of,
    with_adapters,
)
from lightning_memkit import PureBF16Precision

Seen = dict[str, Any]  # names to tensors, numbers, texts

HIGHER = {"float32": "float64", "bf16-mixed": "float32", "pure-bf16": "float32", "lora": "lora in float64"}
SCALES, MORE_SCALES = (0.7, 0.9), (0.3, 0.6, 0.8, 1.1, 1.3, 1.7)  # of losses, in runs that tell rounding
# Of a product.
ROUNDINGS = {"float32": 2.0**-23, "bf16-mixed": 2.0**-8, "pure-bf16": 2.0**-8, "lora": 2.0**-8}
JITTERS = 8
_PRECISIONS = {"float64": "64-true", "bf16-mixed": "bf16-mixed", "lora in float64": "64-true"}


@dataclass
class Trace:
    """What a run showed.

    Attributes:
        start: the parameters before the first step.
        weights: the parameters after each batch.
        gradients: those that each optimizer step saw.
        outputs: what callbacks saw of each training_step.
        logged: what was logged after each batch, and at the ends of epochs.
        state: buffers and plain attributes at the end.
        split_at: the batches, over all epochs, whose last forward with a backward saw fewer rows than the loader gave.
        error: what ended the run.
        ours: whether memkit raised it as its own.
        at_step: the batch, over all epochs, at which it was raised.
        warned: the texts of all warnings.
        in_chunks: whether any batch ran whole with modules in chunks.
    """

    start: Seen = field(default_factory=dict)
    weights: list[Seen] = field(default_factory=list)
    gradients: list[Seen] = field(default_factory=list)
    outputs: list[Seen] = field(default_factory=list)
    logged: list[Seen] = field(default_factory=list)
    state: Seen = field(default_factory=dict)
    split_at: list[int] = field(default_factory=list)
    error: BaseException | None = None
    ours: bool = False
    at_step: int = 0
    warned: list[str] = field(default_factory=list)
    in_chunks: bool = False


class Recorder(Callback):
    """Notes a run into a trace; reads only.

    Args:
        trace: its caller keeps it. It holds the weights of all batches, and what a callback owns is in every
            snapshot before a comparison.
    """

    sees_micro_batches = True

    def __init__(self, trace: Trace) -> None:
        self._trace, self._rows = weakref.ref(trace), 0

    @property
    def trace(self) -> Trace:
        """The run's."""
        trace = self._trace()
        assert trace is not None
        return trace

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """The weights before the first step."""
        self.trace.start = parameters_of(pl_module)

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, *_: Any) -> None:
        """The rows that the loader gave."""
        models.seen.clear()
        models.with_backward.clear()
        self._rows = rows_of(batch)

    def on_before_optimizer_step(
        self, trainer: Trainer, pl_module: LightningModule, optimizer: torch.optim.Optimizer
    ) -> None:
        """The gradients, and how many rows the forward had that made the last of them."""
        self.trace.gradients.append(
            {
                n: p.grad.detach().double().clone()
                for n, p in pl_module.named_parameters()
                if p.grad is not None
            }
        )

    def on_before_backward(self, *_: Any) -> None:
        """The rows of a forward that is no trial's."""
        models.with_backward.append(models.seen[-1])

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, outputs: Any, *_: Any) -> None:
        """Weights, outputs, logged values."""
        trace = self.trace
        # Trials come before the step's own forwards, and may come after them; they run no hooks.
        rows = models.with_backward or models.seen[-1:]
        if rows and rows[-1] < self._rows:
            trace.split_at.append(trace.at_step)
        trace.weights.append(parameters_of(pl_module))
        trace.outputs.append(flattened(outputs))
        trace.logged.append(flattened(dict(trainer.callback_metrics)))
        trace.at_step += 1

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """The epoch's means, which are there after this hook of all callbacks but before `fit` returns."""
        self.trace.logged.append(flattened(dict(trainer.callback_metrics)))


class Rescaled(Callback):
    """Scales losses, and gradients back before anything reads them: equal but for rounding.

    Args:
        scale: no power of two, or nothing would be rounded otherwise.
    """

    def __init__(self, scale: float) -> None:
        self._scale = scale

    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: Tensor) -> None:
        """All gradients come from the loss's own."""
        loss.register_hook(lambda gradient: gradient * self._scale)

    def on_before_optimizer_step(
        self, trainer: Trainer, pl_module: LightningModule, optimizer: torch.optim.Optimizer
    ) -> None:
        """Before they are clipped."""
        for parameter in pl_module.parameters():
            if parameter.grad is not None:
                parameter.grad.div_(self._scale)


class Jittered(Callback):
    """Changes every gradient by about a rounding of its dtype: a kink that is near is passed in some runs.

    Of its own size, and of its parameter's: one that is small is a sum of larger ones, which were rounded.

    Args:
        seed: of the changes.
        rounding: relative.
    """

    def __init__(self, seed: int, rounding: float) -> None:
        self._generator, self._rounding = torch.Generator().manual_seed(seed), rounding

    def on_before_optimizer_step(
        self, trainer: Trainer, pl_module: LightningModule, optimizer: torch.optim.Optimizer
    ) -> None:
        """Before they are clipped, as the gradients of micro-batches are rounded."""
        for parameter in pl_module.parameters():
            if parameter.grad is not None:
                gradient = parameter.grad
                own, sums = torch.randn(2, *parameter.shape, generator=self._generator).to(gradient)
                size = gradient.square().mean().sqrt()
                gradient.mul_(1 + self._rounding * own).add_(self._rounding * size * sums)


def unsplit(case: Case, seed: int, dtype: str) -> tuple[Trace, list[Trace]]:
    """The case trained without memkit, and how it comes out where it is rounded otherwise."""
    plain = train(case, seed, dtype)
    if dtype not in HIGHER:
        return plain, []
    return plain, [train(case, seed, HIGHER[dtype]), *rescaled(case, seed, dtype, SCALES)]


def rescaled(case: Case, seed: int, dtype: str, scales: Sequence[float]) -> list[Trace]:
    """Unsplit runs that differ by rounding alone; none where what a step does need not be linear in its gradients."""
    if case.truth not in (PARTS, TERMS):
        return []
    return [train(case, seed, dtype, Rescaled(scale)) for scale in scales]


def jittered(case: Case, seed: int, dtype: str, *, in_chunks: bool = False) -> list[Trace]:
    """Unsplit runs whose gradients are off by roundings.

    None where rows act on each other, which these could hide, unless all batches ran whole, their modules in chunks.
    """
    if dtype not in ROUNDINGS or (case.truth == ROWS_ACT and not in_chunks):
        return []
    return [train(case, seed, dtype, Jittered(number, ROUNDINGS[dtype])) for number in range(JITTERS)]


def train(case: Case, seed: int, dtype: str, *callbacks: Callback) -> Trace:
    """Train the case from a seed; errors are noted, not raised."""
    trace = Trace()
    torch.manual_seed(seed)
    module = case.module()
    if dtype.startswith("lora"):
        with_adapters(module)
    torch.manual_seed(seed + 1)
    with warnings.catch_warnings(record=True) as caught, _quiet():
        warnings.simplefilter("always")
        try:
            trainer = Trainer(
                accelerator="cpu", devices=1, logger=False, enable_checkpointing=False,
                enable_progress_bar=False, enable_model_summary=False, max_epochs=EPOCHS,
                callbacks=[*callbacks, *case.callbacks(), Recorder(trace)],
                **_precision(dtype, seed), **case.trainer,
            )  # fmt: skip
            trainer.fit(module, loader_of(case, seed))
            trace.logged.append(flattened(dict(trainer.callback_metrics)))
        except Exception as error:  # every kind is a finding
            trace.error, trace.ours = error, is_ours(error)
            trace.weights.append(parameters_of(module))
    trace.state = state_of(module)
    trace.warned = [str(warning.message) for warning in caught]
    return trace


def parameters_of(module: nn.Module) -> Seen:
    """Copies of the parameters in float64."""
    return {
        name: parameter.detach().double().clone()
        for name, parameter in module.named_parameters()
        if not isinstance(parameter, nn.parameter.UninitializedParameter)
    }


def state_of(module: nn.Module) -> Seen:
    """Buffers and plain attributes of the module and of all in it."""
    found: Seen = dict(flattened(dict(module.named_buffers())))
    for path, child in module.named_modules():
        own = {
            name: value for name, value in vars(child).items()
            if not name.startswith("_") and isinstance(value, (int, float, str, Tensor, list, tuple, dict, deque))
        }  # fmt: skip
        found |= flattened(own, f"{path}.")
    return found


def flattened(value: Any, path: str = "") -> Seen:
    """Tensors, numbers and texts anywhere in it by their path; lengths of lists too."""
    if isinstance(value, Tensor):
        return {path: value.detach().double().clone()}
    if isinstance(value, (bool, int, str)) or value is None:
        return {path: value}
    if isinstance(value, float):
        return {path: torch.tensor(value, dtype=torch.float64)}
    found: Seen = {}
    if isinstance(value, Mapping):
        for name, one in value.items():
            found |= flattened(one, f"{path}{name}.")
    elif isinstance(value, (list, tuple, deque)):
        found[f"{path}len"] = len(value)
        for index, one in enumerate(value):
            found |= flattened(one, f"{path}{index}.")
    return found


def _precision(dtype: str, seed: int) -> dict[str, Any]:
    if dtype == "pure-bf16":
        kinds = [{}, {"compensation": "split", "states": "exact"}]
        return {"plugins": [PureBF16Precision(**copy.copy(kinds[seed % 2]))]}
    return {"precision": _PRECISIONS.get(dtype, "32-true")}


def is_ours(error: BaseException) -> bool:
    """Whether memkit's own `raise` made it, as an error that a user is meant to read."""
    frames = traceback.extract_tb(error.__traceback__)
    raised_by_us = bool(frames) and "/lightning_memkit/" in frames[-1].filename
    raised_by_us = raised_by_us and (frames[-1].line or "").lstrip().startswith("raise ")
    readable = isinstance(error, (ValueError, RuntimeError, TypeError)) and not isinstance(
        error, (NotImplementedError, RecursionError)
    )
    return readable and (raised_by_us or type(error).__module__.startswith("lightning_memkit"))


class _quiet:  # noqa: N801
    """Lightning's remarks on devices are of no use here."""

    def __enter__(self) -> None:
        self._loggers = [logging.getLogger(name) for name in ("lightning.pytorch", "lightning_memkit")]
        self._levels = [logger.level for logger in self._loggers]
        for logger in self._loggers:
            logger.setLevel(logging.ERROR)

    def __exit__(self, *_: object) -> None:
        for logger, level in zip(self._loggers, self._levels, strict=True):
            logger.setLevel(level)
