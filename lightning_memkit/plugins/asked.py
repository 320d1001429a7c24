"""What plugins ask of each other: by what a plugin says of itself, never by its class.

A plugin says it by attributes; whoever has none of them is asked nothing. Users' own callbacks may say it, too.

| attribute | says | asked by |
|---|---|---|
| `plan_column: str` | what a plan may choose: the column of its table | plan |
| `recomputes_activations`, `offloads_states` (bool) | what it saves already | MemoryBudget's remedies |
| `watches_only` (bool) | it changes no byte of a step | predictions leave it out |
| `probes_contamination` (bool) | it is a probe | PackedDataModule adds its own otherwise |
| `averages_after_backward` (bool) | it averages DDP's gradients itself | PureBF16Precision |
| `chosen_for_step` | what "auto" recomputes by | MemoryBudget corrects it by a measured peak |
| `usable_bytes_on(device)` | a budget without its headroom | ActivationCheckpointing("auto") |
| `as_predicted()` | what a prediction takes in its place | predictions of a run under way |
| `without_run()` | itself without a run's optimizers | predictions of a run under way |
| `shards_by` | the `Sharding` of a strategy | plan, predictions, InitialWeights |
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol, TypeGuard

from lightning.pytorch import Trainer

from lightning_memkit.micro_batching.history import PartsChange


class BatchBudget(Protocol):
    """A callback that runs batches in micro-batches within a budget: it says `splits_batches = True`."""

    budget: str | int | float
    budget_bytes: int
    micro_batch_size: Any
    effective_batch_size: int | None
    recover: bool

    @property
    def history(self) -> Sequence[PartsChange]:
        """From which step on micro-batches had which size."""
        ...

    @property
    def retries(self) -> int:
        """Steps that ran out of memory and were taken again."""
        ...

    @property
    def peak_bytes(self) -> int:
        """The verified peak."""
        ...

    @property
    def predicted_peaks(self) -> Mapping[int, int]:
        """Predicted bytes by micro-batch."""
        ...

    @property
    def is_tuning(self) -> bool:
        """Whether sizes are still being timed."""
        ...


def says(plugin: object, name: str) -> bool:
    """Whether a plugin says of itself that it does something."""
    return getattr(plugin, name, False) is True


def splits_batches(callback: object) -> TypeGuard[BatchBudget]:
    """Whether a callback runs batches in micro-batches."""
    return says(callback, "splits_batches")


def callbacks_of(trainer: Trainer) -> list[Any]:
    """A trainer's callbacks, in order."""
    return vars(trainer)["callbacks"]


def budgets_among(callbacks: Iterable[object]) -> list[BatchBudget]:
    """The callbacks that run batches in micro-batches."""
    return [one for one in callbacks if splits_batches(one)]


def budget_of(trainer: Trainer) -> BatchBudget | None:
    """The first of a trainer's callbacks that keeps a budget."""
    return next(iter(budgets_among(callbacks_of(trainer))), None)


def plan_columns(callbacks: Iterable[object]) -> list[str]:
    """The columns of a plan that some callbacks have decided."""
    return [column for one in callbacks if (column := getattr(one, "plan_column", None))]
