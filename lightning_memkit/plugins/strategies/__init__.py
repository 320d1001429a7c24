"""Strategies for one device, FSDP2 and ZeRO-1; how checkpoints are written."""
