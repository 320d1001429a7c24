"""Plan the training of a LightningModule: the fastest configuration whose predicted peak fits."""

import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm

import lightning_memkit
from lightning_memkit.activations.checkpointing import checkpoint_modules
from lightning_memkit.data.sampling_order import GlobalNumbers
from lightning_memkit.distributed.sharding import Sharding
from lightning_memkit.errors import NoEffectWarning
from lightning_memkit.loss.switch import use_chunked_loss
from lightning_memkit.micro_batching import SplitError, batch_size, split_batch
from lightning_memkit.planning.budget import Budget
from lightning_memkit.planning.choices import (
    COLUMNS,
    GIVEN,
    Choice,
    Family,
    Part,
    checkpointings,
    families,
    losses,
    offloads,
    precisions,
    shardings,
)
from lightning_memkit.planning.plan import Plan
from lightning_memkit.planning.search import Problem, UnavailableError, search
from lightning_memkit.planning.times import TimesByRates, TimesHere
from lightning_memkit.plugins.activation_checkpointing import ActivationCheckpointing
from lightning_memkit.plugins.activation_offload import ActivationOffload
from lightning_memkit.plugins.chunked_loss import ChunkedLoss
from lightning_memkit.plugins.gradient_release import GradientRelease
from lightning_memkit.plugins.memory_budget import MemoryBudget
from lightning_memkit.plugins.optimizer_offload import OptimizerOffload
from lightning_memkit.plugins.prediction import predict_memory
from lightning_memkit.prediction.result import Prediction


def plan(
    module: LightningModule | Callable[[], LightningModule],
    batch: Any,
    budget: Budget | str | int | float = "auto",
    *,
    trainer: Mapping[str, Any] | None = None,
) -> Plan:
    """The fastest configuration that fits a budget, and all others with the reason against them; nothing is allocated.

    Precision, compensation, activation checkpointing, the loss, the micro-batch, on a GPU offload, and DDP and FSDP2
    where `devices` are several, are enumerated. Each is predicted as `predict_memory` does it, some seconds a
    prediction, unless its weights and gradients alone are too much. What fits is ranked by the time of its operators:
    on this machine's CPU they are measured one by one, for a GPU they follow from its rates. What is given in
    `trainer` is kept: a precision, a strategy, a plugin or a callback of a kind leaves nothing of that kind to choose.

    Args:
        module: a LightningModule, or a function without arguments that builds one.
        batch: what the loader will yield: the effective batch, which is trained in parts where it does not fit.
        budget: a `Budget`, or its memory.
        trainer: arguments of the `Trainer` that will train.

    Returns:
        The plan: `Trainer(**plan(...).trainer_kwargs())` trains as planned.

    Raises:
        PredictionError: the module's step can't be predicted.
        ValueError: the budget or an argument of the trainer is outside its range.
    """
    budget = budget if isinstance(budget, Budget) else Budget(budget)
    given = dict(trainer or {})
    device = budget.target()
    columns = {
        "precision": precisions(device),
        "checkpointing": checkpointings(),
        "loss": losses(),
    }
    ranks, nodes = _ranks(given)
    columns["ranks"] = shardings() if ranks > 1 else (Choice(column="ranks", name=""),)
    columns["offload"] = offloads(device)
    columns.update({name: (Choice(column=name, name=GIVEN),) for name in _given_columns(given)})
    seen = _looked_at(module)
    rows, sizes, notes = _sizes(batch, given, seen)
    chosen = [family for family in families(columns) if budget.goal != "exact" or not family.changes]
    predictions = _Predictions(module, _Parts(batch, rows, on_cpu=device is None), given, device or "cpu")
    problem = Problem(
        predict=predictions,
        rows=rows,
        sizes=sizes,
        usable_bytes=budget.usable_bytes(),
        beside_bytes=0 if device is None else device.context_bytes,
        floor=_Floor(seen, ranks, keeps_gradients=not _releases(given)),
        times=TimesHere() if device is None else TimesByRates(device, nodes),
        goal=budget.goal,
        host_bytes_per_second=1.0 if device is None else device.host_bytes_per_second,
    )
    found, missing = search(chosen, problem)
    notes += [f"No choice of {column} here: {reason}" for column, reason in missing.items()]
    return Plan(budget=budget, rows=found, rows_of_batch=rows, given=given, notes=tuple(notes))


