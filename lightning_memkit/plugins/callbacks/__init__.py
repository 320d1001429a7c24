"""One callback a technique: activation checkpointing and offload, chunked loss, gradient release, ..."""
