"""Validation, test and prediction batches within a budget: whole, or in micro-batches where that is exact."""
