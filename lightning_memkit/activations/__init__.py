"""Activation checkpointing by block; plain torch."""
