"""Agree over ranks on the gravest wrong prediction about a batch, so that all ranks react alike."""

from lightning_memkit.micro_batching.ranks.agreement import values_of_ranks
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
    WholeTermsError,
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
    WholeTermsError,
    ManyRowsStateError,
    ManyRowsError,
    HookStateError,
)


def worst_of_ranks(run: Run, error: ForeseenWronglyError) -> ForeseenWronglyError:
    """The gravest error of all ranks, on which each of them acts.

    Of several that are as grave, each rank has its own text, and the term's name of the first.
    """
    own = (FORESEEN_WRONGLY.index(type(error)), str(error), getattr(error, "name", ""))
    of_all = values_of_ranks(run, own)
    worst, text, name = max(of_all, key=lambda one: one[0])
    if own[0] != worst:
        error = FORESEEN_WRONGLY[worst](f"on rank {of_all.index((worst, text, name))}: {text}")
    if isinstance(error, UnforeseenLossError):
        error.name = name
    return error
