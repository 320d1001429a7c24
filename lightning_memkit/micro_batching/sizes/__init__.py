"""Chooses the size of micro-batches: measured within the budget, and timed."""