def _ranks(given: Mapping[str, Any]) -> tuple[int, int]:
    """How many ranks will train, and on how many nodes."""
    devices, nodes = given.get("devices"), int(given.get("num_nodes") or 1)
    if isinstance(devices, (list, tuple)):
        return len(devices) * nodes, nodes
    counted = str(devices) if devices is not None else ""
    return (int(counted) if counted.isdecimal() else 1) * nodes, nodes


def _given_columns(given: Mapping[str, Any]) -> list[str]:
    """The columns that the user has decided."""
    callbacks, plugins = _listed(given.get("callbacks")), _listed(given.get("plugins"))
    found = []
    if given.get("precision") is not None or any(isinstance(one, (Precision, str)) for one in plugins):
        found.append("precision")
    if given.get("strategy") not in (None, "auto"):
        found.append("ranks")
    if any(isinstance(one, (ActivationOffload, OptimizerOffload)) for one in callbacks):
        found.append("offload")
    if any(isinstance(one, ActivationCheckpointing) for one in callbacks):
        found.append("checkpointing")
    if any(isinstance(one, ChunkedLoss) for one in callbacks):
        found.append("loss")
    return [column for column in COLUMNS if column in found]


def _sizes(
    batch: Any, given: Mapping[str, Any], module: torch.nn.Module
) -> tuple[int, tuple[int, ...], list[str]]:
    """The rows of the batch, the micro-batches that may be chosen, and what is to be said of them."""
    try:
        rows = batch_size(batch)
    except SplitError as error:
        return 1, (1,), [f"The batch is taken whole: {error}"]
    whole = _why_whole(given, module)
    if whole:
        return rows, (rows,), [f"The batch is taken whole: {whole}."]
    for callback in _listed(given.get("callbacks")):
        if isinstance(callback, MemoryBudget):
            note = f"The MemoryBudget that was given stays: its budget is {callback.budget!r}"
            if callback.micro_batch_size == "auto":
                return rows, _all_sizes(rows), [f"{note}, its micro-batch is found by itself."]
            return rows, (min(int(callback.micro_batch_size), rows),), [f"{note}, its micro-batch kept."]
    if any(isinstance(one, _BatchNorm) for one in module.modules()):
        note = "Batch normalization takes the statistics of each part: results change with the micro-batch."
        return rows, tuple(size for size in _all_sizes(rows) if size > 1 or rows == 1), [note]
    return rows, _all_sizes(rows), []


def _releases(given: Mapping[str, Any]) -> bool:
    return any(isinstance(one, GradientRelease) for one in _listed(given.get("callbacks")))


