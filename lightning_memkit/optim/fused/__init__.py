"""Whole optimizer steps over bfloat16 weights in one pass over the memory: AdamW, SGD and Lion."""
