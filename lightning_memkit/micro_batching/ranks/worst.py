"""Ranks act on the worst that one of them has foreseen wrongly."""

from lightning_memkit.micro_batching.ranks.agreement import largest_of_ranks
from lightning_memkit.micro_batching.run import Run
from lightning_memkit.micro_batching.shares.foreseen import (
    ForeseenElsewhereError,
    ForeseenWronglyError,
    KeptConstantError,
    LoneCountError,
    MistakenTotalsError,
    NothingCountedError,
    UnforeseenLossError,
    UnknownTotalsError,
    VaryingFactorError,
)

# From what takes the least of all ranks to what takes the most.
FORESEEN_WRONGLY: tuple[type[ForeseenWronglyError], ...] = (
    ForeseenElsewhereError,
    MistakenTotalsError,
    NothingCountedError,
    LoneCountError,
    UnknownTotalsError,
    UnforeseenLossError,
    VaryingFactorError,
    KeptConstantError,
)


def worst_of_ranks(run: Run, error: ForeseenWronglyError) -> ForeseenWronglyError:
    """What all ranks act on: they have to take the same way."""
    own = FORESEEN_WRONGLY.index(type(error))
    worst = int(largest_of_ranks(run, [own])[0])
    return error if own == worst else FORESEEN_WRONGLY[worst]("on another rank")
