"""A batch whose loss was another one than foreseen: it runs again, with what has been learned of it."""


class ForeseenWronglyError(Exception):
    """A micro-batch, or the batch when it had run, has shown something else than what it was weighed by."""


class ForeseenElsewhereError(ForeseenWronglyError):
    """On another rank: all of them run the batch again."""


class UnknownTotalsError(ForeseenWronglyError):
    """The terms of this batch's loss have unlike shares: what they count in the whole batch has to be known before."""


class LoneCountError(UnknownTotalsError):
    """Nothing tells whether a micro-batch counts what it is divided by: totals have to be looked up before."""


class NothingCountedError(UnknownTotalsError):
    """No micro-batch counted anything: which stands for the batch has to be known before."""


class MistakenTotalsError(UnknownTotalsError):
    """Totals were foretold wrongly, or terms weigh unlike for the first time: this is noted; the batch runs again."""


class UnforeseenLossError(ForeseenWronglyError):
    """A micro-batch's loss has other terms than those that were proven to add up."""


class KeptConstantError(UnforeseenLossError):
    """A learned factor scales a constant with a mean of which micro-batches weigh more than one between them."""


class VaryingFactorError(UnforeseenLossError):
    """What scales a reduction is another one in every micro-batch: rows act on each other by it."""
