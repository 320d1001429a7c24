"""Errors for a batch whose loss differs from the prediction by which it was weighed: the batch runs again.

"Foreseen" and "foretold" stand for what was predicted of a batch's loss: its terms, and the totals of their
divisors.
"""


class ForeseenWronglyError(Exception):
    """A micro-batch, or the batch at its end, contradicts the prediction by which it was weighed."""


class ForeseenElsewhereError(ForeseenWronglyError):
    """The prediction was wrong on another rank: all ranks run the batch again."""


class UnknownTotalsError(ForeseenWronglyError):
    """The loss's terms have different shares, so their counts in the whole batch must be known before."""


class LoneCountError(UnknownTotalsError):
    """A divisor may be a count or a lower bound that it is clamped to: totals must be looked up before."""


class NothingCountedError(UnknownTotalsError):
    """No micro-batch counted anything: which one stands for the batch must be decided before."""


class GradientsOutliveError(NothingCountedError):
    """Earlier steps' gradients are there, which no factor may scale: totals must be known before."""


class MistakenTotalsError(UnknownTotalsError):
    """Predicted totals were wrong, or terms have different shares for the first time; this is noted."""


class StateChangedError(ForeseenWronglyError):
    """Micro-batches change state that no trial has seen a step change.

    Attributes:
        names: what they change on this rank; empty if another rank's do.
    """

    def __init__(self, text: str, names: frozenset[str] = frozenset()) -> None:
        super().__init__(text)
        self.names = names


class ManyRowsStateError(ForeseenWronglyError):
    """A whole batch leaves other rows in its module than its micro-batches together, though few rows add up.

    Attributes:
        names: where it leaves them; empty if another rank's does.
    """

    def __init__(self, text: str, names: frozenset[str] = frozenset()) -> None:
        super().__init__(text)
        self.names = names


class WholeSkippedError(ForeseenWronglyError):
    """The step returns None for the whole batch, though not for all micro-batches."""


class UnforeseenLossError(ForeseenWronglyError):
    """A micro-batch's loss has other terms than those that were proven to add up.

    Args:
        name: that of the terms of which it has more or less; empty for other differences.
    """

    def __init__(self, message: str = "", name: str = "") -> None:
        super().__init__(message)
        self.name = name


class NewFunctionsError(UnforeseenLossError):
    """A loss is computed by other functions than those whose results were compared.

    Args:
        edges: the pairs of functions, see `head_of`.
    """

    def __init__(self, message: str = "", edges: frozenset[tuple[str, str]] = frozenset()) -> None:
        shown = ", ".join(sorted(f"{first} of {second}" for first, second in edges)[:3])
        super().__init__(message or f"a loss with functions that were not compared ({shown})")
        self.edges = edges


class UnequalDrawsError(UnforeseenLossError):
    """Micro-batches draw from Python's or NumPy's generators unequally often: their draws depend on rows."""


class KeptConstantError(UnforeseenLossError):
    """A learned factor scales a constant and a mean whose shares exceed 1, because divisors are clamped."""


class HookStateError(UnforeseenLossError):
    """A hook before gradients are zeroed changes what later micro-batches read."""


class PartSkippedError(UnforeseenLossError):
    """The step returned None for micro-batches whose rows count in the whole batch's loss."""


class WholeTermsError(UnforeseenLossError):
    """The whole batch's loss has terms, or divisors, that those of its micro-batches do not have."""


class VaryingFactorError(UnforeseenLossError):
    """A factor of a reduction differs between micro-batches: rows act on each other through it."""


class ManyRowsError(UnforeseenLossError):
    """A whole batch has another loss than its micro-batches together, though few rows add up.

    Args:
        relative_error: by how much they differ.
    """

    def __init__(self, message: str = "", relative_error: float = float("inf")) -> None:
        super().__init__(message)
        self.relative_error = relative_error
