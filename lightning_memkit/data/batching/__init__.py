"""From rows to batches: which rank gets which rows, in which order, and as which tensors."""
