"""How large micro-batches are: measured within the budget, and timed."""
