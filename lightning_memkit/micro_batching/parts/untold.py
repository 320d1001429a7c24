"""What a batch in micro-batches leaves untold: texts of warnings, each shown once a fit."""

REST = (
    "A part of the loss has no gradient, and how it combines from micro-batches is unknown: it is neither a mean over "
    "rows, nor a mean over what a term of the loss counts, nor a sum, or it stands beside a mean over nothing. The "
    "loss that is reported of a batch in micro-batches is not the whole batch's to the digit; gradients are. Log that "
    "number by itself."
)
TERMS = (
    "The terms of the loss weigh unlike in the micro-batches, and what each adds to the loss is computed within a "
    "function that does not show it. The loss that is reported of a batch in micro-batches is not the whole batch's "
    "to the digit; gradients are. Log the terms by themselves."
)
SKIP = (
    "training_step returned None for some micro-batches, and whether it would return None for the whole batch can't "
    "be told, since that does not fit, draws random numbers, or is one of several ranks'. If it would, or if those "
    "rows count in its loss, the result is not the whole batch's: return a loss of zero for rows that count nothing, "
    "or keep the batch whole (micro_batch_size = the loader's batch size)."
)
STATE = (
    "training_step changes {names}, and what the whole batch would leave in it can't be told from what this batch's "
    "micro-batches leave: its value may differ. Change it in on_train_batch_end, or keep the batch whole "
    "(micro_batch_size = the loader's batch size)."
)
