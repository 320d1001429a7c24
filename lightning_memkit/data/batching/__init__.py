"""Rows to batches: whose they are, in which order, and as tensors."""
