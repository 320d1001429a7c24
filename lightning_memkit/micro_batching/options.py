"""The options of a `MemoryBudget`: checked at construction, passed to the engine as one dataclass."""

from dataclasses import dataclass
from typing import Literal, get_args

from lightning_memkit.micro_batching import WeighBy, Weigher
from lightning_memkit.micro_batching.parts.cut import Splitter

Enforce = Literal["verified", "always"]
Within = Literal["auto", "step", "modules"]


@dataclass(frozen=True, kw_only=True)
class BudgetOptions:
    """The arguments of a `MemoryBudget`, and its budget in bytes on the run's device."""

    budget_bytes: int
    budget: str | int | float = "auto"
    headroom: float = 0.05
    split: Splitter | None = None
    micro_batch_size: int | Literal["auto"] = "auto"
    recover: bool = True
    weigh_by: WeighBy | Weigher = "auto"
    enforce: Enforce = "verified"
    effective_batch_size: int | None = None
    within: Within = "auto"

    @property
    def usable_bytes(self) -> int:
        """The budget less its headroom."""
        return int(self.budget_bytes * (1 - self.headroom))

    @property
    def has_open_size(self) -> bool:
        """Whether a batch may run whole: the user has not given the size of its micro-batches."""
        return self.micro_batch_size == "auto" or self.within == "modules"

    @property
    def wants_proof(self) -> bool:
        """Whether it is to be proven how batches are split and weighed; else the user has said it."""
        return self.weigh_by == "auto" and self.split is None


def check_options(
    micro_batch_size: int | str,
    effective_batch_size: int | None,
    weigh_by: object,
    headroom: float,
    enforce: str,
) -> None:
    """Check the arguments of a `MemoryBudget`.

    Raises:
        ValueError: an argument is outside its range.
    """
    if micro_batch_size != "auto" and (not isinstance(micro_batch_size, int) or micro_batch_size < 1):
        raise ValueError(
            f'micro_batch_size={micro_batch_size!r} must be "auto" or a number of samples, 1 or more.'
        )
    if effective_batch_size is not None and effective_batch_size < 1:
        raise ValueError(
            f"effective_batch_size={effective_batch_size} must be 1 or more; leave it out for the loader's batch."
        )
    if not callable(weigh_by) and weigh_by not in get_args(WeighBy):
        raise ValueError(
            f"weigh_by={weigh_by!r} must be one of {', '.join(get_args(WeighBy))}, or a callable."
        )
    if not isinstance(headroom, (int, float)) or not 0 <= headroom < 1:
        raise ValueError(f"headroom={headroom!r} is outside [0, 1); for 5 % write 0.05.")
    if enforce not in get_args(Enforce):
        raise ValueError(f'enforce={enforce!r} must be "verified" or "always".')


def check_within(
    within: str, weigh_by: object, effective_batch_size: int | None, split: Splitter | None
) -> None:
    """Check what a `MemoryBudget` is to split, beside arguments that only splitting a batch gives a meaning.

    Raises:
        ValueError: `within` is unknown, or it rules out another argument.
    """
    if within not in get_args(Within):
        raise ValueError(f"within={within!r} must be one of {', '.join(get_args(Within))}.")
    if within == "modules" and (weigh_by != "auto" or effective_batch_size is not None or split is not None):
        raise ValueError(
            f'within="modules" never splits a batch, and weigh_by={weigh_by!r}, effective_batch_size='
            f"{effective_batch_size} and split={split!r} say how it is split: leave them out, or write "
            'within="auto".'
        )
