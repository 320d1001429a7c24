"""Plan the training of a LightningModule: the fastest configuration whose predicted peak fits."""

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Literal, get_args

import torch
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.strategies import ModelParallelStrategy
from torch.nn.modules.batchnorm import _BatchNorm

from lightning_memkit.data.batching.random_numbers import GlobalNumbers
from lightning_memkit.memory.sizing import chunk_sizes, part_sizes
from lightning_memkit.memory.units import format_bytes
from lightning_memkit.micro_batching import SplitError, batch_size
from lightning_memkit.micro_batching.parts.module_chunks import row_length
from lightning_memkit.planning import choices
from lightning_memkit.planning.budget import Budget, as_written, budget_on
from lightning_memkit.planning.choices import COLUMNS, GIVEN, Choice, Family, listed, refusal
from lightning_memkit.planning.floor import Floor
from lightning_memkit.planning.plan import Plan
from lightning_memkit.planning.problem import Problem, Row, UnavailableError
from lightning_memkit.planning.search import search
from lightning_memkit.planning.times import Times, TimesByRates, TimesHere
from lightning_memkit.plugins.asked import BatchBudget, budgets_among, plan_columns
from lightning_memkit.plugins.planning._first_batch import batch_of
from lightning_memkit.plugins.planning._planned_optimizer import eight_bit_for
from lightning_memkit.plugins.planning._planned_predictions import BatchParts, Predictions
from lightning_memkit.plugins.strategies.fsdp2 import FSDP2Strategy
from lightning_memkit.prediction.devices import Device
from lightning_memkit.prediction.residuals import residual_of

OptimizerStates = Literal["given", "open"]

_TOLD = 0.005  # smaller residuals are not noted


def plan(
    module: LightningModule | Callable[[], LightningModule],
    batch: Any,
    budget: Budget | str | int | float = "auto",
    *,
    trainer: Mapping[str, Any] | None = None,
    device: str | Device = "auto",
    optimizer_states: OptimizerStates = "given",
) -> Plan:
    """Ranks configurations that fit a budget by speed, and says why others don't fit; nothing is allocated.

    Enumerated are precision, compensation, activation checkpointing, the loss, the micro-batch, gradient
    release, offload on a GPU, and DDP and FSDP2 if `devices` are several. Each configuration is predicted as
    by `predict_memory`, in some seconds, unless its weights and gradients alone exceed the budget. Those that
    fit are ranked by the time of their operators: measured one by one on this machine's CPU, computed from
    the rates of a GPU. What `trainer` gives is kept: if it has a precision, a strategy, a plugin or a
    callback of some kind, nothing of that kind is chosen. The optimizer is kept, too, unless its states are
    left open.

    Args:
        module: a LightningModule, or a function without arguments that builds one.
        batch: what the loader will yield, the effective batch, which is split if it does not fit; or the loader, or a
            LightningDataModule, whose first batch is taken. Of a loss over the whole batch (contrastive, say) give
            ``MemoryBudget(within="modules")`` among the Trainer's callbacks: the batch stays whole then, and modules
            run in chunks of its rows.
        budget: a `Budget`, or its memory.
        trainer: arguments of the `Trainer` that will train.
        device: whose memory the budget is of, as in `Budget`; a `Budget` has its own.
        optimizer_states: ``"given"``: as the module's optimizer has them; ``"open"``: also in 8 bits, by
            ``PureBF16Precision(compensation="split24", states="8-bit")`` where no precision was given, and by the
            optimizer of bitsandbytes that takes the same steps (for Adam, AdamW and SGD with momentum). Changes
            numbers.

    Returns:
        The plan: `Trainer(**plan(...).trainer_kwargs())` trains as planned.

    Raises:
        PredictionError: the module's step can't be predicted.
        TypeError: the batch is the name of a file.
        ValueError: the budget or an argument is outside its range.
    """
    if optimizer_states not in get_args(OptimizerStates):
        known = " or ".join(map(repr, get_args(OptimizerStates)))
        raise ValueError(f"optimizer_states={optimizer_states!r} is unknown; write {known}.")
    budget = budget_on(device, budget)
    given = dict(trainer or {})
    target, (ranks, nodes) = budget.target(), _ranks(given)
    seen = _looked_at(module)
    batch = batch_of(batch)
    rows, sizes, notes = _sizes(batch, given, seen)
    predictions = Predictions(module, BatchParts(batch, rows, on_cpu=target is None), given, target or "cpu")
    ask = partial(predictions.ask, rows=sizes[0])
    columns, missing = _columns(given, target, ranks, ask if optimizer_states == "open" else None)
    families = [one for one in choices.families(columns) if budget.goal != "exact" or not one.changes]
    residual = residual_of("cpu" if target is None else target.name)
    if abs(residual - 1) >= _TOLD:
        notes.append(f"Bytes are {residual:.1%} of what is predicted, as earlier runs on this device had it.")
    if target is not None and target.rates_of:
        ability = "with" if target.has_bfloat16 else "without"
        notes.append(
            f"Of {target.name} no data sheet is known: the rates are {target.rates_of}'s, {ability} bfloat16."
        )
    problem = Problem(
        predict=predictions,
        rows=rows,
        sizes=sizes,
        is_whole=any(map(_stays_whole, budgets_among(listed(given.get("callbacks"))))),
        tokens=row_length(batch),
        usable_bytes=budget.usable_bytes(),
        beside_bytes=0 if target is None else target.context_bytes,
        floor=Floor(seen, ranks, on_host=_may_offload(given.get("strategy"))),
        times=_times(budget, target, nodes),
        goal=budget.goal,
        host_bytes_per_second=1.0 if target is None else target.host_bytes_per_second,
        residual=residual,
    )
    found, unavailable = search(families, problem)
    closed = optimizer_states == "given" and budget.goal != "exact"
    hint = _hint(found, problem, ask) if closed and not any(row.fits for row in found) else ""
    return Plan(
        budget=budget,
        rows=found,
        rows_of_batch=rows,
        given=given,
        notes=tuple(notes),
        unavailable=missing | unavailable,
        hint=hint,
    )


