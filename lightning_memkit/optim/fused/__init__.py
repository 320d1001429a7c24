"""Whole optimizer steps over bfloat16 weights in one pass over memory: AdamW, SGD and Lion."""
