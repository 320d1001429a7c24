"""Runs a batch in micro-batches ("parts"): splits it, and joins what it logs and returns."""