def _times(budget: Budget, device: Device | None, nodes: int) -> Times:
    """Operator times: measured if the device is present, computed from its rates otherwise."""
    if device is None:
        return TimesHere()
    by_rates = TimesByRates(device, nodes)
    return by_rates if budget.here is None else TimesHere(budget.here, by_rates)


def _columns(
    given: Mapping[str, Any], device: Device | None, ranks: int, ask: Callable[[Callback], None] | None
) -> tuple[dict[str, tuple[Choice, ...]], dict[str, str]]:
    """The choices of each column, and why some columns have none; `ask` is given if the states are open."""
    columns = {
        "precision": choices.precisions(device, states_open=ask is not None),
        "ranks": choices.shardings(device) if ranks > 1 else (Choice(column="ranks", name=""),),
        "offload": choices.offloads(device),
        "gradients": choices.releases(),
        "checkpointing": choices.checkpointings(),
        "loss": choices.losses(),
    }
    decided, missing = _given_columns(given), dict[str, str]()
    if "gradients" not in decided and (why := _why_unreleased(given, device)):
        columns["gradients"], missing["gradients"] = columns["gradients"][:1], why
    if ask is not None:
        try:
            columns["states"] = choices.optimizer_states(eight_bit_for(ask))
        except UnavailableError as error:
            missing[error.column] = error.reason
    kept = {name: (Choice(column=name, name=GIVEN),) for name in decided}
    if "ranks" in kept:
        kept["ranks"] = (Choice(column="ranks", name=GIVEN, shards=_shards(given.get("strategy"))),)
    return columns | kept, missing


def _hint(rows: Sequence[Row], problem: Problem, ask: Callable[[Callback], None]) -> str:
    """What 8-bit states would save in the smallest configuration, if precision or optimizer may have them."""
    least = min((row for row in rows if row.taken_bytes), key=lambda row: row.taken_bytes, default=None)
    if least is None:
        return ""
    for choice in _eight_bit_choices(least.family, ask):
        family = Family(tuple(choice if one.column == choice.column else one for one in least.family.choices))
        row = Row(family=family) if refusal(family) else problem.row(family, least.micro_batch_size)
        if 0 < row.taken_bytes < least.taken_bytes:
            own = choice.optimizer
            whose = "PureBF16Precision could keep" if own is None else f"{own.replaces} could keep its"
            return (
                f"{whose} states in 8 bits, which changes numbers and is yours to choose; "
                f"{row.words} takes {format_bytes(row.taken_bytes)}: "
                'optimizer_states="open" (memkit plan --optimizer-states open) plans with them.'
            )
    return ""


def _eight_bit_choices(family: Family, ask: Callable[[Callback], None]) -> Iterator[Choice]:
    """Choices with 8-bit states: the precision's, which takes least, where none was given, then the optimizer's."""
    if family["precision"].plugins:  # chosen by the plan, for a device that has bfloat16
        yield choices.seven_bytes()
    try:
        instead = eight_bit_for(ask)
    except Exception:  # there is none, or the user's step fails, which the rows report
        return
    yield choices.optimizer_states(instead)[1]


