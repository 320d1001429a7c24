"""Callbacks of one technique each: activation checkpointing and offload, chunked loss, released gradients, ..."""
