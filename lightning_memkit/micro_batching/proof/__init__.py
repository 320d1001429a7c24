"""Proves that a batch may be split, by comparing trial steps that leave no trace."""
