"""Why a model can't have packed attention, and what to do instead."""

OWN_ROWS = 'Give each document its own row: packing="none".'
OWN_MASK = (
    "Or let transformers mask its documents: don't switch the model, pass position_ids and use_cache=False, and no "
    "attention_mask"
)
# Where it is not known whether the model's own masks keep documents apart.
MAYBE_OWN_MASK = f"{OWN_ROWS} {OWN_MASK}; probe_contamination tells whether that keeps them apart."


class PackingRefusedError(ValueError):
    """A model can't have packed attention.

    Args:
        reason: a clause that names the model or its part, for messages of others, too.
        more: what else is to be said of it, from the character after the clause on.
        remedy: what to do instead.
    """

    def __init__(self, reason: str, more: str = ".", remedy: str = OWN_ROWS) -> None:
        super().__init__(reason, more, remedy)
        self.reason, self.more, self.remedy = reason, more, remedy

    def __str__(self) -> str:
        return f"{self.reason}{self.more} {self.remedy}"
