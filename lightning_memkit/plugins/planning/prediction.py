"""Predict the memory of training from a module and a batch, before anything is allocated."""

import copy
import inspect
import logging
import os
import tempfile
import warnings
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import (
    Checkpoint,
    DeviceStatsMonitor,
    EarlyStopping,
    LearningRateMonitor,
    ModelSummary,
    ProgressBar,
    ThroughputMonitor,
    Timer,
)
from torch.optim import Optimizer

from lightning_memkit.data.batching.random_numbers import GlobalNumbers
from lightning_memkit.plugins.asked import budgets_among, says
from lightning_memkit.plugins.planning._first_batch import batch_of
from lightning_memkit.plugins.planning._predicted_ranks import many_ranks
from lightning_memkit.plugins.planning._sharded_prediction import ddp_in_buckets
from lightning_memkit.prediction.contained import NO_AUTOGRAD_IN_FORKS
from lightning_memkit.prediction.devices import Device, device_named
from lightning_memkit.prediction.fake_results import contained_simulation
from lightning_memkit.prediction.pretrained import without_reading_weights
from lightning_memkit.prediction.ranks import RankSimulation, zero_redundancy_optimizer
from lightning_memkit.prediction.refusals import check_batch, explained
from lightning_memkit.prediction.result import Prediction
from lightning_memkit.prediction.simulation import Simulation
from lightning_memkit.prediction.whole_steps import STEPS, BatchCopies, predicted_steps
from lightning_memkit.utilities.errors import PredictionError
from lightning_memkit.utilities.tensors import tensors_of

_WATCHERS = (
    Checkpoint, DeviceStatsMonitor, EarlyStopping, LearningRateMonitor, ModelSummary, ProgressBar, ThroughputMonitor,
    Timer,
)  # fmt: skip
_OWN = {
    "accelerator": "cpu",
    "devices": 1,
    "num_nodes": 1,
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "num_sanity_val_steps": 0,
    "limit_val_batches": 0,
}
_OF_NO_MATTER = (
    "max_epochs", "min_epochs", "max_steps", "min_steps", "max_time", "limit_train_batches", "fast_dev_run",
    "overfit_batches", "val_check_interval", "check_val_every_n_epoch", "default_root_dir", "profiler",
)  # fmt: skip


