"""Modules that treat rows or tokens independently, run in chunks; plain torch."""
