"""Checkpoints that are streamed to disk, replaced atomically, and read without running code."""
