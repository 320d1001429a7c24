"""Batches to the training loop: built ahead, resumed, tuned."""
