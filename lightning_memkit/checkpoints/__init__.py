"""Checkpoints that are written tensor by tensor, appear whole or not at all, and are read without running code."""
