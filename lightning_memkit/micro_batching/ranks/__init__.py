"""Coordinates the steps of several ranks."""
