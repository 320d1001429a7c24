"""Batches for the training loop: built ahead, resumable, tuned."""