def _ranks(given: Mapping[str, Any]) -> tuple[int, int]:
    """How many ranks will train, and on how many nodes."""
    devices, nodes = given.get("devices"), int(given.get("num_nodes") or 1)
    if isinstance(devices, (list, tuple)):
        return len(devices) * nodes, nodes
    counted = str(devices) if devices is not None else ""
    return (int(counted) if counted.isdecimal() else 1) * nodes, nodes


def _shards(strategy: Any) -> bool:
    """Whether a strategy shards weights over the ranks."""
    return strategy == FSDP2Strategy.strategy_name or isinstance(strategy, ModelParallelStrategy)


def _may_offload(strategy: Any) -> bool:
    """Whether a strategy may keep weights in host memory."""
    sharding = getattr(strategy, "shards_by", None)
    if sharding is not None:
        return sharding.cpu_offload
    return isinstance(strategy, ModelParallelStrategy)  # it shards as the module says, perhaps with offload


def _given_columns(given: Mapping[str, Any]) -> list[str]:
    """The columns that the user has decided."""
    callbacks, plugins = listed(given.get("callbacks")), listed(given.get("plugins"))
    found = []
    if given.get("precision") is not None or any(isinstance(one, (Precision, str)) for one in plugins):
        found.append("precision")
    if given.get("strategy") not in (None, "auto"):
        found.append("ranks")
    found += plan_columns(callbacks)
    return [column for column in COLUMNS if column in found]


def _sizes(
    batch: Any, given: Mapping[str, Any], module: torch.nn.Module
) -> tuple[int, tuple[int, ...], list[str]]:
    """The rows of the batch, the micro-batch sizes to choose from, and notes about them."""
    try:
        rows = batch_size(batch)
    except SplitError as error:
        return 1, (1,), [f"The batch is taken whole: {error}"]
    whole = _why_whole(given, module)
    if whole:
        return rows, (rows,), [f"The batch is taken whole: {whole}."]
    for budget in budgets_among(listed(given.get("callbacks"))):
        note = f"The MemoryBudget that was given stays: its budget is {as_written(budget.budget)}"
        whole = _stays_whole(budget)
        what, sizes = "micro-batch", tuple(part_sizes(rows))
        if whole:
            what, sizes = "chunk of rows", tuple(sorted({1, *chunk_sizes(rows), rows}))
        if budget.micro_batch_size == "auto":
            return rows, sizes, [f"{note}, its {what} is found by itself."]
        return rows, (min(int(budget.micro_batch_size), rows),), [f"{note}, its {what} kept."]
    if any(isinstance(one, _BatchNorm) for one in module.modules()):
        note = "Batch normalization takes the statistics of each micro-batch: results change with the micro-batch."
        return rows, tuple(size for size in part_sizes(rows) if size > 1 or rows == 1), [note]
    return rows, tuple(part_sizes(rows)), []


def _stays_whole(budget: BatchBudget) -> bool:
    """Whether the step gets whole batches, and modules run in chunks of their rows."""
    return budget.within == "modules"


def _releases(given: Mapping[str, Any]) -> bool:
    return "gradients" in plan_columns(listed(given.get("callbacks")))


def _why_whole(given: Mapping[str, Any], module: torch.nn.Module) -> str:
    if not getattr(module, "automatic_optimization", True):
        return f"{type(module).__name__} optimizes manually, and splits by itself (micro_batches)"
    if _releases(given):
        return "GradientRelease takes one micro-batch a step"
    return ""


def _why_unreleased(given: Mapping[str, Any], device: Device | None) -> str:
    """Why the given arguments exclude released gradients, for reasons that a prediction does not show."""
    if budgets_among(listed(given.get("callbacks"))):
        return "the trial step of the MemoryBudget that was given has all gradients alive."
    precisions = [
        given.get("precision"),
        *(getattr(one, "precision", one) for one in listed(given.get("plugins"))),
    ]
    if device is not None and any(str(one) in ("16", "16-mixed") for one in precisions):
        return "the scaler of float16 looks for overflows in all gradients before the step."
    return ""


def _looked_at(module: Any) -> torch.nn.Module:
    """The module, or the one that a function builds, on the meta device; an empty one if that fails."""
    if isinstance(module, LightningModule):
        return module
    numbers = GlobalNumbers()  # a constructor may draw random numbers
    with warnings.catch_warnings(), torch.device("meta"):
        warnings.simplefilter("ignore")
        try:
            return module()
        except Exception:  # the prediction will report it
            return torch.nn.Module()
        finally:
            numbers.restore()
