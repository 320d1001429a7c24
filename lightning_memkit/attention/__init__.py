"""Attention that stays within each document of a packed batch: the entry, a file for each backend, adapters."""

from lightning_memkit.attention.adapters import use_packed_attention
from lightning_memkit.attention.door import Backend, packed_attention

__all__ = ["Backend", "packed_attention", "use_packed_attention"]