def predict_memory(
    module: LightningModule | Callable[..., Any],
    batch: Any,
    *,
    trainer: Mapping[str, Any] | None = None,
    device: str | Device = "cpu",
    timeout_s: float = 600,
) -> Prediction:
    """Predicts the peak memory of training and where every byte goes, with nothing allocated; takes seconds.

    Two optimizer steps run on fake tensors, which have shapes but no memory, through Lightning's own loop
    with the given options: precision, plugins, callbacks, accumulation, clipping. Bytes are those of the
    device's kernels. A few CPU kernels, whose workspaces are not documented, run once on data of that shape
    (64 MiB at most). The GPU need not be present: torch's choices on CUDA are made on the CPU's fake tensors,
    and its allocator is replayed. The steps run in a fork of this process, or on a copy of the module if there
    are no forks or this process has used an accelerator: the module, its optimizers, random state and files
    stay unchanged.

    Values that follow from the batch's integers are computed: how many labels count, where documents end.
    Values that only training knows are assumed to be those of a healthy step (finite losses, equally loaded
    experts); the result's `assumed` says where that was needed. Code that torch.compile would run is
    predicted as eager code.

    Several ranks, on any number of nodes, are predicted from this one process: the result is that of the rank
    with the highest peak. DDP's buckets, ZeRO-1's shards and what FSDP2 gathers, prefetches and reduces are
    counted; what FSDP2 offloads counts as host memory, and the CPU steps it.

    Args:
        module: a LightningModule; or a function without arguments that builds one, for models that this host
            can't hold; or a function of the batch that is a whole training step (forward, backward,
            optimizer), without Lightning.
        batch: what a loader would yield, on the host; or a loader or data module, whose first batch is taken.
        trainer: arguments of the `Trainer` that will train: `precision`, `plugins`, `callbacks`,
            `accumulate_grad_batches`, `gradient_clip_val`; for several ranks `devices` and `num_nodes` as
            numbers, and `strategy`: `"ddp"` and its variants, a `DDPStrategy`, a `ModelParallelStrategy` with
            `tensor_parallel_size=1`, `"memkit_fsdp2"`, an `FSDP2Strategy`, `"memkit_zero1"` or a
            `ZeRO1Strategy`. The length of training, its logging and its accelerator are ignored, and so are
            callbacks that only watch.
        device: `"cpu"`, the name of a GPU (`"rtx4090"`, `"a100-40gb"`; `prediction.devices.DEVICES` lists
            all), or a `Device` that describes one.
        timeout_s: seconds after which the prediction is given up; in a fork only.

    Raises:
        PredictionError: the step needs a value that only training knows, or something that only the real
            Trainer has (the message names the line); or torch can't tell the shapes of an operator's results;
            or no optimizer step was taken.
        TypeError: `module` is none of these.
        ValueError: the batch holds tensors that are not dense, `trainer` has an argument that can't be
            predicted or does not determine the number of ranks, or the device is unknown.
    """
    options, ranks = _checked(dict(trainer or {}))
    if ranks:
        zero_redundancy_optimizer()  # imported here, once for all forks
    batch = batch_of(batch)
    check_batch(batch)
    target = None if device == "cpu" else device_named(device)

    def simulation() -> Simulation:
        return RankSimulation(ranks, target) if ranks else Simulation(target)

    if isinstance(module, LightningModule):
        return _apart(
            lambda: _fit(module, batch, options, simulation()),
            lambda: _fit_copy(module, batch, options, simulation()),
            timeout_s,
        )
    if isinstance(module, torch.nn.Module) or not callable(module):
        raise TypeError(
            f"module is a {type(module).__name__}; give a LightningModule, a function without arguments that builds "
            "one, or a function of the batch that does a whole training step."
        )
    if _takes_a_batch(module):
        if ranks:
            raise ValueError(
                f"trainer asks for {ranks} rank(s), and a training step that is a function has no Trainer: give a "
                "LightningModule, or leave trainer out to predict one device."
            )
        return _apart(lambda: predicted_steps(module, batch, Simulation(target)), _refused, timeout_s)

    return _apart(
        lambda: _fit(module, batch, options, simulation()),
        lambda: _leaving_no_trace(lambda: _fit(module, batch, copy.deepcopy(options), simulation())),
        timeout_s,
    )


def _apart(in_fork: Callable[[], Prediction], here: Callable[[], Prediction], timeout_s: float) -> Prediction:
    """Predict in a fork; in this process if there are no forks, or autograd no longer works in them."""
    if not hasattr(os, "fork"):
        return here()
    try:
        return contained_simulation(in_fork, timeout_s=timeout_s)
    except RuntimeError as error:
        if NO_AUTOGRAD_IN_FORKS not in str(error):
            raise
    return here()


def _refused() -> Prediction:
    raise PredictionError(
        "A training step that is a function is predicted in a fork of this process, and autograd works in none: it "
        "has run a backward on an accelerator, or the system has no forks. Predict before training, or give a "
        "LightningModule."
    )


def _fit_copy(
    module: LightningModule, batch: Any, options: dict[str, Any], simulation: Simulation
) -> Prediction:
    """Fit a copy of the module and its plugins in this process, with fake tensors instead of copies."""
    copies = _copies(module, options, simulation)
    return _leaving_no_trace(lambda: _fit(copies.pop(0), batch, copies.pop(0), simulation))


def _copies(module: LightningModule, options: dict[str, Any], simulation: Simulation) -> list[Any]:
    memo: dict[int, Any] = {id(module._trainer): None}
    for tensor in (*module.parameters(), *module.buffers()):
        memo[id(tensor)] = simulation.fakes.twin(tensor)
        if tensor.device.type == "cpu" and not tensor.is_floating_point():
            simulation.values.know(memo[id(tensor)], tensor)
    copies = [copy.deepcopy(module, memo), copy.deepcopy(options, memo)]
    simulation.fakes.forget_twins()  # or tensors that the copy releases would stay alive
    return copies


