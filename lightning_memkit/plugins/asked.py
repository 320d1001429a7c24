"""How plugins learn of each other: by attributes that a plugin declares, never by its class.

A plugin that lacks an attribute is not asked. Users' own callbacks may declare them, too.

| attribute | meaning | read by |
|---|---|---|
| `plan_column: str` | the column of a plan's table that this plugin decides | plan |
| `recomputes_activations`, `offloads_states` (bool) | it saves this memory already | MemoryBudget, MemoryReport |
| `watches_only` (bool) | it changes no byte of a step | predictions, which leave it out |
| `probes_contamination` (bool) | it is a contamination probe | PackedDataModule, which adds its own otherwise |
| `averages_after_backward` (bool) | it averages DDP's gradients itself | PureBF16Precision |
| `chosen_for_step` | the plan by which "auto" recomputes | MemoryBudget, which corrects it by a measured peak |
| `usable_bytes_on(device)` | a budget without its headroom | ActivationCheckpointing("auto") |
| `on_states_offloaded()` | of a precision: called where states have come to live in host memory | OptimizerOffload |
| `as_predicted()` | the callback to use in its place in a prediction | predictions of a run under way |
| `without_run()` | a copy without the run's optimizers | predictions of a run under way |
| `shards_by` | the `Sharding` of a strategy | plan, predictions, InitialWeights |
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol, TypeGuard

from lightning.pytorch import Trainer

from lightning_memkit.micro_batching.history import PartsChange


class BatchBudget(Protocol):
    """A callback that runs batches in micro-batches within a budget; it declares `splits_batches = True`."""

    budget: str | int | float
    budget_bytes: int
    micro_batch_size: Any
    effective_batch_size: int | None
    recover: bool
    within: str

    @property
    def history(self) -> Sequence[PartsChange]:
        """The micro-batch sizes used, each with the step from which it applied."""
        ...

    @property
    def retries(self) -> int:
        """How many steps ran out of memory and were retried."""
        ...

    @property
    def peak_bytes(self) -> int:
        """The peak that was verified by measurement."""
        ...

    @property
    def predicted_peaks(self) -> Mapping[int, int]:
        """Predicted peak in bytes by micro-batch size."""
        ...

    @property
    def is_tuning(self) -> bool:
        """Whether sizes are still being timed."""
        ...


def says(plugin: object, name: str) -> bool:
    """Whether a plugin declares the boolean attribute `name` as True."""
    return getattr(plugin, name, False) is True


def splits_batches(callback: object) -> TypeGuard[BatchBudget]:
    """Whether a callback runs batches in micro-batches."""
    return says(callback, "splits_batches")


def callbacks_of(trainer: Trainer) -> list[Any]:
    """A trainer's callbacks, in order."""
    return vars(trainer)["callbacks"]


def refuse_twin(trainer: Trainer, callback: object) -> None:
    """Refuse a second callback of the same class, which would do the same again.

    Raises:
        ValueError: there is one.
    """
    count = sum(type(one) is type(callback) for one in callbacks_of(trainer))
    if count > 1:
        name = type(callback).__name__
        raise ValueError(
            f"The Trainer has {count} {name} callbacks, and takes one: remove the other {name}(...)."
        )


def budgets_among(callbacks: Iterable[object]) -> list[BatchBudget]:
    """The callbacks that run batches in micro-batches."""
    return [one for one in callbacks if splits_batches(one)]


def budget_of(trainer: Trainer) -> BatchBudget | None:
    """The first of a trainer's callbacks that keeps a budget; None if there is none."""
    return next(iter(budgets_among(callbacks_of(trainer))), None)


def plan_columns(callbacks: Iterable[object]) -> list[str]:
    """The columns of a plan that these callbacks have already decided."""
    return [column for one in callbacks if (column := getattr(one, "plan_column", None))]