def _all_sizes(rows: int) -> tuple[int, ...]:
    """Those that give another number of parts each."""
    return tuple(sorted({-(-rows // parts) for parts in range(1, rows + 1)}))


def _why_whole(given: Mapping[str, Any], module: torch.nn.Module) -> str:
    if not getattr(module, "automatic_optimization", True):
        return f"{type(module).__name__} optimizes manually, and splits by itself (micro_batches)"
    if _releases(given):
        return "GradientRelease takes one part a step"
    return ""


def _looked_at(module: Any) -> torch.nn.Module:
    """The module, or what a function builds, without memory; an empty one where that can't be."""
    if isinstance(module, LightningModule):
        return module
    numbers = GlobalNumbers()  # a constructor may draw
    with warnings.catch_warnings(), torch.device("meta"):
        warnings.simplefilter("ignore")
        try:
            return module()
        except Exception:  # the prediction will tell
            return torch.nn.Module()
        finally:
            numbers.restore()


class _Floor:
    """What weights and gradients take on a rank, whatever else is chosen: a bound that needs no prediction."""

    def __init__(self, module: torch.nn.Module, ranks: int, *, keeps_gradients: bool) -> None:
        self._parameters = list(module.parameters())
        self._ranks, self._keeps_gradients = ranks, keeps_gradients

    def __call__(self, family: Family) -> int:
        """Bytes of a rank."""
        is_16_bit = any(part.name == "PureBF16Precision" for part in family["precision"].plugins)
        most = 2 if is_16_bit or family["precision"].name == GIVEN else 4
        strategy = family["ranks"].arguments.get("strategy")
        shared = self._ranks if isinstance(strategy, Sharding) or family["ranks"].name == GIVEN else 1
        sizes = [(one.numel() * min(most, one.element_size()), one.requires_grad) for one in self._parameters]
        weights = sum(size for size, _ in sizes)
        gradients = sum(size for size, is_trained in sizes if is_trained) if self._keeps_gradients else 0
        gathered = isinstance(strategy, Sharding) and strategy.stage == 2
        return (weights if gathered else weights // shared) + gradients // shared


class _Parts:
    """A batch, and parts of it: on a GPU a part is alone there, on the CPU the whole batch is where its part is."""

    def __init__(self, batch: Any, rows: int, *, on_cpu: bool) -> None:
        self.batch, self.rows, self._on_cpu = batch, rows, on_cpu

    def first(self, size: int) -> Any:
        """Of so many rows."""
        if size >= self.rows:
            return self.batch
        part = split_batch(self.batch, [size, self.rows - size])[0]
        return part if self._on_cpu else apply_to_collection(part, Tensor, Tensor.clone)


class _Predictions:
    """Predicts a family at a micro-batch, once."""

    def __init__(self, module: Any, parts: _Parts, given: Mapping[str, Any], device: Any) -> None:
        self._module, self._parts, self._device = module, parts, device
        self._given = dict(given)
        self._given["callbacks"] = [
            one for one in _listed(given.get("callbacks")) if not isinstance(one, MemoryBudget)
        ]
        self._known: dict[tuple[Family, int], Prediction] = {}

    def __call__(self, family: Family, size: int) -> Prediction:
        if (family, size) not in self._known:
            self._known[family, size] = self._predicted(family, size)
        return self._known[family, size]

    def _predicted(self, family: Family, size: int) -> Prediction:
        options, callbacks = dict(self._given), list(self._given["callbacks"])
        for choice in family.choices:
            options.update(choice.arguments)
        plugins = [_built(part) for choice in family.choices for part in choice.plugins]
        if plugins:
            options["plugins"] = [*_listed(self._given.get("plugins")), *plugins]
        added = [_built(part) for choice in family.choices for part in choice.callbacks]
        options["callbacks"] = [_Needs(added), *callbacks, *added]
        if size < self._parts.rows:  # two parts are enough: from the second on gradients are there
            options["accumulate_grad_batches"] = max(2, int(options.get("accumulate_grad_batches") or 1))
        return predict_memory(self._module, self._parts.first(size), trainer=options, device=self._device)


class _Needs(Callback):
    """Refuses choices that a module has nothing for, before the callbacks that would warn, or fail."""

    def __init__(self, callbacks: list[Callback]) -> None:
        self._needs_blocks = any(isinstance(one, ActivationCheckpointing) for one in callbacks)
        self._needs_heads = any(isinstance(one, ChunkedLoss) for one in callbacks)

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if not is_overridden("configure_model", pl_module):
            self._check(pl_module)

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if is_overridden("configure_model", pl_module):
            self._check(pl_module)

    def _check(self, module: LightningModule) -> None:
        if self._needs_heads:
            try:
                use_chunked_loss(module)()
            except ValueError as error:
                raise UnavailableError("loss", str(error)) from error
        if self._needs_blocks:
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("error", NoEffectWarning)
                    checkpoint_modules(module)()
            except (ValueError, NoEffectWarning) as error:
                raise UnavailableError("checkpointing", str(error)) from error


def _built(part: Part) -> Any:
    return getattr(lightning_memkit, part.name)(**part.options)


def _listed(value: Any) -> list[Any]:
    return list(value) if isinstance(value, (list, tuple)) else [] if value is None else [value]