def _leaving_no_trace(work: Callable[[], Prediction]) -> Prediction:
    numbers, level = GlobalNumbers(), logging.getLogger("lightning.pytorch").level
    try:
        with warnings.catch_warnings():
            return work()
    finally:
        numbers.restore()
        logging.getLogger("lightning.pytorch").setLevel(level)


def _takes_a_batch(function: Callable[..., Any]) -> bool:
    needed = [
        parameter
        for parameter in inspect.signature(function).parameters.values()
        if parameter.default is parameter.empty and parameter.kind in (0, 1)
    ]
    if needed and inspect.isclass(function):
        raise TypeError(
            f"{function.__name__} takes {', '.join(parameter.name for parameter in needed)}; give a function without "
            f"arguments that builds it: lambda: {function.__name__}(...)."
        )
    if len(needed) > 1:
        raise TypeError(
            f"{function} takes {len(needed)} arguments; a function that builds a module takes none, and one that "
            "does a training step takes the batch."
        )
    return len(needed) == 1


def _checked(options: dict[str, Any]) -> tuple[dict[str, Any], int]:
    """The relevant arguments merged with the prediction's own, and the number of ranks (0: no group)."""
    known = inspect.signature(Trainer).parameters
    for name in options:
        if name not in known:
            raise ValueError(
                f"trainer has {name}={options[name]!r}, which is no argument of Lightning's Trainer."
            )
    ranks, changed = many_ranks(options)
    callbacks = options.get("callbacks") or []
    given = [callbacks] if isinstance(callbacks, Callback) else list(callbacks)
    if budgets_among(given):
        raise ValueError(
            "trainer has a MemoryBudget among its callbacks, which measures for itself: leave it out, give the "
            "micro-batch as the batch, and accumulate_grad_batches=2 where a step has more than one micro-batch."
        )
    kept = {name: value for name, value in options.items() if name not in (*_OWN, *_OF_NO_MATTER)}
    callbacks = [one for one in given if not (isinstance(one, _WATCHERS) or says(one, "watches_only"))]
    return {**kept, **_OWN, **changed, "callbacks": callbacks}, ranks


def _fit(
    source: LightningModule | Callable[..., Any], batch: Any, options: dict[str, Any], simulation: Simulation
) -> Prediction:
    """Run Lightning's own loop on fake tensors; changes the module for good."""
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    if isinstance(source, LightningModule):
        simulation.take(source)
    in_ranks = ddp_in_buckets(simulation) if isinstance(simulation, RankSimulation) else nullcontext()
    silent = without_reading_weights()
    with tempfile.TemporaryDirectory(prefix="memkit-") as folder, simulation, in_ranks, silent, explained():
        module = source if isinstance(source, LightningModule) else source()
        if not isinstance(module, LightningModule):
            raise TypeError(
                f"The function built a {type(module).__name__}; it has to build a LightningModule."
            )
        callbacks = [*options["callbacks"], _Phases(simulation)]
        trainer = Trainer(**{**options, "callbacks": callbacks}, max_epochs=1, default_root_dir=folder)
        trainer.fit(module, BatchCopies(batch, STEPS * trainer.accumulate_grad_batches))
        # Lightning steps its optimizer even if there is no loss.
        if trainer.global_step == 0 or "backward" not in simulation.phase_peaks:
            raise PredictionError(
                "No optimizer step was taken: training_step returned None for this batch, or "
                "configure_optimizers gave no optimizer. Give a batch that is trained on."
            )
    return simulation.result()


class _Phases(Callback):
    """Tells a simulation which phase of training begins."""

    def __init__(self, simulation: Simulation) -> None:
        self._simulation = simulation

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._simulation.begin_training(pl_module)

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        self._simulation.begin_step(tensors_of(batch))

    def on_before_optimizer_step(
        self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer
    ) -> None:
        self._simulation.begin_optimizer()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        for optimizer in trainer.optimizers:
            self._simulation.mark_states(optimizer)
        self._simulation.end_step()
