"""Running a batch in micro-batches: how it is split, and what is logged and returned of it."""
