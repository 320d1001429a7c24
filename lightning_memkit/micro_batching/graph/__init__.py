"""Reads the terms of a loss, and what each is divided by, from its autograd graph."""
