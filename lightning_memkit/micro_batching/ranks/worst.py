"""Agree over ranks on the gravest wrong prediction about a batch, so that all ranks react alike."""

from lightning_memkit.micro_batching.ranks.agreement import largest_of_ranks
from lightning_memkit.micro_batching.run import Run
from lightning_memkit.micro_batching.shares.foreseen import (
    ForeseenElsewhereError,
    ForeseenWronglyError,
    GradientsOutliveError,
    HookStateError,
    KeptConstantError,
    LoneCountError,
    ManyRowsError,
    ManyRowsStateError,
    MistakenTotalsError,
    NewFunctionsError,
    NothingCountedError,
    PartSkippedError,
    StateChangedError,
    UnequalDrawsError,
    UnforeseenLossError,
    UnknownTotalsError,
    VaryingFactorError,
    WholeSkippedError,
)

# In order of what the reaction costs: from running the batch again to whole batches.
FORESEEN_WRONGLY: tuple[type[ForeseenWronglyError], ...] = (
    ForeseenElsewhereError,
    WholeSkippedError,
    MistakenTotalsError,
    NothingCountedError,
    GradientsOutliveError,
    LoneCountError,
    UnknownTotalsError,
    NewFunctionsError,
    UnforeseenLossError,
    StateChangedError,
    UnequalDrawsError,
    VaryingFactorError,
    KeptConstantError,
    PartSkippedError,
    ManyRowsStateError,
    ManyRowsError,
    HookStateError,
)


def worst_of_ranks(run: Run, error: ForeseenWronglyError) -> ForeseenWronglyError:
    """The gravest error of all ranks, on which each of them acts."""
    own = FORESEEN_WRONGLY.index(type(error))
    worst = int(largest_of_ranks(run, [own])[0])
    return error if own == worst else FORESEEN_WRONGLY[worst]("on another rank")
