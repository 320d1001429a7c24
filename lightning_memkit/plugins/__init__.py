"""Thin Lightning adapters; the only modules that import Lightning (with cli.py)."""
